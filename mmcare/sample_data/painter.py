"""Paint textured shapes on textured grounds, by random choices of a given generator.

Lengths are in pixels, angles in radians, colours from 0 to 255. Points are (x, y), from the top
left corner of the image. Pictures are float32 (H, W, 3).
"""

from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np

PATTERNS = ('stripes', 'checks', 'dots', 'grain', 'clouds')
VISIBLE = 0.75  # least share of each object that stays visible
RIM_CONTRAST = 90  # least distance of an object's colour from the ground around its rim


def draw_pattern(
    rng: np.random.Generator, name: str, height: int, width: int, angles: Sequence = (0, np.pi)
) -> np.ndarray:
    """Draw one of ``PATTERNS`` as a float32 array (height, width) of values from 0 to 1.

    Its direction is in the range ``angles``; grain (fine noise) and clouds (soft changes over tens
    of pixels) have none.
    """
    if name == 'grain':
        noise = rng.standard_normal((height, width), dtype=np.float32)
        smooth = cv2.GaussianBlur(noise, (0, 0), rng.uniform(0.5, 0.9))
        return np.clip(0.5 + 0.25 * smooth / smooth.std(), 0, 1)
    if name == 'clouds':
        cell = rng.uniform(24, 40)
        coarse = rng.random((int(height / cell) + 4, int(width / cell) + 4), dtype=np.float32)
        full = cv2.resize(coarse, None, fx=cell, fy=cell, interpolation=cv2.INTER_CUBIC)
        # Without the outermost cells, which are flat: the border is repeated there.
        top, left = (int(cell * rng.uniform(0.5, 1.5)) for _ in range(2))
        return np.clip(full[top : top + height, left : left + width], 0, 1)
    angle, period = rng.uniform(*angles), rng.uniform(7, 14)
    y, x = np.mgrid[:height, :width].astype(np.float32)
    u = (x * np.cos(angle) + y * np.sin(angle)) / period + rng.random()
    v = (y * np.cos(angle) - x * np.sin(angle)) / period + rng.random()
    if name == 'stripes':
        wave = 0.5 + 1.5 * np.sin(2 * np.pi * u)
    elif name == 'checks':
        wave = 0.5 + 3 * np.sin(2 * np.pi * u) * np.sin(2 * np.pi * v)
    else:
        wave = (0.36 - np.hypot(u % 1 - 0.5, v % 1 - 0.5)) * 8
    return np.clip(wave, 0, 1).astype(np.float32)


def draw_colours(
    rng: np.random.Generator, contrast: tuple[float, float], chroma: float | None = None
) -> np.ndarray:
    """Draw two colours, float32 (2, 3); ``contrast`` is the range of their distance.

    ``chroma`` scales how far they are from grey: 0 gives greys. None: any colours.
    """
    middle, direction = rng.uniform(30, 225, size=3), rng.standard_normal(3)
    if chroma is not None:
        middle = rng.uniform(115, 140) + chroma * (middle - 127.5)
        direction = rng.choice([-1, 1]) + chroma * direction
    step = rng.uniform(*contrast) * direction / np.linalg.norm(direction)
    return np.clip([middle - step / 2, middle + step / 2], 0, 255).astype(np.float32)


def colour(pattern: np.ndarray, colours: np.ndarray) -> np.ndarray:
    """Mix two colours (2, 3) by a pattern (H, W) from 0 to 1."""
    return colours[0] + pattern[..., None] * (colours[1] - colours[0])


def draw_ground(rng: np.random.Generator, size: int, contrast: tuple[float, float]) -> np.ndarray:
    """Draw a square picture of any pattern in any two colours."""
    pattern = draw_pattern(rng, rng.choice(PATTERNS), size, size)
    return colour(pattern, draw_colours(rng, contrast))


