"""Turn a picture into what a file takes, by its description."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, Mapping, Sequence, Tuple

import cv2
import numpy as np

from mmcare_runtime.text import escape

Place = Tuple[int, int, int, int]  # of a picture in an image: top, left, height, width
PICTURES = ('.bmp', '.jpeg', '.jpg', '.png', '.ppm', '.tif', '.tiff', '.webp')  # suffixes
LARGEST_AREA = 2**28  # of resized pictures, in pixels
CV2_CODES = {
    'nearest': cv2.INTER_NEAREST,
    'bilinear': cv2.INTER_LINEAR,
    'bicubic': cv2.INTER_CUBIC,
    'area': cv2.INTER_AREA,
    'lanczos': cv2.INTER_LANCZOS4,
}


def read_picture(path: str | os.PathLike[str], channels: int = 3) -> np.ndarray:
    """Read a picture as pixels (H, W, C): BGR or gray for three channels or one, else as it is.

    Raises:
        FileNotFoundError: If there is no file.
        ValueError: If it is not a picture.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(escape(f'{file} is not a file'))
    flag = {3: cv2.IMREAD_COLOR, 1: cv2.IMREAD_GRAYSCALE}.get(channels, cv2.IMREAD_UNCHANGED)
    data = np.fromfile(str(file), np.uint8)  # cv2.imread knows only ASCII names on Windows
    try:
        pixels = cv2.imdecode(data, flag) if len(data) else None
    except cv2.error:
        pixels = None
    if pixels is None:
        raise ValueError(escape(f'{file} is not a picture'))
    return np.atleast_3d(pixels)


def check_pixels(pixels: Any, channels: int) -> np.ndarray:
    """Return pixels as (H, W, channels).

    Args:
        pixels: uint8, (H, W, 3) in BGR, (H, W) or (H, W, 1); or as many channels as the file takes.
        channels: That the file takes. Colours become gray for one, gray becomes BGR for three.

    Raises:
        ValueError: If they are something else.
    """
    taken = 'uint8 pixels (H, W, 3) in BGR, (H, W) or (H, W, 1)'
    if channels not in (1, 3):
        taken = f'uint8 pixels (H, W, {channels})'
    if not isinstance(pixels, np.ndarray):
        hint = ': did the camera give a picture?' if pixels is None else ''
        raise ValueError(f'a path or {taken} are expected, got {type(pixels).__name__}{hint}')
    shape = pixels.shape
    if pixels.dtype != np.uint8 or len(shape) not in (2, 3) or not pixels.size:
        raise ValueError(f'{taken} are expected, got {pixels.dtype} {shape}')
    pixels = np.atleast_3d(pixels)
    number = pixels.shape[2]
    if number == channels:
        return pixels
    if (number, channels) == (1, 3):
        return cv2.cvtColor(np.ascontiguousarray(pixels), cv2.COLOR_GRAY2BGR)
    if (number, channels) == (3, 1):
        return cv2.cvtColor(np.ascontiguousarray(pixels), cv2.COLOR_BGR2GRAY)[..., None]
    raise ValueError(f'{taken} are expected, got {pixels.dtype} {shape}')


def prepare(
    pixels: np.ndarray, taken: Mapping[str, Any], shape: Sequence[int]
) -> tuple[np.ndarray, Place]:
    """Resize, crop, normalize and pad pixels (H, W, C) to an image (1, C, *shape).

    Args:
        pixels: uint8, in BGR if there are three channels.
        taken: Describes the input of a file.
        shape: Its height and width.

    Returns:
        The image, uint8 if the file takes that and otherwise float32, and where the picture is in
        it.

    Raises:
        ValueError: If the description does not say how pictures are prepared, or makes an image
            that is larger than the file's.
    """
    if taken['kind'] == 'tensor' and not taken['mean']:
        raise ValueError('the file does not name mean and std of images')
    pixels = resize(pixels, taken['resize'] or {}, shape, fit=bool(taken['resize']))
    if taken['channels'] == 'RGB':
        pixels = pixels[..., ::-1]
    height, width, channels = pixels.shape
    if height > shape[0] or width > shape[1]:
        raise ValueError(
            f'the test pipeline makes an image of {height}x{width}, the file takes '
            f'{shape[0]}x{shape[1]}: give the pipeline a Resize or a CenterCrop'
        )
    top = left = 0
    if taken.get('letterbox') == 'center':
        top, left = (shape[0] - height) // 2, (shape[1] - width) // 2
    dtype = np.dtype(taken.get('dtype', 'float32'))
    values = np.arange(256, dtype=np.float32)
    image = np.empty((1, channels, *shape), dtype)
    for channel, plane in enumerate(image[0]):
        plane[:] = taken['padding'][channel]
        inside = plane[top : top + height, left : left + width]
        if dtype == np.uint8:
            inside[:] = pixels[..., channel]
            continue
        table = values
        if taken['kind'] == 'tensor':
            mean, std = np.float32(taken['mean'][channel]), np.float32(taken['std'][channel])
            table = (values - mean) / std
        inside[:] = table[pixels[..., channel]]
    return image, (top, left, height, width)


