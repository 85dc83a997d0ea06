"""Checks of pictures by their headers: whether and how the loader reads them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import lru_cache

import cv2
import numpy as np

from mmcare.engine.data_checks.findings import NUMBER, Picture, Run, Stop, Warn, examples, sample
from mmcare.engine.data_checks.headers import Header


def check_files(run: Run) -> Iterator[Stop]:
    """Find pictures and masks that do not exist."""

    @lru_cache(maxsize=None)
    def list_files(folder: str) -> set[str]:  # much faster than asking for each file
        entries = os.scandir(folder) if os.path.isdir(folder) else ()
        return {entry.name for entry in entries if entry.is_file()}

    for split in run.splits:
        loads_masks = any(
            'Annotation' in name and getattr(step, 'with_seg', True)
            for name, step in split.steps.items()
        )
        paths = [picture.path for picture in split.pictures if picture.path]
        paths += [picture.mask for picture in split.pictures if picture.mask and loads_masks]
        missing = [
            path
            for path in paths
            if os.path.basename(path) not in list_files(os.path.dirname(path) or '.')
            and not os.path.isfile(path)  # the disk may ignore upper and lower case
        ]
        if missing:
            yield Stop(
                f'{len(missing)} files of the {split.mode} dataset do not exist, such as '
                f'{os.path.abspath(missing[0])!r}: put them there, correct data_prefix, or take '
                f'them out of {split.name}'
            )


def check_readable(run: Run) -> Iterator[Stop]:
    """Find pictures that the loader cannot read, or only in part."""
    for split in run.splits:
        unread = {path: text for path, text in split.headers.items() if isinstance(text, str)}
        if unread:
            yield Stop(
                f'{len(unread)} pictures of the {split.mode} dataset cannot be read '
                f'({next(iter(unread.values()))}): {examples(unread, 10)}. Get them again, or take '
                'them out of the annotations'
            )


def check_sizes(run: Run) -> Iterator[Stop | Warn]:
    """Find annotations for another size, such as the size before EXIF data turn the picture."""
    for split in run.splits:
        wrong: list[tuple[Picture, tuple[int, int]]] = []
        swapped: list[tuple[Picture, tuple[int, int]]] = []
        for picture in sample(split.pictures, NUMBER):
            header = split.headers.get(picture.path or '')
            if isinstance(header, Header) and all(picture.size):
                loaded = split.loaded_size(header)
                if any(abs(side - other) > 1 for side, other in zip(picture.size, loaded)):
                    turned = picture.size == loaded[::-1] and header.turn > 4
                    (swapped if turned else wrong).append((picture, loaded))
        for part, advice in (
            (wrong, 'Correct the sizes, and the boxes with them'),
            (swapped, TURN),
        ):
            if part:
                picture, loaded = part[0]
                # mmdet leaves out objects by the sizes in a COCO file. Those in other files do
                # little: mmdet's XML data sets filter pictures by them, and mmocr ignores them.
                certain = split.coco or (picture.xml and part is swapped)
                yield (Stop if certain else Warn)(
                    f'{len(part)} of {len(split.headers)} sizes in {split.name} are not those of '
                    f'pictures: the annotations of {picture.path!r} are for {picture.size} pixels, '
                    f'and it is loaded as {loaded}. {advice}'
                )


# Advice for a picture that EXIF data turn, with annotations that fit only the stored picture.
TURN = (
    'EXIF data turn it. If the annotations were drawn on the picture as it is stored, set '
    "color_type='color_ignore_orientation' in the loaders of all pipelines; if on the turned one, "
    'as viewers show it, swap width and height in the file: boxes then fit as they are'
)


def check_orientation(run: Run) -> Iterator[Warn]:
    """Find EXIF data that turn pixels and keep the size: annotations may be for either."""
    for split in run.splits:
        if not any(picture.mask or any(picture.size) for picture in split.pictures[:100]):
            continue  # whole pictures have classes: turning is harmless
        headers = [(p, h) for p, h in split.headers.items() if isinstance(h, Header)]
        turned = [
            path
            for path, header in headers
            if header.turn in (2, 3, 4) or (header.turn > 4 and header.size[0] == header.size[1])
        ]
        if turned and split.obeys_exif:
            yield Warn(
                f'EXIF data mirror or turn {len(turned)} of {len(headers)} pictures of the '
                f'{split.mode} dataset, such as {turned[0]!r}, whose width and height stay: look '
                'whether annotations fit (browse_dataset). If they were drawn on pictures as '
                "stored, set the loaders' color_type='color_ignore_orientation'"
            )


def check_bits(run: Run) -> Iterator[Warn]:
    """Find pictures with more than 8 bits per value, of which the loader keeps only 8."""
    for split in run.splits:
        deep = [p for p, h in split.headers.items() if isinstance(h, Header) and h.is_deep]
        stored = cv2.imread(deep[0], cv2.IMREAD_UNCHANGED) if deep else None
        if stored is None or stored.dtype == np.uint8:
            continue
        loaded = split.load(deep[0])
        if loaded is not None and loaded.dtype == np.uint8:
            yield Warn(
                f'{len(deep)} pictures of the {split.mode} dataset hold {stored.dtype}, such as '
                f'{deep[0]!r} with values of {stored.min()} to {stored.max()}: they are loaded as '
                f'8 bits, {loaded.min()} to {loaded.max()}. Scale them to 8 bits over the range '
                "that they use, or keep them by the loaders' color_type='unchanged', with mean and "
                'std of such values'
            )
