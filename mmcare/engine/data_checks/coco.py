"""Checks of COCO files: compare their content with what training and evaluation use."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from math import isfinite
from typing import Any, Callable, NamedTuple

import numpy as np

from mmcare.engine.data_checks.coco_file import CocoFile
from mmcare.engine.data_checks.findings import Run, Split, Stop, Warn, examples

# Up to this share of a file's objects may be left out for their shape: COCO and LVIS have some.
TOLERATED = 1e-3
FEW_POINTS = 'a polygon of fewer than three points, or with an x that has no y'
SHAPES = ('a box outside the picture', 'a width or height below 1', 'an area of 0 or less')


class Objects(NamedTuple):
    """The objects of a split's file that are of its classes.

    Attributes:
        number: Number of these objects.
        kept: Number of objects that the dataset keeps, by category.
        crowds: Number of kept objects that are crowds, which are ignored, by category.
        lost: Number of objects that are left out, and the first of them, by reason.
    """

    number: int
    kept: Counter[Any]
    crowds: Counter[Any]
    lost: dict[str, list[Any]]


def check_required_keys(file: str, read: Callable[[str], CocoFile]) -> Iterator[Stop]:
    """Find missing keys, and values of a wrong type: mmdet would raise a bare KeyError."""
    try:
        coco = read(file)
    except ValueError as error:  # it is no COCO file
        yield Stop(str(error))
        return
    for key in ('images', 'categories'):
        if getattr(coco, key) is None:
            yield Stop(f'{file!r} has no list {key!r}: it is no COCO file of objects')
    images, items = coco.images or (), () if coco.is_panoptic else coco.annotations or ()
    names = {_value(image, 'id'): _value(image, 'file_name') for image in images}
    rows: dict[str, Any] = {'id': _is_id, 'width': _is_number, 'height': _is_number}
    yield from _find_missing(file, 'pictures', images, rows, names)
    unnamed = [i for i in images if not isinstance(_value(i, 'file_name', 'coco_url'), str)]
    if unnamed:
        yield Stop(f"{len(unnamed)} pictures of {file!r} lack 'file_name', such as {unnamed[0]}")
    rows = {'id': _is_id, 'name': lambda name: isinstance(name, str)}
    yield from _find_missing(file, 'categories', coco.categories or (), rows, {})
    rows = dict(id=_is_id, image_id=_is_id, category_id=_is_id, bbox=_is_box, area=_is_number)
    yield from _find_missing(file, 'objects', items, rows, names)


def check_iscrowd(run: Run) -> Iterator[Stop]:
    """Find objects without ``iscrowd``: the first evaluation would fail, after hours."""
    for split, coco in _with_objects(run):
        if split.mode != 'train' and _evaluates_coco(split):
            selected = {*split.dataset.cat_ids}
            items = coco.annotations or []
            if not _evaluates_coco(split, 'proposal'):  # which are of no category
                items = [item for item in items if item['category_id'] in selected]
            file, rows = split.dataset.ann_file, dict(iscrowd=_is_number)
            yield from _find_missing(file, 'objects', items, rows, _names(coco))


def check_duplicates(run: Run) -> Iterator[Stop | Warn]:
    """Find pictures and categories that are listed twice."""
    for split in run.splits:
        coco = split.coco
        if coco is None:
            continue
        images = coco.images or []
        ids = _repeated(image['id'] for image in images)
        if ids:
            files = [image.get('file_name') for image in images if image['id'] == ids[0]]
            yield Stop(
                f'{len(ids)} ids of pictures in {split.name} are listed more than once, such as '
                f'{ids[0]!r} for {examples(files)}: only the last picture is kept, and gets the '
                'objects of all. Give each picture an id of its own'
            )
        files = _repeated(image.get('file_name') for image in images if image.get('file_name'))
        if files:
            yield Warn(
                f'{len(files)} pictures are listed more than once in {split.name}, such as '
                f'{files[0]!r}: objects that belong to the other entry become background'
            )
        names = _repeated(entry['name'] for entry in coco.categories or ())
        selected = [name for name in names if name in split.classes]
        if selected and len(split.dataset.cat_ids) > len(split.classes):
            yield Stop(
                f'{examples(selected)} is the name of several categories in {split.name}: each '
                'gets a label of its own, and labels of the following classes are shifted. Give '
                'their objects one category_id'
            )
        elif names:
            yield Warn(
                f'{examples(names)} is the name of several categories in {split.name}: each is a '
                'class of its own'
            )


def check_category_order(run: Run) -> Iterator[Stop]:
    """Find category ids that do not ascend: a class's AP would be printed under another name."""
    # Training numbers classes in the file's order, which check_categories compares.
    for split in run.of_mode('val', 'test'):
        if split.coco is None or not any(getattr(m, 'classwise', False) for m in split.metrics):
            continue
        ids = list(split.dataset.cat_ids)
        ordered = np.unique(ids).tolist() if ids else []  # as pycocotools does
        if [*map(str, ids)] != [*map(str, ordered)] and len({*ids}) == len(ids):
            names = {str(entry['id']): entry['name'] for entry in split.coco.categories or ()}
            yield Stop(
                f'the ids of the categories in {split.name} do not ascend: {examples(ids, 12)}. '
                f'pycocotools sorts them, as {examples(ordered, 12)}, and prints the AP of classes '
                "under other names. Sort the file's categories by id, and set "
                f'{run.line_of_classes(split.mode)} to {tuple(names[str(id)] for id in ordered)}'
            )


