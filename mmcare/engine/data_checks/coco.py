"""Checks of COCO files: compare their content with what training and evaluation use."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from math import isfinite
from typing import Any, Callable, NamedTuple

import numpy as np

from mmcare.engine.data_checks.findings import Run, Split, Stop, Warn, examples
from mmcare_runtime.coco import (
    FEW_POINTS,
    TOLERATED,
    CocoFile,
    find_id_faults,
    find_mask_fault,
    find_missing,
    find_other_boxes,
    find_repeated,
    find_unreadable,
    is_number,
    name_object,
    name_pictures,
)

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
        yield from map(Stop, find_unreadable(file, read(file)))
    except ValueError as error:  # it is no COCO file
        yield Stop(str(error))


def check_iscrowd(run: Run) -> Iterator[Stop]:
    """Find objects without ``iscrowd``: the first evaluation would fail, after hours."""
    for split, coco in _with_objects(run):
        if split.mode != 'train' and _evaluates_coco(split):
            selected = {*split.dataset.cat_ids}
            items = coco.annotations or []
            if not _evaluates_coco(split, 'proposal'):  # which are of no category
                items = [item for item in items if item['category_id'] in selected]
            file, rows = split.dataset.ann_file, dict(iscrowd=is_number)
            yield from map(Stop, find_missing(file, 'objects', items, rows, name_pictures(coco)))


def check_duplicates(run: Run) -> Iterator[Stop | Warn]:
    """Find pictures, categories and objects that are listed twice, and objects with id 0."""
    for split in run.splits:
        coco = split.coco
        if coco is None:
            continue
        images = coco.images or []
        if coco.annotations and not coco.is_panoptic:
            evaluated = split.mode != 'train' and _evaluates_coco(split)
            faults = find_id_faults(split.dataset.ann_file, coco.annotations, evaluated)
            yield from map(Stop, faults)
        ids = find_repeated(image['id'] for image in images)
        if ids:
            files = [image.get('file_name') for image in images if image['id'] == ids[0]]
            yield Stop(
                f'{len(ids)} ids of pictures in {split.name} are listed more than once, such as '
                f'{ids[0]!r} for {examples(files)}: only the last picture is kept, and gets the '
                'objects of all. Give each picture an id of its own'
            )
        files = find_repeated(image.get('file_name') for image in images if image.get('file_name'))
        if files:
            yield Warn(
                f'{len(files)} pictures are listed more than once in {split.name}, such as '
                f'{files[0]!r}: objects that belong to the other entry become background'
            )
        names = find_repeated(entry['name'] for entry in coco.categories or ())
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
                "under other names. Sort the file's categories by id, and set metainfo.classes to "
                f'{tuple(names[str(id)] for id in ordered)}'
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
                f'below filter_cfg.min_size={least}, such as '
                f'{name_pictures(coco)[small[0]["id"]]!r}'
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
        number = f'{len(rows)}{_sampled(coco)}'
        yield from map(Stop, find_other_boxes(split.name, rows, number))


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
            fault = find_mask_fault(item.get('segmentation'), images[item['image_id']])
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
                f'{fault}, such as {name_object(broken[0], name_pictures(coco))}'
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
            f'have run lengths, such as {name_object(encoded[0], name_pictures(coco))}: with '
            'poly2mask=False, mmdet ignores them. Set poly2mask=True in LoadAnnotations'
        )


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


def _count(split: Split, coco: CocoFile) -> Objects:
    selected, names = {*split.dataset.cat_ids}, name_pictures(coco)
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
            lost[reason][1] = lost[reason][1] or name_object(item, names)
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
