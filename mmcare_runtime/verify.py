"""Refuse what is not an ordinary file before anything reads it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from pathlib import Path, PurePosixPath

from mmcare_runtime.text import escape

NO_HASH = '0' * 64  # file_sha256 of a description until its file is complete
_HASH = re.compile(rb'(?<="file_sha256": ")[^"]{64}(?=")')


def check_file(path: Path) -> None:
    """Check that a path is a file (no device or FIFO), or a folder without links inside.

    Raises:
        FileNotFoundError: If the path does not exist.
        ValueError: If anything else is there; the error names it.
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


def write_hash(path: Path) -> str:
    """Write the hash of a file's bytes, or of a folder's files, into the description that it holds.

    The hash is the SHA-256 of the bytes, with zeros as the digits of ``file_sha256``. For folders,
    it includes names and sizes, but no hidden files. Call this after changing a file on purpose.
    """
    digest, _ = _compute_hash(path)
    for file in _list_files(path):
        content = file.read_bytes()
        if _HASH.search(content):
            file.write_bytes(_HASH.sub(digest.encode(), content))
    return digest


def check_hash(path: Path) -> None:
    """Compare a file with the hash that its description states, if it states one.

    The hash is searched for in the bytes, since reading a damaged file's description is unsafe.

    Raises:
        ValueError: If they differ.
    """
    digest, stated = _compute_hash(path)
    if stated - {digest.encode()}:
        raise ValueError(
            escape(
                f'{path} is damaged, or another tool has rewritten it: its file_sha256 is of other '
                'bytes. Copy or export it again; if it was changed on purpose, verify=False or '
                '--no-verify opens it'
            )
        )


def _compute_hash(path: Path) -> tuple[str, set[bytes]]:
    """Compute the hash, and find what the file states."""
    digest, stated = hashlib.sha256(), set()
    for file in _list_files(path):
        content = file.read_bytes()
        if file != path:
            digest.update(f'{file.relative_to(path).as_posix()} {len(content)}\n'.encode())
        stated |= {*_HASH.findall(content)}
        digest.update(_HASH.sub(NO_HASH.encode(), content))
    return digest.hexdigest(), stated


def _list_files(path: Path) -> list[Path]:
    """List a file, or a folder's files by name, without hidden files such as .DS_Store."""
    if not path.is_dir():
        return [path]
    files = {file.relative_to(path).as_posix(): file for file in path.rglob('*') if file.is_file()}
    return [files[name] for name in sorted(files) if '/.' not in f'/{name}']


def check_package(path: Path) -> None:
    """Check an ``.mlpackage``: its manifest names only what is inside.

    Raises:
        ValueError: If it is damaged, or names files outside.
    """
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
