"""What headers of pictures say, without decoding them."""

from __future__ import annotations

import os
import warnings
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Callable, NamedTuple

from PIL import Image

JPEG_END, PNG_END = b'\xff\xd9', b'IEND'
DEEP_TIFF = {16, 32, 64}
WIDTH, HEIGHT, BITS, ORIENTATION = 256, 257, 258, 274  # tags of EXIF and TIFF


class Header(NamedTuple):
    """What the header of a picture says.

    Attributes:
        size: Width and height as stored; of TIFF files, as every decoder turns them.
        turn: EXIF's orientation, 1 to 8: 2, 3 and 4 keep width and height, 5 to 8 swap them. 1 for
            TIFF files.
        is_deep: Whether values have more than 8 bits.
    """

    size: tuple[int, int]
    turn: int
    is_deep: bool


def read_headers(
    paths: Iterable[str], load: Callable[[str], Any]
) -> dict[str, Header | str | None]:
    """Read the headers of pictures; ``load`` returns None for those that training cannot read.

    In place of a header, a string says why a picture cannot be read. None means that only ``load``
    knows the format or its orientation, or that the file does not exist.
    """
    trusted: dict[str, bool] = defaultdict(bool)  # by suffix: whether only ``load`` reads it
    return {path: _read_header(path, load, trusted) for path in dict.fromkeys(paths)}


def _read_header(
    path: str, load: Callable[[str], Any], trusted: dict[str, bool]
) -> Header | str | None:
    if not os.path.isfile(path):
        return None  # another check says so
    if not os.path.getsize(path):
        return 'it is empty'
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')  # about large pictures
            with Image.open(path) as image:
                header = _describe(image)
                if image.format == 'AVIF' and header.turn > 1:
                    return None  # Pillow turns these pictures, OpenCV does not
                end = image.fp.tell() if image.fp else 0
                suspect = _is_cut(path, image.format, end)
    except Exception as error:  # Pillow reads fewer formats, and limits sizes
        suffix = Path(path).suffix.lower()
        if trusted[suffix]:
            return None
        trusted[suffix] = load(path) is not None
        return None if trusted[suffix] else f'{type(error).__name__}, it starts {_start(path)}'
    if suspect:
        try:
            with Image.open(path) as image:
                image.load()
        except Exception as error:
            return str(error)
    return header


def _describe(image: Image.Image) -> Header:
    try:
        turn = int(image.getexif().get(ORIENTATION, 1))
    except Exception:  # damaged EXIF data, which loaders skip
        turn = 1
    tile = getattr(image, 'tile', None)
    stored = tile[0][3] if tile else ''
    raw_mode = stored[0] if isinstance(stored, tuple) else stored  # the rest are offsets
    tags = getattr(image, 'tag_v2', {})
    deep = image.mode[0] in 'IF' or '16' in str(raw_mode)
    deep = deep or bool(DEEP_TIFF & {*tags.get(BITS, ())})
    if image.format == 'TIFF':
        size = tags[WIDTH], tags[HEIGHT]
        return Header(size[::-1] if turn > 4 else size, 1, deep)
    return Header(image.size, turn, deep)


def _is_cut(path: str, kind: str | None, start: int) -> bool:
    """Return whether the end of a JPEG or PNG file is missing; other bytes may follow it."""
    mark = {'JPEG': JPEG_END, 'MPO': JPEG_END, 'PNG': PNG_END}.get(kind or '')
    if mark is None:
        return False
    with open(path, 'rb') as file:
        file.seek(max(os.path.getsize(path) - 16, 0))
        if mark in file.read():
            return False
        file.seek(start)
        return mark not in file.read()


def _start(path: str) -> str:
    with open(path, 'rb') as file:
        return repr(file.read(12))
