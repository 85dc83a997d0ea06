"""Atomic writes."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory


def check_writable(directory: Path) -> None:
    """Raise before any work if nothing can be written to a directory, which need not exist.

    Raises:
        NotADirectoryError: If it, or a parent of it, is a file.
        PermissionError: If it cannot be written.
    """
    parent = directory.absolute()
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise NotADirectoryError(f'{parent} is not a directory: choose another place to write to')
    try:
        # For root, os.access allows every path, even in /proc, so try.
        TemporaryDirectory(prefix='.', dir=parent).cleanup()
    except OSError as error:
        raise PermissionError(f'{parent} cannot be written: choose another place') from error


def check_writable_file(path: Path) -> None:
    """Raise before any work if a file cannot be written; one that exists is replaced later.

    Raises:
        IsADirectoryError: If there is a directory of that name.
        NotADirectoryError, PermissionError: As by :func:`check_writable`, for the file's directory.
    """
    if path.is_dir():
        raise IsADirectoryError(f'{path} is a directory: give the name of a file to write')
    check_writable(path.parent)


@contextmanager
def moved_into_place(path: Path) -> Iterator[Path]:
    """Give a temporary name to write to, and rename it to ``path`` if the block succeeds.

    A file replaces a file, a directory a directory. Files are on the disk before they are renamed,
    and the rename before the block ends, so that neither a kill nor a power cut leaves half a file
    under ``path``. A killed process can leave a directory ``.<name>.<random>.tmp``, in which a
    replaced directory may be found.

    Yields:
        A path with the name of ``path``, in a temporary directory next to it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(
        prefix=f'.{path.name}.', suffix='.tmp', dir=path.parent, ignore_cleanup_errors=True
    ) as directory:
        temporary = Path(directory, path.name)
        yield temporary
        for written in (temporary, *temporary.rglob('*')):
            _sync(written)
        if path.is_dir() and temporary.is_dir():  # a directory cannot be replaced in one step
            os.replace(path, Path(directory, f'{path.name}.old'))
        os.replace(temporary, path)
        _sync(path.parent)


def _sync(path: Path) -> None:
    """Bring a file, or the names in a directory, to the disk, where the system can do that."""
    if path.is_dir() and not hasattr(os, 'O_DIRECTORY'):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):  # some network disks
            raise
    finally:
        os.close(descriptor)
