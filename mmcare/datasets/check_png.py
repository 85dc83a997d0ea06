"""Label maps as files: damage that a reader would not notice is found by their checksums."""

import os
from pathlib import Path

from PIL import Image

PNG = b'\x89PNG\r\n\x1a\n'
BIT_DEPTH = 24  # where it stands in the file
GREY_MODES = ('1', 'L')


def check_png(path: str | os.PathLike) -> None:
    """Check a label map in PNG.

    Pillow, which mmseg reads label maps with, does not compare the checksum of the pixels' data, so
    that a flipped bit can become other labels. Grey values of less than 8 bits are scaled to 8: a
    label 3 of 4 bits is read as 51.

    Raises:
        ValueError: If the file is no PNG, is damaged or incomplete, has grey values of less than
            8 bits, or is one pixel wide or high.
    """
    with Path(path).open('rb') as file:
        start = file.read(BIT_DEPTH + 1)
    if not start.startswith(PNG):
        raise ValueError(f'the annotation {os.fspath(path)!r} is no PNG file')
    try:
        with Image.open(path, formats=['PNG']) as image:
            mode, size = image.mode, image.size
            image.verify()  # checksums, and nothing else
        with Image.open(path, formats=['PNG']) as image:
            image.load()
    except Exception as error:  # Pillow raises a different one for each kind of damage
        raise ValueError(
            f'the annotation {os.fspath(path)!r} is damaged or incomplete: {error}'
        ) from error
    if min(size) == 1:
        raise ValueError(
            f'the annotation {os.fspath(path)!r} is {size[0]} x {size[1]}; mmseg does not read '
            'label maps of one pixel in width or height'
        )
    if mode in GREY_MODES and start[BIT_DEPTH] < 8:
        raise ValueError(
            f'the annotation {os.fspath(path)!r} has grey values of {start[BIT_DEPTH]} bits, which '
            'are scaled when they are read; store labels in 8 bits'
        )
