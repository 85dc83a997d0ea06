"""Turn a picture into what a file takes, by the file's description."""

from __future__ import annotations

import contextlib
import os
import struct
from functools import partial
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence, Tuple

import cv2
import numpy as np

from mmcare_runtime.suffixes import PICTURES as PICTURES
from mmcare_runtime.suffixes import list_files as list_files  # as in mmcare 1.0
from mmcare_runtime.text import escape

Place = Tuple[int, int, int, int]  # of a picture in an image: top, left, height, width
LARGEST_AREA = 2**28  # of resized pictures, in pixels
CV2_FLAGS = {  # by mmcv's color_type
    'color': cv2.IMREAD_COLOR,
    'grayscale': cv2.IMREAD_GRAYSCALE,
    'unchanged': cv2.IMREAD_UNCHANGED,
    'color_ignore_orientation': cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION,
    'grayscale_ignore_orientation': cv2.IMREAD_GRAYSCALE | cv2.IMREAD_IGNORE_ORIENTATION,
}
# The axes to flip for EXIF's orientation, after swapping rows and columns from 5 on.
TURNS = {1: (), 2: (1,), 3: (0, 1), 4: (0,), 5: (), 6: (1,), 7: (0, 1), 8: (0,)}
CV2_CODES = {
    'nearest': cv2.INTER_NEAREST,
    'bilinear': cv2.INTER_LINEAR,
    'bicubic': cv2.INTER_CUBIC,
    'area': cv2.INTER_AREA,
    'lanczos': cv2.INTER_LANCZOS4,
}


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
    if not len(data):
        return None
    flags, turn = CV2_FLAGS[color_type] | flags, 1
    ignored = flags & cv2.IMREAD_IGNORE_ORIENTATION or color_type == 'unchanged'
    if data[8:12].tobytes() == b'WEBP' and not ignored:  # which OpenCV 5 turns, and 4 does not
        flags, turn = flags | cv2.IMREAD_IGNORE_ORIENTATION, read_webp_turn(data.tobytes())
    pixels = cv2.imdecode(data, flags)
    if pixels is None or turn == 1:
        return pixels
    pixels = pixels.swapaxes(0, 1) if turn > 4 else pixels
    return np.ascontiguousarray(np.flip(pixels, TURNS[turn]))


def read_webp_turn(data: bytes) -> int:
    """Return EXIF's orientation of a WebP file, from 1 to 8; 1 if there is none."""
    place = 12
    with contextlib.suppress(struct.error):  # where the data end
        while True:
            name, size = struct.unpack_from('<4sI', data, place)
            if name == b'EXIF':
                exif = data[place + 8 : place + 8 + size]
                exif = exif[6:] if exif.startswith(b'Exif') else exif
                order = '<' if exif.startswith(b'II') else '>'
                (start,) = struct.unpack_from(f'{order}I', exif, 4)
                for index in range(*struct.unpack_from(f'{order}H', exif, start)):
                    entry = start + 2 + 12 * index
                    tag, _, _, value = struct.unpack_from(f'{order}HHIH', exif, entry)
                    if tag == 274 and value in TURNS:
                        return value
            place += 8 + size + size % 2
    return 1


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
    if options.get('share'):
        length = options['share'] * min(sides)
        top, left = (max(round((side - length) / 2), 0) for side in sides)
        square = pixels[top : int(top + length), left : int(left + length)]
        return _resize_to(square, shape, options)
    if options.get('shorter'):
        target = [max(side * options['shorter'] // min(sides), 1) for side in sides]
    else:
        ratio = min(whole / side for whole, side in zip(shape, sides))
        ratio = ratio if fit else min(ratio, 1)
        target = [max(int(side * ratio + 0.5), 1) for side in sides]  # as mmcv
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


def resize_as_pillow(
    pixels: np.ndarray, size: Sequence[int], interpolation: str = 'bilinear'
) -> np.ndarray:
    """Resize uint8 pixels (H, W, C) to a height and width by Pillow, as mmcv does.

    Pillow, which mmpretrain's pipelines use, smooths when it shrinks; OpenCV does not. Versions of
    Pillow differ by single levels.

    Raises:
        ImportError: If Pillow is not installed.
        ValueError: If pixels have more channels than Pillow resizes, which is four.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(
            'pictures of this file are resized by Pillow: pip install pillow', name='PIL'
        ) from error
    if pixels.shape[2] > 4:
        raise ValueError(f'Pillow resizes no pictures of {pixels.shape[2]} channels')
    planes = pixels[..., 0] if pixels.shape[2] == 1 else np.ascontiguousarray(pixels)
    image: Any = Image.fromarray(planes)
    resized = image.resize((size[1], size[0]), getattr(Image, interpolation.upper()))
    return np.atleast_3d(np.asarray(resized))
