"""What a COCO file may hold: for the check of training's data, and for evaluation.

Each function yields the faults that it finds, as sentences.
"""

from __future__ import annotations

import json
from collections import Counter
from math import isfinite
from pathlib import Path
from typing import Any, Iterable, Iterator, Mapping, NamedTuple, Sequence

import numpy as np

# Up to this share of a file's objects may be unfit: COCO and LVIS have some.
TOLERATED = 1e-3
FEW_POINTS = 'a polygon of fewer than three points, or with an x that has no y'


class CocoFile(NamedTuple):
    """The lists of a COCO file, as they are; None for a list that is missing.

    If ``sampled``, ``annotations`` has at most 20,000 of the file's objects, evenly spread.
    """

    images: list[Any] | None
    annotations: list[Any] | None
    categories: list[Any] | None
    sampled: bool = False

    @property
    def is_panoptic(self) -> bool:
        """Whether the objects of a picture are in one annotation."""
        return bool(self.annotations) and 'segments_info' in (self.annotations or [{}])[0]


def read_coco(path: str | Path) -> CocoFile:
    """Read a COCO file.

    Raises:
        ValueError: If the file is not JSON, or not a COCO file.
    """
    try:
        content = json.loads(Path(path).read_text(encoding='utf-8'))
    except (ValueError, RecursionError) as error:  # it does not name the file
        raise ValueError(f'{str(path)!r} is not JSON in UTF-8: {error}') from error
    if not isinstance(content, dict):
        raise ValueError(f'{str(path)!r} is no COCO file: it holds a {type(content).__name__}')
    lists = [content.get(key) for key in ('images', 'annotations', 'categories')]
    images, annotations, categories = (part if isinstance(part, list) else None for part in lists)
    return CocoFile(images, annotations, categories)


def find_faults(file: str, coco: CocoFile, classes: Sequence[str], masks: bool) -> Iterator[str]:
    """Find what makes an evaluation by pycocotools fail, or its result wrong.

    Args:
        file: For the sentences.
        coco: The whole file.
        classes: Names of the categories that are evaluated.
        masks: Whether masks are evaluated.
    """
    yield from find_unreadable(file, coco, optional=('area',))
    images, items = coco.images or [], coco.annotations or []
    for kind, entries in (('pictures', images), ('categories', coco.categories or [])):
        twice = find_repeated(entry['id'] for entry in entries)
        if twice:
            words = f'are listed more than once, such as {twice[0]!r}'
            yield f'{len(twice)} ids of {kind} in {file!r} {words}'
    yield from find_id_faults(file, items)
    ids = {entry['name']: entry['id'] for entry in coco.categories or ()}
    missing = [name for name in classes if name not in ids]
    if missing:
        yield f'{file} has no {", ".join(missing)}'
    repeated = {*find_repeated(entry['name'] for entry in coco.categories or ())} & {*classes}
    if repeated:
        yield (
            f'{min(repeated)!r} is the name of several categories in {file!r}: give their objects '
            'one category_id'
        )
    listed, selected = {image['id']: image for image in images}, {ids[name] for name in classes}
    items = [i for i in items if i['image_id'] in listed and i['category_id'] in selected]
    if not any(not item.get('iscrowd') for item in items):
        yield f'{file!r} has no object of these classes in its pictures (crowds do not count)'
        return
    boxes = [(item['bbox'], listed[item['image_id']]) for item in items]
    rows = [(*box, image['width'], image['height']) for box, image in boxes]
    yield from find_other_boxes(repr(file), rows)
    unfit = [box for box, _ in boxes if not (all(map(isfinite, box)) and min(box[2:]) > 0)]
    if len(unfit) > TOLERATED * len(boxes):
        yield f'{len(unfit)} of {len(boxes)} boxes in {file!r} are none, such as {unfit[0]}'
    for item in items if masks else ():
        fault = find_mask_fault(item.get('segmentation'), listed[item['image_id']])
        if fault:
            yield f'{name_object(item, name_pictures(coco))} in {file!r} has {fault}'
            return


