"""Masks on a grid finer than the pixels, and the annotations that COCO derives from masks.

A mask is a uint8 array (``height * SUBPIXELS``, ``width * SUBPIXELS``) of zeros and ones.
Measuring on the fine grid keeps thin parts, and the borders, right to a fraction of a pixel.
"""

import cv2
import numpy as np

SUBPIXELS = 4


def fill_outline(outline: np.ndarray, height: int, width: int) -> np.ndarray:
    """Rasterise an outline (N, 2), given in pixels, that may reach out of the image."""
    mask = np.zeros((height * SUBPIXELS, width * SUBPIXELS), np.uint8)
    # fillPoly counts from the centre of the first cell, and takes fixed-point numbers.
    fixed_point = np.round((outline * SUBPIXELS - 0.5) * 16).astype(np.int32)
    return cv2.fillPoly(mask, [fixed_point], 1, shift=4)


def measure_coverage(mask: np.ndarray) -> np.ndarray:
    """Share (H, W) of each pixel that the mask covers, as float32."""
    size = (mask.shape[1] // SUBPIXELS, mask.shape[0] // SUBPIXELS)
    return cv2.resize(mask * np.uint8(255), size, interpolation=cv2.INTER_AREA) / np.float32(255)


def measure_area(mask: np.ndarray) -> float:
    """Area in pixels."""
    return cv2.countNonZero(mask) / SUBPIXELS**2


def find_box(mask: np.ndarray) -> list[float]:
    """Box (x, y, width, height) in pixels, as in COCO's ``bbox``."""
    return [value / SUBPIXELS for value in cv2.boundingRect(mask)]


def find_polygons(mask: np.ndarray) -> list[list[float]] | None:
    """Outlines of a mask that is not empty, one for each part, as in COCO's ``segmentation``.

    Returns:
        list[list[float]] or None: ``[x1, y1, x2, y2, ...]`` in pixels for each part; None for a
        mask with a hole, which polygons cannot express.
    """
    x, y, width, height = cv2.boundingRect(mask)
    # One more doubling puts the traced cell centres within 1/16 pixel of the true border.
    fine = cv2.resize(
        mask[y : y + height, x : x + width], None, fx=2, fy=2, interpolation=cv2.INTER_NEAREST
    )
    contours, hierarchy = cv2.findContours(
        fine, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_SIMPLE, offset=(2 * x, 2 * y)
    )
    if (hierarchy[0, :, 3] >= 0).any():
        return None
    simplified = (cv2.approxPolyDP(contour, 1.5, closed=True) for contour in contours)
    return [((points.ravel() + 0.5) / (2 * SUBPIXELS)).tolist() for points in simplified]


def encode_runs(pixels: np.ndarray) -> dict:
    """COCO's uncompressed run-length encoding, the form that COCO uses for crowds.

    Args:
        pixels (np.ndarray): A boolean array (H, W), at the image's resolution.

    Returns:
        dict: ``size`` [H, W] and ``counts``, the lengths of alternating runs of zeros and ones,
        down the columns, beginning with zeros.
    """
    flat = pixels.ravel(order='F')
    starts = np.flatnonzero(np.diff(flat, prepend=False))
    counts = np.diff(starts, prepend=0, append=flat.size)
    return {'size': list(pixels.shape), 'counts': counts.tolist()}
