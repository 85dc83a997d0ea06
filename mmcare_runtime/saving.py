"""Write files beside their places, and move them there when they are complete."""

from __future__ import annotations

import itertools
import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Iterator


@contextmanager
def temporary_beside(path: Path) -> Iterator[Path]:
    """Yield a path of the same name in a new hidden folder beside a path, and remove the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = mkdtemp(prefix=f'.{path.name}.', suffix='.tmp', dir=str(path.parent))
    try:
        yield Path(folder, path.name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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