def resize(
    pixels: np.ndarray, options: Mapping[str, Any], shape: Sequence[int], fit: bool = True
) -> np.ndarray:
    """Resize pixels (H, W, C) as the input's ``resize`` says, and crop them.

    Without ``fit``, they are only made smaller: the test pipeline leaves sizes as they are.
    """
    sides = pixels.shape[:2]
    if options.get('shorter'):
        target = [max(side * options['shorter'] // min(sides), 1) for side in sides]
    else:
        ratio = min(whole / side for whole, side in zip(shape, sides))
        ratio = ratio if fit else min(ratio, 1)
        target = [max(round(side * ratio), 1) for side in sides]
    height, width = target
    interpolation = options.get('interpolation', 'bilinear')
    top = left = 0
    rows, columns = height, width
    if options.get('crop'):
        rows, columns = (min(a, b) for a, b in zip(options['crop'], target))
        crop_rows, crop_columns = options['crop']
        top = max(round((height - crop_rows) / 2), 0)
        left = max(round((width - crop_columns) / 2), 0)
    if height * width > LARGEST_AREA:  # of a thin picture, whose shorter side is enlarged
        raise ValueError(f'a picture of {sides[0]}x{sides[1]} would become {height}x{width}')
    if (height, width) != tuple(sides):
        if options.get('backend') == 'pillow':
            pixels = resize_as_pillow(pixels, target, interpolation)
        else:
            pixels = cv2.resize(
                np.ascontiguousarray(pixels),
                (width, height),
                interpolation=CV2_CODES[interpolation],
            )
    return np.atleast_3d(pixels)[top : top + rows, left : left + columns]


# Pillow's filters and their half widths; a bicubic has a = -0.5.
def _bilinear(x: np.ndarray) -> np.ndarray:
    return np.maximum(1 - np.abs(x), 0)


def _box(x: np.ndarray) -> np.ndarray:
    return ((x > -0.5) & (x <= 0.5)).astype(float)


def _hamming(x: np.ndarray) -> np.ndarray:
    return np.sinc(x) * (0.54 + 0.46 * np.cos(np.pi * x)) * (np.abs(x) < 1)


def _bicubic(x: np.ndarray) -> np.ndarray:
    x = np.abs(x)
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x < 1, near, np.where(x < 2, far, 0))


def _lanczos(x: np.ndarray) -> np.ndarray:
    return np.sinc(x) * np.sinc(x / 3) * ((x >= -3) & (x < 3))


PILLOW_FILTERS = {
    'box': (_box, 0.5),
    'bilinear': (_bilinear, 1.0),
    'hamming': (_hamming, 1.0),
    'bicubic': (_bicubic, 2.0),
    'lanczos': (_lanczos, 3.0),
}
PRECISION = 22  # bits of Pillow's weights after the point


def resize_as_pillow(
    pixels: np.ndarray, size: Sequence[int], interpolation: str = 'bilinear'
) -> np.ndarray:
    """Resize uint8 pixels (H, W, C) to a height and width bit for bit as Pillow 13 does.

    It smooths where it makes smaller, as OpenCV does not; mmpretrain's pipelines use it. Pillow 12
    always resizes columns first, which differs by single levels in some pictures. See
    https://github.com/python-pillow/Pillow/blob/main/src/libImaging/Resample.c
    """
    old, new = pixels.shape[:2], size
    if interpolation == 'nearest':
        rows, columns = (
            np.cumsum([b / a / 2] + [b / a] * (a - 1)).astype(int).clip(0, b - 1)
            for a, b in zip(new, old)
        )
        return pixels[rows[:, None], columns]
    # Found by trial: it takes rows first where they are shortened by more than twice as much.
    rows_first = old[0] - new[0] > max(2 * (old[1] - new[1]), 0)
    for axis in (0, 1) if rows_first else (1, 0):
        if old[axis] != new[axis]:
            pixels = _resample(pixels, axis, new[axis], interpolation)
    return pixels


def _resample(pixels: np.ndarray, axis: int, number: int, interpolation: str) -> np.ndarray:
    """Resample an axis of uint8 pixels, and round."""
    function, half = PILLOW_FILTERS[interpolation]
    length = pixels.shape[axis]
    scale = length / number
    stretch = max(scale, 1.0)
    support = half * stretch
    centers = (np.arange(number) + 0.5) * scale
    first = np.maximum(centers - support + 0.5, 0).astype(int)  # truncated, as in C
    last = np.minimum((centers + support + 0.5).astype(int), length)
    index = first[:, None] + np.arange(math.ceil(support) * 2 + 1)
    weights = function((index - centers[:, None] + 0.5) / stretch)
    weights = np.where(index < last[:, None], weights, 0)
    weights = weights / weights.sum(1, keepdims=True) * (1 << PRECISION)
    weights = np.trunc(weights + np.where(weights < 0, -0.5, 0.5)).astype(np.int32)
    index = index.clip(0, length - 1)
    total: Any = 1 << (PRECISION - 1)
    for source, weight in zip(index.T, weights.T):
        if weight.any():
            total = total + pixels.take(source, axis) * weight.reshape(
                (-1, 1) if axis else (-1, 1, 1)
            )
    return (total >> PRECISION).clip(0, 255).astype(np.uint8)