def check_lost_objects(run: Run) -> Iterator[Stop | Warn]:
    """Compare the objects that the file holds with those that the dataset keeps."""
    for split, coco in _with_objects(run):
        objects = _count(split, coco)
        kept = sum(objects.kept.values())
        lost = sorted(objects.lost.items(), key=lambda entry: -entry[1][0])
        total = f'{objects.number}{_sampled(coco)} objects in {split.name}'
        if lost and not kept:
            reasons = ', '.join(f'{n} have {reason}' for reason, (n, _) in lost)
            yield Stop(f'no object is left of {total}: {reasons}, such as {lost[0][1][1]}')
            continue
        for reason, (number, example) in lost:
            if reason not in SHAPES or number > TOLERATED * objects.number:
                yield Warn(f'{number} of {total} are left out, with {reason}, such as {example}')
        if split.dataset._indices is not None or coco.sampled:
            continue
        images, least = coco.images or (), (split.dataset.filter_cfg or {}).get('min_size', 0)
        small = [image for image in images if min(image['width'], image['height']) < least]
        loaded = sum(len(picture.labels) for picture in split.pictures)
        if small and not split.dataset.test_mode:
            yield Warn(
                f'{len(small)} of {len(images)} pictures in {split.name} are left out, with sides '
                f'below filter_cfg.min_size={least}, such as {_names(coco)[small[0]["id"]]!r}'
            )
        elif kept - loaded > TOLERATED * objects.number:
            yield Warn(
                f'{kept - loaded} of {total} are left out by {type(split.dataset).__name__}, for '
                'a reason of its own'
            )


def check_crowds(run: Run) -> Iterator[Stop | Warn]:
    """Find objects that are all ignored as crowds, as CVAT's brush masks are."""
    advice = (
        'Training and evaluation ignore crowds. CVAT sets iscrowd=1 for masks that were drawn '
        'with a brush: set iscrowd to 0 where an annotation is a single object'
    )
    for split, coco in _with_objects(run):
        objects = _count(split, coco)
        number = sum(objects.kept.values())
        if number and objects.kept == objects.crowds:
            yield Stop(f'all {number} objects in {split.name} have iscrowd=1. {advice}')
            continue
        least = 10 if coco.sampled else 1
        names = {entry['id']: entry['name'] for entry in coco.categories or ()}
        ignored = [k for k, n in objects.kept.items() if n == objects.crowds[k] and n >= least]
        if ignored:
            classes = examples(names[k] for k in ignored)
            yield Warn(f'all objects of {classes} in {split.name} have iscrowd=1. {advice}')


