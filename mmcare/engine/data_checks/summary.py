"""What a dataset holds, in one line, which shows what no check can know to be wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mmcare.engine.data_checks.findings import Split
from mmcare.engine.data_checks.headers import Header
from mmcare_runtime.text import join_first

SHOWN = 10  # classes


def describe(split: Split) -> str:
    """Describe a split: ``'train: 64 pictures, 300 to 800 x 200 to 600 pixels; cat 12, dog 9'``.

    The numbers are those of objects, or, for classifiers, of pictures. Segmentors have none, since
    all masks would have to be read.
    """
    sizes = [picture.size for picture in split.pictures]
    if any(None in size for size in sizes):
        headers = (header for header in split.headers.values() if isinstance(header, Header))
        sizes = [split.loaded_size(header) for header in headers]
    parts = [f'{len(split.pictures)} pictures']
    if sizes:
        parts.append(f'{" x ".join(map(_range, zip(*sizes)))} pixels')
    numbers = Counter(
        label
        for picture in split.pictures
        for label in (*picture.labels, picture.label)
        if isinstance(label, int)
    )
    names = split.classes or [*map(str, sorted(numbers))]
    if numbers or split.of_pixels:
        counted = [f'{name} {numbers[i]}' if numbers else name for i, name in enumerate(names)]
        has_objects = any(picture.labels for picture in split.pictures)
        kind = 'classes' if not numbers else 'objects' if has_objects else 'pictures of'
        parts.append(f'{kind}: {join_first(counted, SHOWN)}')
    return f'{split.mode}: {"; ".join(parts)}'


def _range(values: Sequence[int]) -> str:
    least, most = min(values), max(values)
    return str(least) if least == most else f'{least} to {most}'