def find_unreadable(file: str, coco: CocoFile, optional: Sequence[str] = ()) -> Iterator[str]:
    """Find missing keys, and values of a wrong type, but for optional keys."""
    for key in ('images', 'categories'):
        if getattr(coco, key) is None:
            yield f'{file!r} has no list {key!r}: it is no COCO file of objects'
    images, items = coco.images or (), () if coco.is_panoptic else coco.annotations or ()
    names = {value_of(image, 'id'): value_of(image, 'file_name') for image in images}
    rows: dict[str, Any] = {'id': _is_id, 'width': is_number, 'height': is_number}
    yield from find_missing(file, 'pictures', images, rows, names)
    unnamed = [i for i in images if not isinstance(value_of(i, 'file_name', 'coco_url'), str)]
    if unnamed:
        yield f"{len(unnamed)} pictures of {file!r} lack 'file_name', such as {unnamed[0]}"
    rows = {'id': _is_id, 'name': lambda name: isinstance(name, str)}
    yield from find_missing(file, 'categories', coco.categories or (), rows, {})
    rows = dict(id=_is_id, image_id=_is_id, category_id=_is_id, bbox=_is_box, area=is_number)
    rows = {key: suits for key, suits in rows.items() if key not in optional}
    yield from find_missing(file, 'objects', items, rows, names)


def find_missing(
    file: str,
    kind: str,
    entries: Iterable[Any],
    rows: Mapping[str, Any],
    names: Mapping[Any, Any],
) -> Iterator[str]:
    """Find entries whose value for a key of ``rows`` does not suit the key's function."""
    advice = {
        'area': '. Its area in pixels belongs there: width times height for a box',
        'iscrowd': ': the evaluation would fail. 0 belongs there for a single object',
    }
    entries = [*entries]
    for key, suits in rows.items():
        unfit = [e for e in entries if not (isinstance(e, dict) and suits(e.get(key)))]
        if unfit:
            absent = not isinstance(unfit[0], dict) or key not in unfit[0]
            fault = f'lack {key!r}' if absent else f'have {key}={unfit[0][key]!r}'
            yield (
                f'{len(unfit)} of {len(entries)} {kind} in {file!r} {fault}, such as '
                f'{name_object(unfit[0], names) if kind == "objects" else unfit[0]}'
                f'{advice.get(key, "")}'
            )


def find_id_faults(
    file: str, items: Sequence[Mapping[str, Any]], evaluated: bool = True
) -> Iterator[str]:
    """Find ids of objects that pycocotools takes for another object's, or for none."""
    ids = find_repeated(item['id'] for item in items)
    if ids:
        yield (
            f'{len(ids)} ids of objects in {file!r} are listed more than once, such as {ids[0]!r}: '
            'pycocotools keeps the last object of each id. Number the objects'
        )
    if evaluated and any(not str(item['id']).strip('0. ') for item in items):
        yield (
            f'an object in {file!r} has id 0, which pycocotools takes for no match, so that its '
            'detection counts as wrong. Number the objects from 1'
        )


def find_other_boxes(name: str, rows: Sequence[Any], number: object = None) -> Iterator[str]:
    """Find boxes that hold corners or shares in place of x, y, width and height in pixels.

    Args:
        name: Of the file or data set.
        rows: x, y, width, height, and width and height of the picture, of each object.
        number: For the sentence, if it is not the number of rows.
    """
    x, y, width, height, right, bottom = np.array(rows, float).T
    shares = (x + width <= 1) & (y + height <= 1) & (width < 1) & (height < 1) & (x >= 0)
    beyond = (x + width > 1.1 * right) | (y + height > 1.1 * bottom)
    corners = (width > x) & (height > y) & (x >= 0) & (y >= 0)
    if shares.mean() > 0.5:
        yield (
            f'the boxes in {name} are shares of width and height, such as {_describe(rows[0])}: '
            'COCO counts pixels. Multiply x and width by the width of the picture, y and height '
            'by its height'
        )
    elif beyond.mean() > 0.5 or (corners.all() and beyond.mean() > 0.1):
        yield (
            f'{beyond.sum()} of {number or len(rows)} boxes in {name} reach far beyond their '
            f'pictures, such as {_describe(rows[beyond.argmax()])}: COCO writes x, y, width, '
            'height, not the right and lower sides; or the boxes are those of larger pictures'
        )


