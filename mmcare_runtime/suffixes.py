"""Which files are pictures and videos, for training's checks, exports and the runtime."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from pathlib import Path
from typing import Iterator, Sequence

from mmcare_runtime.text import escape

# What OpenCV reads in all its builds, and NumPy's arrays.
PICTURES = (
    *('.bmp', '.jfif', '.jpeg', '.jpg', '.npy', '.pgm', '.png', '.ppm', '.tif', '.tiff', '.webp'),
)
# What people take for pictures, and only some programs read.
OTHER_PICTURES = (
    *('.avif', '.cr2', '.dng', '.exr', '.gif', '.hdr', '.heic', '.heif', '.jp2', '.jpe', '.jxl'),
    *('.nef', '.pbm', '.pnm', '.psd', '.svg', '.tga'),
)
VIDEOS = ('.avi', '.m4v', '.mkv', '.mov', '.mp4', '.mpeg', '.mpg', '.webm')


def walk(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder, also through links to folders, as the toolboxes do."""
    entered = {str(folder): {os.path.realpath(str(folder))}}  # what a link may lead back to
    for place, inner, files in os.walk(str(folder), followlinks=True):
        above = entered.pop(place)
        for name in [*inner]:
            path = os.path.join(place, name)
            real = os.path.realpath(path)
            if real in above:
                inner.remove(name)
            else:
                entered[path] = above | {real}
        yield from (Path(place, name) for name in files)


def list_files(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """List the files below a folder, without hidden ones such as macOS's ``._1.jpg``.

    A warning says how many files look like pictures and have none of the suffixes.
    """
    seen = [path for path in sorted(walk(folder)) if path.is_file()]
    seen = [path for path in seen if '/.' not in f'/{path.relative_to(folder).as_posix()}']
    paths = [path for path in seen if path.suffix.lower() in suffixes]
    known = {*PICTURES, *OTHER_PICTURES} - {*suffixes}
    skipped = Counter(path.suffix.lower() for path in seen if path.suffix.lower() in known)
    if skipped:
        kinds = ', '.join(f'{number} {suffix}' for suffix, number in skipped.most_common())
        warnings.warn(
            escape(f'{sum(skipped.values())} pictures in {folder} are not read: {kinds}'),
            stacklevel=2,
        )
    return paths
