"""Write files atomically."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

from mmcare_runtime.saving import temporary_beside

try:
    import fcntl
except ImportError:  # Windows
    fcntl: Any = None  # type: ignore[no-redef]


def check_writable(directory: Path) -> None:
    """Raise an OSError if a directory, which need not exist yet, cannot be written to."""
    parents = [directory.absolute(), *directory.absolute().parents]
    existing = next(parent for parent in parents if parent.exists())
    # A trial, since os.access allows root every path, even in /proc.
    TemporaryDirectory(prefix='.', dir=existing).cleanup()


def check_writable_file(path: Path) -> None:
    """Raise an OSError if a file cannot be written, or is a directory."""
    if path.is_dir():
        raise IsADirectoryError(f'{path} is a directory: give the name of a file to write')
    check_writable(path.parent)


@contextmanager
def moved_into_place(path: Path) -> Iterator[Path]:
    """Yield a temporary path with the same name, and rename it to ``path`` if the block succeeds.

    A file replaces a file, a directory a directory. Files are synced before they are renamed, and
    the rename is synced as well, so that neither a kill nor a power cut leaves half a file. A
    killed process can leave a directory ``.<name>.*.tmp`` next to ``path``; if a directory
    was being replaced, the old one may be in there.
    """
    with temporary_beside(path) as temporary:
        yield temporary
        for written in (temporary, *temporary.rglob('*')):
            _sync(written)
        if path.is_dir() and temporary.is_dir():  # a directory cannot be replaced in one step
            os.replace(path, temporary.with_name(f'{path.name}.old'))
        os.replace(temporary, path)
        _sync(path.parent)


def lock_directory(directory: Path, seconds: float = 0) -> IO | None:
    """Lock a directory for this process, by the file ``.lock`` in it.

    Forked processes do not inherit the lock, unlike locks of flock and filelock. So it ends when
    this process is killed.

    Args:
        directory: An existing directory.
        seconds: How long to wait for another process.

    Returns:
        The file, to be closed; None if the system or the disk has no locks.

    Raises:
        BlockingIOError: If another process has the lock.
    """
    if fcntl is None:
        return None
    file = (directory / '.lock').open('a')
    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except OSError as error:
            is_taken = error.errno in (errno.EACCES, errno.EAGAIN)
            if is_taken and time.monotonic() < end:
                time.sleep(0.1)
                continue
            file.close()
            if is_taken:
                raise BlockingIOError(f'another process has locked {directory}') from error
            return None


def size_of(path: Path) -> int:
    """Count the bytes of a file, or of all files in a directory."""
    return sum(file.stat().st_size for file in (path, *path.rglob('*')) if file.is_file())


def _sync(path: Path) -> None:
    """Write a file, or the names in a directory, to the disk, if the system supports it."""
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
