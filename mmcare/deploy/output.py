"""Files and folders that are there whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def check_writable(directory: Path) -> None:
    """Raise before any work if nothing can be written to a directory, which need not exist.

    Raises:
        NotADirectoryError: If it, or what it would be in, is a file.
        PermissionError: If it cannot be written.
    """
    parent = directory.absolute()
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise NotADirectoryError(f'{parent} is not a directory: give another place to write to')
    if not os.access(parent, os.W_OK | os.X_OK):
        raise PermissionError(f'{parent} cannot be written: give another place to write to')


@contextmanager
def moved_into_place(path: Path) -> Iterator[Path]:
    """Give a name to write to that takes the place of ``path`` if the block succeeds.

    Yields:
        A path with the name of ``path``, in a temporary directory beside it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    directory = path.parent / f'.{path.name}.{os.getpid()}.tmp'
    directory.mkdir()
    try:
        yield directory / path.name
        if path.is_dir():  # a directory cannot be replaced in one step
            os.replace(path, directory / 'old')
        os.replace(directory / path.name, path)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
