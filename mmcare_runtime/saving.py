"""Write files beside their places, and move them there when they are complete."""

from __future__ import annotations

import itertools
import os
import re
import shutil
from contextlib import contextmanager
from pathlib import Path
from socket import gethostname
from tempfile import mkdtemp
from typing import Iterator


@contextmanager
def temporary_beside(path: Path) -> Iterator[Path]:
    """Yield a path of the same name in a new hidden folder beside a path, and remove the folder.

    The folder's name says which process made it: ``.<name>.<host>~<process>.<random>.tmp``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    name = os.fsencode(path.name)[:150].decode(errors='ignore')  # disks take 255 bytes
    prefix = f'.{name}.{host()}~{os.getpid()}.'
    folder = mkdtemp(prefix=prefix, suffix='.tmp', dir=str(path.parent))
    try:
        yield Path(folder, path.name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def host() -> str:
    """Return a name of this machine, or of the container in it that numbers its own processes."""
    numbers = '/proc/self/ns/pid'
    space = os.stat(numbers).st_ino if os.path.exists(numbers) else 0
    return re.sub('[^A-Za-z0-9-]', '-', gethostname())[:64] + f'-{space}'


def is_alive(process: int) -> bool:
    """Whether a process of this :func:`host` is alive; True if that cannot be found out."""
    if os.name != 'posix':
        return True
    try:
        os.kill(process, 0)  # which sends nothing
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # another user's; no number of a process
        return True
    return True


def move(temporary: Path, path: Path, overwrite: bool = False) -> Path:
    """Move a file to a path, and return the path.

    Without ``overwrite``, a file that another process has put there stays: the path gets a number.
    """
    if overwrite:
        os.replace(str(temporary), str(path))
        return path
    for number in itertools.count(1):
        numbered = path if number == 1 else path.with_name(f'{path.stem}_{number}{path.suffix}')
        try:
            os.link(str(temporary), str(numbered))  # which replaces nothing
        except OSError:
            if numbered.exists():
                continue
            os.replace(str(temporary), str(numbered))  # on a disk without links
        return numbered
    raise AssertionError('numbers do not end')
