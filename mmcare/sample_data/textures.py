"""Textures: a pattern between two random colours."""

from collections.abc import Callable

import cv2
import numpy as np

ANY_ANGLE = (0.0, np.pi)
MIDDLE_GREYS = (115, 140)


def _rotated_grid(
    rng: np.random.Generator, height: int, width: int, angles: tuple[float, float]
) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates counted in periods, of random length, direction and origin."""
    angle = rng.uniform(*angles)
    period = rng.uniform(7, 14)
    y, x = np.mgrid[:height, :width].astype(np.float32)
    u = (x * np.cos(angle) + y * np.sin(angle)) / period + rng.uniform()
    v = (y * np.cos(angle) - x * np.sin(angle)) / period + rng.uniform()
    return u.astype(np.float32), v.astype(np.float32)


def stripes(
    rng: np.random.Generator, height: int, width: int, angles: tuple[float, float] = ANY_ANGLE
) -> np.ndarray:
    """Parallel bars."""
    u, _ = _rotated_grid(rng, height, width, angles)
    return np.clip(0.5 + 1.5 * np.sin(2 * np.pi * u), 0, 1)


def checks(
    rng: np.random.Generator, height: int, width: int, angles: tuple[float, float] = ANY_ANGLE
) -> np.ndarray:
    """A chessboard."""
    u, v = _rotated_grid(rng, height, width, angles)
    return np.clip(0.5 + 3 * np.sin(2 * np.pi * u) * np.sin(2 * np.pi * v), 0, 1)


def dots(
    rng: np.random.Generator, height: int, width: int, angles: tuple[float, float] = ANY_ANGLE
) -> np.ndarray:
    """Round spots on a square grid."""
    u, v = _rotated_grid(rng, height, width, angles)
    distance = np.hypot(u - np.floor(u) - 0.5, v - np.floor(v) - 0.5)
    return np.clip((0.36 - distance) * 8, 0, 1)


def grain(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Fine noise."""
    noise = rng.standard_normal((height, width), dtype=np.float32)
    smooth = cv2.GaussianBlur(noise, (0, 0), rng.uniform(0.5, 0.9))
    return np.clip(0.5 + 0.25 * smooth / smooth.std(), 0, 1)


def clouds(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Soft changes over tens of pixels."""
    cell = rng.uniform(24, 40)
    rows, columns = int(height / cell) + 4, int(width / cell) + 4
    coarse = rng.uniform(size=(rows, columns)).astype(np.float32)
    full = cv2.resize(coarse, None, fx=cell, fy=cell, interpolation=cv2.INTER_CUBIC)
    # The outermost cells are left out: the border is repeated there, which flattens the pattern.
    top, left = (int(cell * rng.uniform(0.5, 1.5)) for _ in range(2))
    return np.clip(full[top : top + height, left : left + width], 0, 1)


PATTERNS: dict[str, Callable[[np.random.Generator, int, int], np.ndarray]] = {
    pattern.__name__: pattern for pattern in (stripes, checks, dots, grain, clouds)
}
DIRECTED = ('stripes', 'checks', 'dots')  # these take the range of their angles, in radians


def draw_colours(
    rng: np.random.Generator, contrast: tuple[float, float], chroma: float | None = None
) -> np.ndarray:
    """Draw the two colours of a texture.

    Args:
        rng (np.random.Generator): Source of the colours.
        contrast (tuple[float, float]): Range of their distance, in grey levels.
        chroma (float | None): How colourful they are, 0 for greys, around a middle grey; by
            default they are drawn from the whole colour space.

    Returns:
        np.ndarray: Float32 (2, 3), values between 0 and 255.
    """
    middle = rng.uniform(30, 225, size=3)
    direction = rng.standard_normal(3)
    if chroma is not None:
        middle = rng.uniform(*MIDDLE_GREYS) + chroma * (middle - 127.5)
        direction = rng.choice([-1, 1]) + chroma * direction
    step = rng.uniform(*contrast) * direction / np.linalg.norm(direction)
    return np.clip([middle - step / 2, middle + step / 2], 0, 255).astype(np.float32)


def colour_pattern(pattern: np.ndarray, colours: np.ndarray) -> np.ndarray:
    """Mix two colours (2, 3) as a pattern (H, W) says: a float32 picture (H, W, 3)."""
    return colours[0] + pattern[..., None].astype(np.float32) * (colours[1] - colours[0])
