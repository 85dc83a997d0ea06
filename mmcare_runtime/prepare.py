"""Turn a picture into what a file takes, by the file's description."""

from __future__ import annotations

import math
import os
from functools import partial
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence, Tuple

import cv2
import numpy as np

from mmcare_runtime.text import escape

Place = Tuple[int, int, int, int]  # of a picture in an image: top, left, height, width
PICTURES = ('.bmp', '.jpeg', '.jpg', '.npy', '.png', '.ppm', '.tif', '.tiff', '.webp')  # suffixes
LARGEST_AREA = 2**28  # of resized pictures, in pixels
CV2_FLAGS = {  # by mmcv's color_type
    'color': cv2.IMREAD_COLOR,
    'grayscale': cv2.IMREAD_GRAYSCALE,
    'unchanged': cv2.IMREAD_UNCHANGED,
    'color_ignore_orientation': cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION,
    'grayscale_ignore_orientation': cv2.IMREAD_GRAYSCALE | cv2.IMREAD_IGNORE_ORIENTATION,
}
CV2_CODES = {
    'nearest': cv2.INTER_NEAREST,
    'bilinear': cv2.INTER_LINEAR,
    'bicubic': cv2.INTER_CUBIC,
    'area': cv2.INTER_AREA,
    'lanczos': cv2.INTER_LANCZOS4,
}


