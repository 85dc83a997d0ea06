"""Painting textured objects that stand out from what is behind them."""

import cv2
import numpy as np

from .masks import SUBPIXELS, measure_coverage
from .textures import PATTERNS, colour_pattern, draw_colours

RIM_WIDTH = 2
# Least colour distance (grey levels) from what is behind, over nine tenths of the rim.
RIM_CONTRAST = 90


def paint(
    rng: np.random.Generator, picture: np.ndarray, mask: np.ndarray, contrast: tuple[float, float]
) -> None:
    """Paint an object over a picture, in place, with soft edges.

    Colours are drawn until they differ from the picture along the object's rim.

    Args:
        rng (np.random.Generator): Source of the pattern and its colours.
        picture (np.ndarray): Float32 picture (H, W, 3).
        mask (np.ndarray): The object, on the fine grid of ``masks``.
        contrast (tuple[float, float]): Range of the distance of the texture's two colours.
    """
    x, y, width, height = cv2.boundingRect(mask)
    rows, columns = (
        slice(max(start // SUBPIXELS - RIM_WIDTH, 0), (start + length) // SUBPIXELS + RIM_WIDTH + 1)
        for start, length in ((y, height), (x, width))
    )
    around = picture[rows, columns]
    coverage = measure_coverage(mask)[rows, columns]
    inside = (coverage >= 0.5).astype(np.uint8)
    window = np.ones((2 * RIM_WIDTH + 1, 2 * RIM_WIDTH + 1), np.uint8)
    behind = around[cv2.dilate(inside, window) > inside]
    pattern = PATTERNS[rng.choice(list(PATTERNS))](rng, *inside.shape)
    while True:
        colours = draw_colours(rng, contrast)
        distances = np.linalg.norm(behind - colours.mean(axis=0), axis=1)
        if np.quantile(distances, 0.1) >= RIM_CONTRAST:
            break
    around += coverage[..., None] * (colour_pattern(pattern, colours) - around)
