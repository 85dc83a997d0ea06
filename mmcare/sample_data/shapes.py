"""Outlines of simple shapes: what tells the category of a sample object."""

from collections.abc import Callable

import numpy as np


def _circle_angles(count: int) -> np.ndarray:
    return np.linspace(0, 2 * np.pi, count, endpoint=False)


def _polar(radii: np.ndarray) -> np.ndarray:
    angles = _circle_angles(len(radii))
    return np.stack([radii * np.cos(angles), radii * np.sin(angles)], axis=1)


def disc(rng: np.random.Generator) -> np.ndarray:
    """A circle."""
    return _polar(np.ones(72))


def kite(rng: np.random.Generator) -> np.ndarray:
    """A slender quadrilateral with one axis of symmetry."""
    half_width = rng.uniform(0.28, 0.36)
    shoulder = rng.uniform(0.3, 0.42)
    return np.array([[0, 0], [half_width, shoulder], [0, 1], [-half_width, shoulder]])


def cross(rng: np.random.Generator) -> np.ndarray:
    """A Latin cross: an airplane seen from above."""
    half_arm = rng.uniform(0.12, 0.15)
    bar = rng.uniform(0.36, 0.46)
    right = [
        [half_arm, 0],
        [half_arm, bar - half_arm],
        [0.5, bar - half_arm],
        [0.5, bar + half_arm],
        [half_arm, bar + half_arm],
        [half_arm, 1],
    ]
    left = [[-x, y] for x, y in reversed(right)]
    return np.array(right + left)


def star(rng: np.random.Generator) -> np.ndarray:
    """A star with five points."""
    return _polar(np.where(np.arange(10) % 2, rng.uniform(0.38, 0.46), 1.0))


def blob(rng: np.random.Generator) -> np.ndarray:
    """A smooth closed curve without any regularity."""
    angles = _circle_angles(72)
    radii = np.ones(72)
    for frequency in (2, 3, 4):
        radii += rng.uniform(0.1, 0.25) * np.cos(frequency * angles + rng.uniform(0, 2 * np.pi))
    return _polar(radii)


SHAPES: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    shape.__name__: shape for shape in (disc, kite, cross, star, blob)
}


def draw_outline(
    rng: np.random.Generator,
    shape: str,
    size: float,
    centre: np.ndarray,
    tilt: float = np.pi,
) -> np.ndarray:
    """Draw a shape at a random rotation.

    Args:
        rng (np.random.Generator): Source of the rotation and of the shape's own proportions.
        shape (str): A key of ``SHAPES``.
        size (float): Longer side of the upright box around the rotated shape, in pixels.
        centre (np.ndarray): Centre (x, y) of that box, in pixels.
        tilt (float): Largest rotation to either side, in radians.

    Returns:
        np.ndarray: Corners (N, 2) as (x, y), in pixels; (0, 0) is the image's top left corner.
    """
    points = SHAPES[shape](rng)
    angle = rng.uniform(-tilt, tilt)
    cosine, sine = np.cos(angle), np.sin(angle)
    points = points @ np.array([[cosine, sine], [-sine, cosine]])
    low, high = points.min(axis=0), points.max(axis=0)
    return (points - (low + high) / 2) * (size / (high - low).max()) + centre