def check_box_form(run: Run) -> Iterator[Stop]:
    """Find boxes with corners in place of width and height, and boxes in shares of the picture."""
    for split, coco in _with_objects(run):
        images = {image['id']: image for image in coco.images or ()}
        boxes = [(item, images.get(item['image_id'])) for item in coco.annotations or ()]
        rows = [(*item['bbox'], i['width'], i['height']) for item, i in boxes if i]
        if not rows:
            continue
        x, y, width, height, right, bottom = np.array(rows, float).T
        shares = (x + width <= 1) & (y + height <= 1) & (width < 1) & (height < 1) & (x >= 0)
        beyond = (x + width > 1.1 * right) | (y + height > 1.1 * bottom)
        corners = (width > x) & (height > y) & (x >= 0) & (y >= 0)
        if shares.mean() > 0.5:
            yield Stop(
                f'the boxes in {split.name} are shares of width and height, such as '
                f'{_describe(rows[0])}: COCO counts pixels. Multiply x and width by the width of '
                'the picture, y and height by its height'
            )
        elif beyond.mean() > 0.5 or (corners.all() and beyond.mean() > 0.1):
            yield Stop(
                f'{beyond.sum()} of {len(rows)}{_sampled(coco)} boxes in {split.name} reach far '
                f'beyond their pictures, such as {_describe(rows[beyond.argmax()])}: COCO '
                'writes x, y, width, height, not the right and lower sides; or the boxes are those '
                'of larger pictures'
            )


def check_segmentations(run: Run) -> Iterator[Stop | Warn]:
    """Find masks that hang or crash pycocotools, where masks are trained on or evaluated."""
    for split, coco in _with_objects(run):
        step = split.steps.get('LoadAnnotations')
        loads = getattr(step, 'with_mask', False)
        if not (loads if split.mode == 'train' else _evaluates_coco(split, 'segm')):
            continue
        images = {image['id']: image for image in coco.images or ()}
        items = _used_objects(split, coco, images)
        faults: dict[str, list[Any]] = {}
        for item in items:
            fault = _find_fault(item.get('segmentation'), images[item['image_id']])
            if fault:
                faults.setdefault(fault, []).append(item)
        if items and len(faults.get('no segmentation', ())) == len(items):
            yield Stop(
                f'none of {len(items)} objects in {split.name} has a segmentation, which training '
                'of masks needs. For boxes alone, take a detector such as '
                'configs/your_data/detector.py'
            )
            continue
        if split.mode == 'train' and not getattr(step, 'poly2mask', True):
            yield from _check_run_lengths(split, coco, items)
        for fault, broken in faults.items():
            finding = Warn if fault == FEW_POINTS and split.mode == 'train' else Stop
            yield finding(
                f'{len(broken)} of {len(items)}{_sampled(coco)} objects in {split.name} have '
                f'{fault}, such as {_name(broken[0], _names(coco))}'
            )


def _used_objects(split: Split, coco: CocoFile, images: dict[Any, Any]) -> list[Any]:
    """Return the objects of the split's classes; for training, those that the dataset keeps."""
    selected = {*split.dataset.cat_ids}
    items = [
        item
        for item in coco.annotations or ()
        if item['image_id'] in images and item['category_id'] in selected
    ]
    if split.mode != 'train':
        return items
    sizes = {key: (image['width'], image['height']) for key, image in images.items()}
    return [item for item in items if not _find_reason(item, sizes, selected)]


def _check_run_lengths(split: Split, coco: CocoFile, items: list[Any]) -> Iterator[Stop | Warn]:
    """Find objects with run lengths, which mmdet ignores with ``poly2mask=False``."""
    objects = [item for item in items if not item.get('iscrowd')]
    encoded = [item for item in objects if isinstance(item.get('segmentation'), dict)]
    if encoded:
        finding = Stop if len(encoded) == len(objects) else Warn
        yield finding(
            f'{len(encoded)} of {len(objects)}{_sampled(coco)} objects in {split.name} '
            f'have run lengths, such as {_name(encoded[0], _names(coco))}: with '
            'poly2mask=False, mmdet ignores them. Set poly2mask=True in LoadAnnotations'
        )


def _value(entry: Any, *keys: str) -> Any:
    held = [entry[key] for key in keys if isinstance(entry, dict) and key in entry]
    return held[0] if held and _is_id(held[0]) else None


def _describe(row: Any) -> str:
    return f'{row[:4]} in a picture of {row[4]}x{row[5]}'


