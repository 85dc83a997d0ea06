"""The content of a COCO file; for a large file, only a sample of its objects."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from mmcare_runtime import coco
from mmcare_runtime.coco import CocoFile

WHOLE = 32 << 20  # bytes; smaller files are read whole, such as COCO's validation (36,781 objects)
BLOCKS, BLOCK = 400, 50  # evenly spread blocks and objects in each, for larger files
_decode = json.JSONDecoder().raw_decode
_separator = re.compile(r'[\s,]*')


def read_coco(path: str) -> CocoFile:
    """Read a COCO file in seconds; above ``WHOLE`` bytes, read only a sample of its objects.

    Raises:
        ValueError: If the file is not JSON, or not a COCO file.
    """
    try:
        if Path(path).stat().st_size > WHOLE:
            with open(path, 'rb') as file, mmap(file.fileno(), 0, access=ACCESS_READ) as mapped:
                return CocoFile(
                    _read_list(mapped, b'images', b'file_name|coco_url'),
                    list(_sample_objects(mapped)),
                    _read_list(mapped, b'categories', b'name'),
                    sampled=True,
                )
    except ValueError as error:  # it does not name the file
        raise ValueError(f'{path!r} is not JSON in UTF-8: {error}') from error
    return coco.read_coco(path)


def _read_list(content: mmap, name: bytes, key: bytes) -> list[Any] | None:
    """Read the list of this name whose first entry has the key; others may share its name."""
    next_list = re.compile(rb'"(annotations|images|categories)"\s*:\s*\[')
    for start in re.finditer(rb'"%s"\s*:\s*\[\s*(?=\{)' % name, content):
        later = next_list.search(content, start.end())
        for end in (later.start() if later else len(content), len(content)):
            entries = _decode_list(content[start.end() : end].decode(errors='replace'))
            if entries is not None:
                break
        if entries and any(part.decode() in entries[0] for part in key.split(b'|')):
            return entries
    return None


def _decode_list(text: str) -> list[Any] | None:
    """Decode entries up to the bracket that closes them; None if the text ends before it."""
    entries, end = [], 0
    try:
        while text[end] != ']':
            entry, end = _decode(text, end)
            entries.append(entry)
            end = _separator.match(text, end).end()  # type: ignore[union-attr]
    except (IndexError, json.JSONDecodeError):
        return None
    return entries


def _sample_objects(content: mmap) -> Iterator[Any]:
    """Yield evenly spread objects, found by their first key, which is the same for all objects."""
    start = re.search(rb'"annotations"\s*:\s*\[\s*(\{\s*"\w+"\s*:)', content)
    if start is None:
        return
    first_key = start.group(1).split(b'"')[1]
    object_start = re.compile(rb'[\[,]\s*(\{\s*"%s"\s*:)' % first_key)
    step = (len(content) - start.end()) // BLOCKS
    end = 0
    for block in range(BLOCKS):
        position = max(end, start.start() + block * step)
        for _ in range(BLOCK):
            match = object_start.search(content, position)
            if match is None:
                return
            item, length = _decode_at(content, match.start(1))
            position = end = match.start(1) + length
            if 'image_id' in item or 'bbox' in item:  # not a picture or category
                yield item


def _decode_at(content: mmap, start: int) -> tuple[Any, int]:
    """Decode the object that starts here; return it and its length."""
    for size in (1 << 13, 1 << 17, 1 << 21):
        try:
            return _decode(content[start : start + size].decode(errors='replace'))
        except json.JSONDecodeError:
            pass
    return _decode(content[start:].decode(errors='replace'))
