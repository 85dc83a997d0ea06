"""Files that are whole or not there, whatever happens while they are written."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mmengine.fileio import LocalBackend, get_file_backend, register_backend

UNFINISHED = '.unfinished'


class AtomicLocalBackend(LocalBackend):
    """mmengine's backend for local disks, which writes to a temporary name and renames.

    The file is on the disk before it gets its name, and the name before ``put`` returns: neither
    a killed process nor a power cut leaves half a file under it. What was there before is kept
    until then. A killed process can leave ``.<name>.unfinished``, see :func:`remove_unfinished`.
    """

    def put(self, obj: bytes, filepath: str | Path) -> None:
        """Write bytes; the folder is made if it is not there."""
        path = Path(filepath)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f'.{path.name}{UNFINISHED}')
        try:
            with open(unfinished, 'wb') as file:
                file.write(obj)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)
        _sync_folder(path.parent)

    def put_text(self, obj: str, filepath: str | Path, encoding: str = 'utf-8') -> None:
        """Write text."""
        self.put(obj.encode(encoding), filepath)


@contextmanager
def atomic_local_files() -> Iterator[None]:
    """Let all that mmengine writes to local disks in the block go through the backend above.

    ``mmengine.runner.save_checkpoint`` chooses the backend by the prefix of a file's name, and
    not all of its callers can hand one down. Other backends are left alone, and so is one that
    someone else has put in the place of mmengine's.
    """
    if type(get_file_backend('.')) is not LocalBackend:
        yield
        return
    register_backend('local', AtomicLocalBackend, force=True, prefixes='')
    try:
        yield
    finally:
        register_backend('local', LocalBackend, force=True, prefixes='')


def remove_unfinished(folder: str | Path) -> list[str]:
    """Remove what killed processes have left in a folder; return the names."""
    left = sorted(Path(folder).glob(f'.*{UNFINISHED}'))
    for path in left:
        path.unlink()
    return [path.name for path in left]


def _sync_folder(folder: Path) -> None:
    """Bring a rename to the disk, where system and file system let folders be synced."""
    if not hasattr(os, 'O_DIRECTORY'):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems refuse; the file itself is on the disk, under its name.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)
