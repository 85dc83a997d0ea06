"""A contact sheet for a person to look at."""

from pathlib import Path

import cv2
import numpy as np

from .output import write_image

SCENES = 12
SCALE = 2
COLUMNS = 3
GAP = 4


def write_contact_sheet(path: Path, pairs: list[tuple[np.ndarray, np.ndarray]]) -> None:
    """Write pairs of pictures, each scene beside its annotated copy, as one PNG file.

    Args:
        path (Path): The file to write.
        pairs (list[tuple[np.ndarray, np.ndarray]]): Uint8 pictures (H, W, 3) of one size.
    """
    gap = np.full((pairs[0][0].shape[0], GAP, 3), 255, np.uint8)
    tiles = [
        cv2.copyMakeBorder(
            np.hstack([plain, gap, annotated]),
            2 * GAP,
            2 * GAP,
            2 * GAP,
            2 * GAP,
            cv2.BORDER_CONSTANT,
            value=(255, 255, 255),
        )
        for plain, annotated in pairs
    ]
    tiles += [np.full_like(tiles[0], 255)] * (-len(tiles) % COLUMNS)
    rows = [np.hstack(tiles[start : start + COLUMNS]) for start in range(0, len(tiles), COLUMNS)]
    write_image(path, np.vstack(rows))


def enlarge(picture: np.ndarray) -> np.ndarray:
    """Enlarge a picture, so that thin lines and small text can be drawn on it."""
    return cv2.resize(picture, None, fx=SCALE, fy=SCALE, interpolation=cv2.INTER_NEAREST)


def write_text(picture: np.ndarray, text: str, position: tuple[int, int]) -> None:
    """Write small text with a shadow on a picture, in place, its lower left corner at (x, y)."""
    x, y = position
    for shift, colour in ((1, (0, 0, 0)), (0, (255, 255, 255))):
        cv2.putText(
            picture,
            text,
            (x + shift, y + shift),
            cv2.FONT_HERSHEY_SIMPLEX,
            0.4,
            colour,
            1,
            cv2.LINE_AA,
        )
