"""Annotation files in COCO's format: what mmdet would read wrongly, or stumble over, is named.

mmdet and pycocotools take the structure of the file on trust. A missing key ends in a KeyError
without the name of the file; a NaN in a box, or categories in another order than the classes, end
in nothing but a worse model.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NoReturn

REACH = 10  # how far, in sizes of the image, coordinates may lie outside of it
MIN_POLYGON = 6  # numbers: three points


def check_coco_file(
    path: str | os.PathLike,
    classes: Sequence[str] | None = None,
    with_masks: bool = False,
    test_mode: bool = False,
) -> list[str]:
    """Check an annotation file in COCO's format.

    Args:
        path: The file.
        classes: Names of the classes, in the order of their labels; None leaves categories
            unchecked.
        with_masks: Whether the pipeline reads segmentations, so that every object must have one.
        test_mode: Whether the data are evaluated only, in which case annotations may be missing.

    Returns:
        What mmdet leaves out, a line for each kind.

    Raises:
        ValueError: If the file is no JSON, or does not describe images and their objects. The
            message names file, entry and value.
    """
    checker = _Checker(os.fspath(path))
    content = checker.read()
    category_ids = checker.check_categories(checker.entries(content, 'categories'), classes)
    sizes = checker.check_images(checker.entries(content, 'images'))
    if 'annotations' in content or not test_mode:
        annotations = checker.entries(content, 'annotations')
        checker.check_annotations(annotations, sizes, category_ids, with_masks)
    return [
        f'{checker.path}: {len(names)} {what} ({", ".join(names[:3])}'
        + (', ...)' if len(names) > 3 else ')')
        for what, names in checker.left_out.items()
    ]


class _Checker:
    """Checks parts of one file, whose name every error begins with."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.left_out: dict[str, list[str]] = {}

    def fail(self, what: str) -> NoReturn:
        raise ValueError(f'the annotation file {self.path!r}: {what}')

    def read(self) -> dict[str, Any]:
        try:
            with open(self.path, encoding='utf-8') as file:
                content = json.load(file)
        except (RecursionError, ValueError) as error:  # ValueError: syntax, encoding, digits
            raise ValueError(
                f'the annotation file {self.path!r} is damaged or no JSON: {error}'
            ) from error
        if not isinstance(content, dict):
            self.fail(f'it holds a {type(content).__name__}, not images, annotations, categories')
        return content

    def entries(self, content: Mapping[str, Any], table: str) -> list[dict[str, Any]]:
        """Give a table of the file, if it is a list of dicts."""
        entries = content.get(table)
        if not isinstance(entries, list):
            self.fail(f'{table} is {_short(entries)}, not a list')
        for index, entry in enumerate(entries):
            if not isinstance(entry, dict):
                self.fail(f'{table}[{index}] is {_short(entry)}, not a dict')
        return entries

    def ids(self, entries: list[dict[str, Any]], table: str) -> list[Any]:
        """Give the ids of a table, if each is a number (or text) of its own."""
        ids = [entry.get('id') for entry in entries]
        for index, value in enumerate(ids):
            if not isinstance(value, int | str) or isinstance(value, bool):
                self.fail(f'{table}[{index}] has the id {_short(value)}, not a number')
        if len(set(ids)) != len(ids):
            ((twice, times),) = Counter(ids).most_common(1)
            self.fail(f'{table} has the id {twice!r} {times} times')
        return ids

    def check_categories(
        self, categories: list[dict[str, Any]], classes: Sequence[str] | None
    ) -> set[Any]:
        """Give the ids of the categories, if their names are the classes, in their order."""
        ids = self.ids(categories, 'categories')
        names = [category.get('name') for category in categories]
        for index, name in enumerate(names):
            if not isinstance(name, str):
                self.fail(f'categories[{index}] has the name {_short(name)}')
        if classes is not None:
            used = [name for name in names if name in classes]
            missing = [name for name in classes if name not in used]
            if missing:
                more = f' and {len(missing) - 3} more' if len(missing) > 3 else ''
                self.fail(
                    f'the classes {", ".join(missing[:3])}{more} are no categories of it, so that '
                    "labels would shift; set the dataset's metainfo to the classes that it has"
                )
            if used != list(classes):
                label, found, wanted = next(
                    (label, found, wanted)
                    for label, (found, wanted) in enumerate(zip_longest(used, classes))
                    if found != wanted
                )
                self.fail(
                    f'its categories are not in the order of the classes: label {label} would be '
                    f"{found!r}, not {wanted!r}; set the dataset's metainfo to its names in its "
                    'order'
                )
        return set(ids)

    def check_images(self, images: list[dict[str, Any]]) -> dict[Any, tuple[float, float]]:
        """Give the (height, width) of images by id."""
        sizes: dict[Any, tuple[float, float]] = {}
        for index, (image, image_id) in enumerate(
            zip(images, self.ids(images, 'images'), strict=True)
        ):
            where = f'images[{index}] (id {image_id})'
            if not isinstance(image.get('file_name'), str) or not image['file_name']:
                self.fail(f'{where} has the file_name {_short(image.get("file_name"))}')
            height: Any = image.get('height')
            width: Any = image.get('width')
            for name, size in (('height', height), ('width', width)):
                if not _is_number(size) or size < 1:
                    self.fail(f'{where} has the {name} {_short(size)}')
            sizes[image_id] = height, width
        return sizes

    def check_annotations(
        self,
        annotations: list[dict[str, Any]],
        sizes: Mapping[Any, tuple[float, float]],
        category_ids: set[Any],
        with_masks: bool,
    ) -> None:
        ids = self.ids(annotations, 'annotations')
        for index, (annotation, annotation_id) in enumerate(zip(annotations, ids, strict=True)):
            where = f'annotations[{index}] (id {annotation_id})'
            image_id = annotation.get('image_id')
            if not isinstance(image_id, int | str):
                self.fail(f'{where} has the image_id {_short(image_id)}')
            if image_id not in sizes:
                self.leave_out('annotations belong to no image', f'id {annotation_id}')
                continue
            category_id = annotation.get('category_id')
            if not isinstance(category_id, int | str) or category_id not in category_ids:
                self.fail(f'{where} has the category_id {_short(category_id)}, which is none')
            for key, default in (('iscrowd', 0), ('ignore', 0)):
                if annotation.get(key, default) not in (0, 1):
                    self.fail(f'{where} has {key} {_short(annotation[key])}, not 0 or 1')
            if not _is_number(annotation.get('area')):
                self.fail(f'{where} has the area {_short(annotation.get("area"))}')
            height, width = sizes[image_id]
            box = annotation.get('bbox')
            if not isinstance(box, list) or len(box) != 4 or not _lie_within(box, height, width):
                self.fail(
                    f'{where} has the bbox {_short(box)}, not x, y, width and height in pixels of '
                    f'an image of {width} x {height}'
                )
            x, y, box_width, box_height = box
            inside_x = min(x + box_width, width) - max(x, 0)
            inside_y = min(y + box_height, height) - max(y, 0)
            if min(inside_x, inside_y, annotation['area']) <= 0 or min(box_width, box_height) < 1:
                self.leave_out(
                    'boxes lie outside of their image or have no area; mmdet leaves them out',
                    f'id {annotation_id}',
                )
                continue
            segmentation = annotation.get('segmentation')
            if segmentation or with_masks:
                self.check_segmentation(where, segmentation, height, width, annotation_id)

    def check_segmentation(
        self, where: str, segmentation: Any, height: float, width: float, annotation_id: Any
    ) -> None:
        if isinstance(segmentation, dict):
            size, counts = segmentation.get('size'), segmentation.get('counts')
            if size != [height, width]:
                self.fail(f'{where} has a mask of size {_short(size)}, its image {[height, width]}')
            runs = _decode_runs(counts) if isinstance(counts, str) else counts
            if (
                not isinstance(runs, list)
                or not all(type(run) is int and run >= 0 for run in runs)
                or sum(runs) != height * width
            ):
                self.fail(f'{where} has runs {_short(counts)} that do not fill its mask')
            return
        if not isinstance(segmentation, list) or not segmentation:
            self.fail(f'{where} has the segmentation {_short(segmentation)}')
        for polygon in segmentation:
            if not isinstance(polygon, list) or not _lie_within(polygon, height, width):
                self.fail(
                    f'{where} has the polygon {_short(polygon)}, not x and y of points in pixels '
                    f'of an image of {width} x {height}'
                )
            if len(polygon) < MIN_POLYGON or len(polygon) % 2:
                self.leave_out(
                    'polygons are not of three or more points; mmdet leaves them out',
                    f'id {annotation_id}',
                )

    def leave_out(self, what: str, name: str) -> None:
        self.left_out.setdefault(what, []).append(name)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f'{text[:57]}...'


def _is_number(value: Any) -> bool:
    """Whether it is a number that a float holds, not NaN or infinite."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _lie_within(values: list, height: float, width: float) -> bool:
    """Whether coordinates are numbers in or near an image; written for speed."""
    reach = REACH * max(height, width)
    try:
        # A sum is NaN if a part of it is, which minimum and maximum may not show.
        return math.isfinite(sum(values)) and (
            not values or (min(values) >= -reach and max(values) <= reach)
        )
    except (OverflowError, TypeError):
        return False


def _decode_runs(text: str) -> list[int] | None:
    """Decode COCO's compressed run lengths; None if they break off.

    Each number is written in characters from '0' on, 5 bits each, lowest first; bit 5 says that
    more follow, and the last one's bit 4 is the sign. From the fourth number on, differences to
    the number before last are written.
    """
    runs: list[int] = []
    value, shift = 0, 0
    for character in text:
        code = ord(character) - ord('0')
        if not 0 <= code < 64:
            return None
        value |= (code & 31) << shift
        shift += 5
        if code & 32:
            continue
        if code & 16:
            value -= 1 << shift
        runs.append(value + runs[-2] if len(runs) > 2 else value)
        value, shift = 0, 0
    return runs if shift == 0 else None