def _describe(row: Sequence[Any]) -> str:
    return f'{tuple(row[:4])} in a picture of {row[4]}x{row[5]}'


def find_repeated(values: Iterable[Any]) -> list[Any]:
    """Return the values that come more than once."""
    return [value for value, number in Counter(values).items() if number > 1]


def value_of(entry: Any, *keys: str) -> Any:
    """Return the first value of an entry for these keys; None if it is no text or number."""
    held = [entry[key] for key in keys if isinstance(entry, dict) and key in entry]
    return held[0] if held and _is_id(held[0]) else None


def is_number(value: Any) -> bool:
    """Tell whether a value is a number."""
    return isinstance(value, (int, float))


def _is_id(value: Any) -> bool:
    return isinstance(value, (int, str))


def _is_box(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 4 and all(map(is_number, value))


def name_object(item: Any, names: Mapping[Any, Any]) -> str:
    """Name an object by its id and its picture."""
    return f'object {value_of(item, "id")!r} of {names.get(value_of(item, "image_id"))!r}'


def name_pictures(coco: CocoFile) -> dict[Any, Any]:
    """Return the names of pictures' files by their ids."""
    return {image['id']: value_of(image, 'file_name', 'coco_url') for image in coco.images or ()}


def find_mask_fault(segmentation: Any, image: Mapping[str, Any]) -> str | None:
    """Say what pycocotools cannot read in a segmentation."""
    if not segmentation:
        return 'no segmentation'
    size = [image['height'], image['width']]
    if isinstance(segmentation, dict):
        counts, sides = segmentation.get('counts'), segmentation.get('size')
        if not (isinstance(counts, (list, str)) and isinstance(sides, list)):
            return f'a segmentation without counts and size (keys {[*segmentation]})'
        total = sum(counts) if isinstance(counts, list) else _sum_runs(counts)
        if sides != size:
            return 'run lengths of another size than the picture'
        if total != size[0] * size[1] or (isinstance(counts, list) and min(counts) < 0):
            return 'run lengths that do not fill the picture'
        return None
    if not isinstance(segmentation, list):
        return f'a segmentation that is a {type(segmentation).__name__}'
    for polygon in segmentation:
        if not isinstance(polygon, list):
            return 'a polygon that is no list of numbers, in a list of polygons'
        if not all(map(is_number, polygon)):
            return 'a polygon of pairs or other values in place of x, y, x, y, ...'
        if len(polygon) < 6 or len(polygon) % 2:
            return FEW_POINTS
        if not isfinite(sum(polygon)):
            return 'NaN or infinity in a polygon'
    return None


def _sum_runs(counts: Any) -> int:
    """Sum COCO's compressed run lengths: 6 bits a character, differences to the run before last."""
    codes = np.frombuffer(counts.encode(), np.uint8).astype(np.int64) - 48
    ends = np.flatnonzero((codes & 32) == 0)
    if not len(ends) or ends[-1] != len(codes) - 1 or codes.min() < 0 or codes.max() > 63:
        return -1
    starts = np.concatenate([[0], ends[:-1] + 1])
    place = np.arange(len(codes)) - np.repeat(starts, ends - starts + 1)
    values = np.add.reduceat((codes & 31) << (5 * np.minimum(place, 11)), starts)
    lengths = 5 * (ends - starts + 1)
    values -= np.where(codes[ends] & 16, 1 << np.minimum(lengths, 60), 0)
    runs = values.copy()
    runs[1::2], later = np.cumsum(values[1::2]), values[2::2]
    runs[2::2] = np.cumsum(later)
    return int(runs.sum()) if runs.min() >= 0 else -1