def _is_id(value: Any) -> bool:
    return isinstance(value, (int, str))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _is_box(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 4 and all(map(_is_number, value))


def _find_missing(
    file: str, kind: str, entries: Any, rows: dict[str, Any], names: dict[Any, Any]
) -> Iterator[Stop]:
    advice = {
        'area': '. Its area in pixels belongs there: width times height for a box',
        'iscrowd': ': the evaluation would fail. 0 belongs there for a single object',
    }
    for key, suits in rows.items():
        unfit = [e for e in entries if not (isinstance(e, dict) and suits(e.get(key)))]
        if unfit:
            absent = not isinstance(unfit[0], dict) or key not in unfit[0]
            fault = f'lack {key!r}' if absent else f'have {key}={unfit[0][key]!r}'
            yield Stop(
                f'{len(unfit)} of {len(entries)} {kind} in {file!r} {fault}, such as '
                f'{_name(unfit[0], names) if kind == "objects" else unfit[0]}{advice.get(key, "")}'
            )


def _name(item: Any, names: dict[Any, Any]) -> str:
    """Name an object by its id and its picture."""
    return f'object {_value(item, "id")!r} of {names.get(_value(item, "image_id"))!r}'


def _names(coco: CocoFile) -> dict[Any, Any]:
    return {image['id']: _value(image, 'file_name', 'coco_url') for image in coco.images or ()}


def _with_objects(run: Run) -> Iterator[tuple[Split, CocoFile]]:
    """Yield the splits with a COCO file that has one object in each annotation."""
    for split in run.splits:
        coco = split.coco
        if coco is not None and coco.annotations and not coco.is_panoptic:
            yield split, coco


def _sampled(coco: CocoFile) -> str:
    return ' sampled' if coco.sampled else ''


def _evaluates_coco(split: Split, kind: str = '') -> bool:
    """Return whether pycocotools evaluates the split, or its ``bbox`` or ``segm`` alone."""
    metrics = [m for m in split.metrics if type(m).__name__.startswith('Coco')]
    return any(kind in getattr(metric, 'metrics', ()) if kind else True for metric in metrics)


def _repeated(values: Any) -> list[Any]:
    return [value for value, number in Counter(values).items() if number > 1]


def _count(split: Split, coco: CocoFile) -> Objects:
    selected, names = {*split.dataset.cat_ids}, _names(coco)
    listed = {entry['id'] for entry in coco.categories or ()}
    sizes = {image['id']: (image['width'], image['height']) for image in coco.images or ()}
    kept: Counter[Any] = Counter()
    crowds: Counter[Any] = Counter()
    lost: dict[str, list[Any]] = defaultdict(lambda: [0, None])
    number = 0
    for item in coco.annotations or ():
        category = item['category_id']
        if category in listed and category not in selected:
            continue  # a class that the config leaves out
        number += 1
        reason = _find_reason(item, sizes, listed)
        if reason:
            lost[reason][0] += 1
            lost[reason][1] = lost[reason][1] or _name(item, names)
        else:
            kept[category] += 1
            crowds[category] += bool(item.get('iscrowd'))
    return Objects(number, kept, +crowds, lost)


def _find_reason(
    item: dict[str, Any], sizes: dict[Any, tuple[float, float]], listed: set[Any]
) -> str | None:
    """Say why mmdet leaves an object out, by the rules of ``CocoDataset.parse_data_info``."""
    x, y, width, height = item['bbox']
    if item['image_id'] not in sizes:
        return f'an image_id that is not listed{_other_type(item["image_id"], sizes)}'
    if item.get('ignore'):
        return 'ignore set'
    if not all(map(isfinite, (x, y, width, height))):
        return 'NaN or infinity in the box'
    if width <= 0 or height <= 0:
        return 'a width or height of 0 or less'
    right, bottom = sizes[item['image_id']]
    if min(x + width, right) <= max(x, 0) or min(y + height, bottom) <= max(y, 0):
        return SHAPES[0]
    if width < 1 or height < 1:
        return SHAPES[1]
    if item['area'] <= 0:
        return SHAPES[2]
    if item['category_id'] not in listed:
        return f'a category_id that is not listed{_other_type(item["category_id"], listed)}'
    return None


def _other_type(value: Any, listed: Any) -> str:
    same = [other for other in listed if str(other) == str(value)]
    return f' ({value!r}, where {same[0]!r} is)' if same else ''


def _find_fault(segmentation: Any, image: dict[str, Any]) -> str | None:
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
        if not all(map(_is_number, polygon)):
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
