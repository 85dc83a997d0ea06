"""Argument checks, the output directory and the progress line that all generators share."""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import cv2
import numpy as np

from mmcare.output import check_writable


def check_at_least(name: str, value: int, minimum: int) -> None:
    """Check an integer argument.

    Args:
        name (str): The argument's name, for the message.
        value (int): What was given.
        minimum (int): The smallest allowed value.

    Raises:
        TypeError: If ``value`` is not an integer.
        ValueError: If ``value`` is below ``minimum``.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f'{name} must be an integer, got {value!r}')
    if value < minimum:
        raise ValueError(f'{name} must be at least {minimum}, got {value}')


@contextmanager
def new_directory(directory: str | Path) -> Iterator[Path]:
    """Give a temporary sibling of ``directory`` that takes its place if the block succeeds.

    If the block fails or is interrupted, the temporary directory is removed and ``directory`` is
    left as it was.

    Args:
        directory (str or Path): A path that does not exist, or an empty directory.

    Yields:
        Path: The temporary directory to write to.

    Raises:
        FileExistsError: If ``directory`` is a file or holds anything.
        NotADirectoryError, PermissionError: If it cannot be written where it is to be.
    """
    directory = Path(directory).resolve()
    if directory.is_dir():
        if any(directory.iterdir()):
            raise FileExistsError(
                f'{directory} is not empty: remove it first, or give another directory'
            )
    elif directory.exists():
        raise FileExistsError(f'{directory} is a file: give a directory')
    check_writable(directory.parent)
    temporary = directory.with_name(f'.{directory.name}.{os.getpid()}')
    temporary.mkdir(parents=True)
    try:
        yield temporary
        if directory.is_dir():
            directory.rmdir()
        temporary.rename(directory)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def count_with_progress(count: int, label: str) -> Iterator[int]:
    """Yield 0 to ``count - 1`` and show on standard error how far the work is.

    On a terminal one line is rewritten; elsewhere (a log file) only the end is reported.
    """
    for index in range(count):
        yield index
        if sys.stderr.isatty() or index + 1 == count:
            end = '\n' if index + 1 == count else ''
            print(f'\r{label}: {index + 1}/{count}', end=end, file=sys.stderr, flush=True)


def write_image(path: Path, picture: np.ndarray) -> None:
    """Write a uint8 picture as ``.png`` or, at OpenCV's own quality of 95, as ``.jpg``.

    Raises:
        OSError: If it cannot be written (``cv2.imwrite`` would return False, or leave half a file).
    """
    _, encoded = cv2.imencode(path.suffix, picture)
    path.write_bytes(encoded.tobytes())
