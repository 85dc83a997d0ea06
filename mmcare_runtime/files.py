"""Refuse what is not an ordinary file before anything reads it."""

from __future__ import annotations

import hashlib
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


def digest_of(path: Path) -> str:
    """Compute the SHA-256 of a file, or of a folder's files in the order of their names."""
    digest = hashlib.sha256()
    for file in sorted(file for file in (path, *path.rglob('*')) if file.is_file()):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def check_digest(path: Path) -> None:
    """Compare a file with its report ``FILE.json``, if that lies next to it.

    Raises:
        ValueError: If the report cannot be read, or was written for other bytes.
    """
    report = Path(f'{path}.json')
    if not report.is_file():
        return
    try:
        expected = json.loads(report.read_bytes()).get('file_sha256')
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(escape(f'{report} is not a report: {error}')) from error
    if expected is not None and expected != digest_of(path):
        raise ValueError(
            escape(f'{path} was changed, or {report} belongs to another file: export it again')
        )


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