def list_files(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """List the files below a folder, without hidden ones such as macOS's ``._1.jpg``."""
    paths = (path for path in sorted(folder.rglob('*')) if path.suffix.lower() in suffixes)
    return [path for path in paths if '/.' not in f'/{path.relative_to(folder).as_posix()}']


def read_picture(
    path: str | os.PathLike[str], channels: int = 3, loader: Mapping[str, Any] | None = None
) -> np.ndarray:
    """Read a picture as training did, as pixels (H, W, C).

    Args:
        path: A picture, or ``.npy`` with an array (H, W) or (H, W, C).
        channels: Number of channels. Without a ``color_type``, pictures of 8 bits are read as
            colours for three channels and as gray for one; others are read as they are.
        loader: Of the input's description.

    Raises:
        FileNotFoundError: If there is no file.
        ValueError: If it is not a picture, or if a package that reads it is missing.
    """
    file, loader = Path(path), loader or {}
    if not file.is_file():
        raise FileNotFoundError(escape(f'{file} is not a file'))
    color_type = loader.get('color_type')
    if color_type is None:
        known = loader.get('bits', 8) == 8
        color_type = {3: 'color', 1: 'grayscale'}.get(channels) if known else None
    try:
        if file.suffix.lower() == '.npy':
            pixels = np.load(str(file), allow_pickle=False)
        else:
            backend = loader.get('imdecode_backend') or 'cv2'
            pixels = DECODERS[backend](file, color_type or 'unchanged')
    except ImportError as error:
        package = PACKAGES.get(error.name or '', error.name)
        raise ValueError(
            f'{package} reads the pictures of this file: pip install {package}'
        ) from error
    except Exception:  # decoders raise their own classes
        pixels = None
    if pixels is None or pixels.ndim not in (2, 3):
        raise ValueError(escape(f'{file} is not a picture'))
    return np.atleast_3d(pixels)


def _decode_with_cv2(file: Path, color_type: str, flags: int = 0) -> Any:
    data = np.fromfile(str(file), np.uint8)  # cv2.imread knows only ASCII names on Windows
    return cv2.imdecode(data, CV2_FLAGS[color_type] | flags) if len(data) else None


def _decode_with_pillow(file: Path, color_type: str) -> Any:
    """Decode as mmcv does."""
    from PIL import Image, ImageOps

    image: Any
    with Image.open(str(file)) as image:
        if color_type == 'unchanged':
            pixels = np.array(image)
            if pixels.ndim == 3 and pixels.shape[2] >= 3:
                pixels[..., :3] = pixels[..., 2::-1].copy()
            return pixels
        if not color_type.endswith('ignore_orientation'):
            image = ImageOps.exif_transpose(image)
        if image.mode == 'LA':  # mmcv's canvas
            canvas = Image.new('RGB', image.size, (124, 117, 104))
            canvas.paste(image.convert('RGBA'), mask=image.getchannel('A'))
            image = canvas
        image = image.convert('RGB')
        if color_type.startswith('grayscale'):
            return np.array(image.convert('L'))
        return np.array(image)[..., ::-1]


def _decode_with_tifffile(file: Path, color_type: str) -> Any:
    """Decode as it is stored: colours stay RGB, as in mmcv."""
    import tifffile  # type: ignore[import-not-found,unused-ignore]

    return tifffile.imread(str(file))


DECODERS: Mapping[str, Callable[[Path, str], Any]] = dict(
    cv2=_decode_with_cv2,
    # mmcv's turbojpeg ignores EXIF's orientation.
    turbojpeg=partial(_decode_with_cv2, flags=cv2.IMREAD_IGNORE_ORIENTATION),
    pillow=_decode_with_pillow,
    tifffile=_decode_with_tifffile,
)
PACKAGES = {'PIL': 'pillow'}


def check_pixels(pixels: Any, channels: int, bits: int | None = 8) -> np.ndarray:
    """Return pixels as (H, W, channels).

    Args:
        pixels: (H, W, 3) in BGR, (H, W) or (H, W, 1); or as many channels as the file takes.
        channels: Number that the file takes. Colours become gray for 1, gray becomes BGR for 3.
        bits: Bits of a value: 8 for uint8, 16 for uint16 and int16, 32 for float32. None: any.

    Raises:
        ValueError: If ``pixels`` are something else.
    """
    kind = {8: 'uint8', 16: 'uint16', 32: 'float32'}.get(bits or 0, 'uint8, uint16 or float32')
    expected = f'{kind} pixels (H, W, 3) in BGR, (H, W) or (H, W, 1)'
    if channels not in (1, 3):
        expected = f'{kind} pixels (H, W, {channels})'
    if not isinstance(pixels, np.ndarray):
        hint = ': did the camera give a picture?' if pixels is None else ''
        raise ValueError(f'a path or {expected} are expected, got {type(pixels).__name__}{hint}')
    shape, dtype = pixels.shape, pixels.dtype
    known = dtype in (np.uint8, np.uint16, np.int16, np.float32)
    if (
        not known
        or (bits is not None and 8 * dtype.itemsize != bits)
        or len(shape) not in (2, 3)
        or not pixels.size
    ):
        hint = ''
        if bits in (8, 16) and dtype in (np.uint8, np.uint16) and 8 * dtype.itemsize != bits:
            hint = f': the network was trained on pictures of {bits} bits'
        raise ValueError(f'{expected} are expected, got {dtype} {shape}{hint}')
    pixels = np.atleast_3d(pixels)
    number = pixels.shape[2]
    if number == channels:
        return pixels
    if (number, channels) == (1, 3):
        return np.repeat(pixels, 3, 2)
    if (number, channels) == (3, 1):
        return cv2.cvtColor(np.ascontiguousarray(pixels), cv2.COLOR_BGR2GRAY)[..., None]
    raise ValueError(f'{expected} are expected, got {dtype} {shape}')


def prepare(
    pixels: np.ndarray, spec: Mapping[str, Any], shape: Sequence[int]
) -> tuple[np.ndarray, Place]:
    """Resize, crop, normalize and pad pixels (H, W, C) to an image (1, C, *shape).

    Args:
        pixels: In BGR if there are three channels.
        spec: Describes the input of a file.
        shape: Its height and width.

    Returns:
        The image, uint8 if the file takes that and otherwise float32, and where the picture is in
        it.

    Raises:
        ValueError: If the description does not say how pictures are prepared, or makes an image
            that is larger than the file's.
    """
    if spec['kind'] == 'tensor' and not spec['mean']:
        raise ValueError('the file does not name mean and std of images')
    if (spec.get('loader') or {}).get('to_float32'):
        pixels = pixels.astype(np.float32)  # so that resizing does not round
    pixels = resize(pixels, spec['resize'] or {}, shape, fit=bool(spec['resize']))
    if spec['channels'] == 'RGB':
        pixels = pixels[..., ::-1]
    height, width, channels = pixels.shape
    if height > shape[0] or width > shape[1]:
        raise ValueError(
            f'the test pipeline makes an image of {height}x{width}, the file takes '
            f'{shape[0]}x{shape[1]}: give the pipeline a Resize or a CenterCrop'
        )
    top = left = 0
    if spec.get('letterbox') == 'center':
        top, left = (shape[0] - height) // 2, (shape[1] - width) // 2
    image = np.empty((1, channels, *shape), spec.get('dtype', 'float32'))
    for channel, plane in enumerate(image[0]):
        plane[:] = spec['padding'][channel]
        inside = plane[top : top + height, left : left + width]
        _normalize(pixels[..., channel], spec, channel, inside)
    return image, (top, left, height, width)


def _normalize(
    pixels: np.ndarray, spec: Mapping[str, Any], channel: int, result: np.ndarray
) -> None:
    """Write pixels (H, W) of a channel as the file takes them."""
    if spec['kind'] == 'image':
        rounds = result.dtype == np.uint8 and pixels.dtype != np.uint8
        result[:] = pixels.round().clip(0, 255) if rounds else pixels
        return
    mean, std = (np.float32(spec[key][channel]) for key in ('mean', 'std'))
    if pixels.dtype == np.uint8:
        result[:] = ((np.arange(256, dtype=np.float32) - mean) / std)[pixels]
    else:
        np.subtract(pixels, mean, out=result, dtype=np.float32)
        result /= std


def resize(
    pixels: np.ndarray, options: Mapping[str, Any], shape: Sequence[int], fit: bool = True
) -> np.ndarray:
    """Resize pixels (H, W, C) as the input's ``resize`` says, and crop them.

    Without ``fit``, pixels are only made smaller: the test pipeline leaves sizes as they are.
    """
    sides = pixels.shape[:2]
    if options.get('shorter'):
        target = [max(side * options['shorter'] // min(sides), 1) for side in sides]
    else:
        ratio = min(whole / side for whole, side in zip(shape, sides))
        ratio = ratio if fit else min(ratio, 1)
        target = [max(round(side * ratio), 1) for side in sides]
    rows, columns = options.get('crop') or target
    top, left = (max(round((a - b) / 2), 0) for a, b in zip(target, (rows, columns)))
    return _resize_to(pixels, target, options)[top : top + rows, left : left + columns]


def resize_as_mmcv(pixels: np.ndarray, sliding: Mapping[str, Any]) -> np.ndarray:
    """Resize pixels (H, W, C) as the description's ``slide`` says.

    mmcv's ``scale`` has the longer side first, whichever it is, if the ratio is kept.
    """
    options, multiple = sliding.get('resize'), sliding.get('multiple')
    if options:
        (width, height), sides = options['scale'], pixels.shape[:2]
        target = [height, width]
        if options['keep_ratio']:
            ratio = min(f(target) / f(sides) for f in (max, min))
            target = [max(int(side * ratio + 0.5), 1) for side in sides]
        pixels = _resize_to(pixels, target, options)
    if multiple:
        target = [-(-side // multiple) * multiple for side in pixels.shape[:2]]
        pixels = _resize_to(pixels, target, {})
    return pixels


def _resize_to(pixels: np.ndarray, target: Sequence[int], options: Mapping[str, Any]) -> np.ndarray:
    """Resize pixels (H, W, C) to a height and width, by ``interpolation`` and ``backend``."""
    (height, width), sides = target, pixels.shape[:2]
    interpolation = options.get('interpolation', 'bilinear')
    if height * width > LARGEST_AREA:  # of a thin picture, whose shorter side is enlarged
        raise ValueError(f'a picture of {sides[0]}x{sides[1]} would become {height}x{width}')
    if (height, width) == tuple(sides):
        return pixels
    if options.get('backend') == 'pillow':
        if pixels.dtype != np.uint8:
            raise ValueError(f'Pillow, which the test pipeline names, resizes no {pixels.dtype}')
        return resize_as_pillow(pixels, target, interpolation)
    code = CV2_CODES[interpolation]
    pixels = np.ascontiguousarray(pixels)
    return np.atleast_3d(cv2.resize(pixels, (width, height), interpolation=code))


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

    Pillow, which mmpretrain's pipelines use, smooths when it shrinks; OpenCV does not. Pillow 12
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
    # Found by trial: Pillow takes rows first if they shrink by more than twice as much.
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
