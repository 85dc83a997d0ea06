"""Files and folders that are there whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory


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
    writable = os.access(parent, os.W_OK | os.X_OK)
    if writable:
        # Root may write everywhere, says the system, even where no file can be made (/proc): try.
        try:
            TemporaryDirectory(prefix='.', dir=parent).cleanup()
        except OSError:
            writable = False
    if not writable:
        raise PermissionError(f'{parent} cannot be written: give another place to write to')


def check_writable_file(path: Path) -> None:
    """Raise before any work if a file cannot be written, which replaces one that exists.

    Raises:
        IsADirectoryError: If there is a directory of that name.
        NotADirectoryError, PermissionError: As by :func:`check_writable`, for the file's directory.
    """
    if path.is_dir():
        raise IsADirectoryError(f'{path} is a directory: give the name of a file to write')
    check_writable(path.parent)


@contextmanager
def moved_into_place(path: Path) -> Iterator[Path]:
    """Give a name to write to that takes the place of ``path`` if the block succeeds.

    A file takes the place of a file, a directory that of a directory.

    Yields:
        A path with the name of ``path``, in a temporary directory beside it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(
        prefix=f'.{path.name}.', suffix='.tmp', dir=path.parent, ignore_cleanup_errors=True
    ) as directory:
        temporary = Path(directory, path.name)
        yield temporary
        if path.is_dir() and temporary.is_dir():  # which cannot be replaced in one step
            os.replace(path, Path(directory, f'{path.name}.old'))
        os.replace(temporary, path)