def draw_outline(
    rng: np.random.Generator, shape: str, size: float, centre: np.ndarray, tilt: float
) -> np.ndarray:
    """Draw the outline of a shape with random proportions and rotation: corners (N, 2).

    Args:
        shape: ``'disc'``, ``'kite'``, ``'cross'`` (a Latin one), ``'star'`` (with five points) or
            ``'blob'`` (a smooth curve).
        size: Longer side of the upright box around the rotated shape.
        centre: Centre (x, y) of that box.
        tilt: Largest rotation to either side.
    """
    angles = np.linspace(0, 2 * np.pi, 10 if shape == 'star' else 72, endpoint=False)
    radii = np.ones(len(angles))
    if shape == 'star':
        radii[1::2] = rng.uniform(0.38, 0.46)
    elif shape == 'blob':
        for frequency in (2, 3, 4):
            phase = rng.uniform(0, 2 * np.pi)
            radii += rng.uniform(0.1, 0.25) * np.cos(frequency * angles + phase)
    points = radii[:, None] * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    if shape == 'kite':
        half, shoulder = rng.uniform(0.28, 0.36), rng.uniform(0.3, 0.42)
        points = np.array([[0, 0], [half, shoulder], [0, 1], [-half, shoulder]])
    elif shape == 'cross':
        arm, bar = rng.uniform(0.12, 0.15), rng.uniform(0.36, 0.46)
        top, bottom = bar - arm, bar + arm
        right = [[arm, 0], [arm, top], [0.5, top], [0.5, bottom], [arm, bottom], [arm, 1]]
        points = np.array(right + [[-x, y] for x, y in reversed(right)])
    angle = rng.uniform(-tilt, tilt)
    cosine, sine = np.cos(angle), np.sin(angle)
    points = points @ np.array([[cosine, sine], [-sine, cosine]])
    low, high = points.min(axis=0), points.max(axis=0)
    return (points - (low + high) / 2) * (size / (high - low).max()) + centre


def paint_objects(
    rng: np.random.Generator,
    picture: np.ndarray,
    shapes: Sequence[str],
    sizes: tuple[float, float],
    tilt: float,
    contrast: tuple[float, float],
) -> list[np.ndarray]:
    """Paint shapes over a picture, in place, from back to front, with soft edges.

    Three quarters of each object stay visible, also at the border of the picture, and its colours
    differ from the ground around its rim. ``sizes`` and ``contrast`` are ranges, of the objects'
    sizes and of the distance of an object's two colours; for shapes and tilt see
    :func:`draw_outline`.

    Returns:
        The visible part of each object, a boolean mask (H, W).
    """
    height, width = picture.shape[:2]
    areas: list[float] = []
    masks: list[np.ndarray] = []
    while len(masks) < len(shapes):
        # Larger objects are more frequent, since many shapes cover little of their box.
        size = rng.triangular(sizes[0], sizes[1], sizes[1])
        centre = rng.uniform(0.05, 0.95, size=2) * (width, height)
        outline = draw_outline(rng, shapes[len(masks)], size, centre, tilt)
        cover = np.zeros((height, width), np.uint8)
        # Fixed-point numbers, counted from the centre of the first pixel.
        corners = np.round((outline - 0.5) * 16).astype(np.int32)
        cv2.fillPoly(cover, [corners], 255, cv2.LINE_AA, shift=4)
        mask = cover > 127
        visible = [*(other & ~mask for other in masks), mask]
        wanted = [*areas, cv2.contourArea(outline.astype(np.float32))]
        if any(part.sum() < VISIBLE * area for part, area in zip(visible, wanted)):
            continue
        areas, masks = wanted, visible
        rim = picture[cv2.dilate(mask.astype(np.uint8), np.ones((5, 5), np.uint8)) > mask]
        colours = draw_colours(rng, contrast)
        while np.quantile(np.linalg.norm(rim - colours.mean(axis=0), axis=1), 0.1) < RIM_CONTRAST:
            colours = draw_colours(rng, contrast)
        pattern = draw_pattern(rng, rng.choice(PATTERNS), height, width)
        picture += cover[..., None] / np.float32(255) * (colour(pattern, colours) - picture)
    return masks
