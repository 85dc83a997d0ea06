"""Refuse what is not an ordinary file before anything reads it."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path, PurePosixPath

from mmcare_runtime.text import escape


def check_file(path: Path) -> None:
    """Expect a file, not a device or a FIFO, or a folder of files and folders without links.

    Raises:
        FileNotFoundError: If there is nothing.
        ValueError: If it is something else; it is named.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(escape(f'{path} does not exist')) from None
    if stat.S_ISREG(mode):
        return
    if not stat.S_ISDIR(mode):
        raise ValueError(escape(f'{path} is neither a file nor a folder'))
    for folder, names, files in os.walk(str(path)):
        for name in names + files:
            entry = Path(folder, name)
            mode = entry.lstat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise ValueError(escape(f'{entry} is neither a file nor a folder'))


def check_package(path: Path) -> None:
    """Check an ``.mlpackage``: its manifest names only what is inside.

    Raises:
        ValueError: If it is damaged, or names files outside.
    """
    check_file(path)
    try:
        manifest = json.loads((path / 'Manifest.json').read_bytes())
        names = [item['path'] for item in manifest['itemInfoEntries'].values()]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(escape(f'{path} has no valid Manifest.json: {error}')) from error
    for name in names:
        parts = PurePosixPath(name).parts if isinstance(name, str) else ('..',)
        outside = '..' in parts or '/' in parts or not parts or '\\' in name or ':' in name
        if outside or not (path / 'Data' / name).exists():
            raise ValueError(
                escape(f'{path}: its Manifest.json names {name!r}, not in the package')
            )
