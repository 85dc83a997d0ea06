"""Windows that slide over pictures: segmentors average them as mmseg does, boxes are merged."""

from __future__ import annotations

import warnings
from typing import Any, Callable, Iterator, Mapping, Sequence

import cv2
import numpy as np

from mmcare_runtime.prepare import resize_as_mmcv
from mmcare_runtime.results import choose, enlarge, interpolate, locate, nms, read_threshold

MERGED = 0.5  # IoU from which boxes of two windows are one object, if a file has no NMS
CUT = 2.0  # pixels from the border of a window to that of an object that it cuts
TILES = ('whole', 'slide')  # mmseg's names
Windows = Callable[[np.ndarray, Sequence['tuple[int, int]']], Iterator[Any]]


def tile_stride(shape: Sequence[int], stride: Sequence[int] | None = None) -> list[int]:
    """Return how far windows of a height and width are apart: at most their sides.

    Without a stride, neighbours share a fifth of their sides.
    """
    return [max(min(x), 1) for x in zip(stride or [side * 4 // 5 for side in shape], shape)]


def place_windows(length: int, side: int, stride: int) -> list[int]:
    """Return where windows begin; the last one is moved inwards, as in mmseg."""
    number = max(length - side + stride - 1, 0) // stride + 1
    return [min(index * stride, max(length - side, 0)) for index in range(number)]


def slide_labels(
    pixels: np.ndarray, description: Mapping[str, Any], compute: Windows
) -> np.ndarray:
    """Choose the class of each pixel from the average of overlapping windows' logits.

    Pictures are resized and padded as the config's test pipeline does, if its mode is ``'slide'``.
    Memory holds the averages of one row of windows at a time: for each class, 4 bytes for each
    pixel of the picture's width and the window's height.

    Args:
        pixels: (H, W, C).
        description: Of the file.
        compute: Takes pixels and the top left corners of windows; yields logits (K, h, w).

    Returns:
        Labels (H, W).

    Raises:
        ValueError: If the test pipeline resizes in a way that is not described.
    """
    shape, sliding = description['shape'], description.get('slide') or {}
    if sliding.get('other_steps'):
        raise ValueError(
            f'the test pipeline has {", ".join(sliding["other_steps"])}, which is not done here: '
            "resize pictures in this way, and pass them with tile='whole'"
        )
    size, stride = pixels.shape[:2], tile_stride(shape, sliding.get('stride'))
    pixels = resize_as_mmcv(pixels, sliding)
    divisor = sliding.get('size_divisor') or 1
    padded = [
        max(-(-old // divisor) * divisor, new)
        for old, new in zip(pixels.shape, sliding.get('size') or (0, 0))
    ]
    canvas = [*map(max, padded, shape)]
    if canvas != padded and sliding:
        height, width = shape
        warnings.warn(
            f'a picture of {padded[0]}x{padded[1]} is smaller than windows of {height}x{width}: '
            'mmseg computes it as it is, the file computes it with padding. '
            f'data_preprocessor.test_cfg=dict(size=({height}, {width})) lets mmseg pad as well',
            stacklevel=2,
        )
    aligned = bool(description.get('align_corners'))
    strips = _average_windows(pixels, canvas, shape, stride, compute, aligned)
    return _read_strips(strips, pixels.shape[:2], size, aligned, read_threshold(description))


def _average_windows(
    pixels: np.ndarray,
    canvas: Sequence[int],
    shape: Sequence[int],
    stride: Sequence[int],
    compute: Windows,
    aligned: bool,
) -> Iterator[np.ndarray]:
    """Yield averaged logits (K, n, width) from the top to the bottom of a canvas.

    A strip is valid until the next one is asked for.
    """
    tops, lefts = (place_windows(*sides) for sides in zip(canvas, shape, stride))
    weights = []  # of each row and each column: 1 divided by the number of its windows
    for starts, length, side in zip((tops, lefts), canvas, shape):
        numbers = np.zeros(length, np.float32)
        for start in starts:
            numbers[start : start + side] += 1
        weights.append(1 / numbers)
    total: Any = None
    for top, bottom in zip(tops, [*tops[1:], canvas[0]]):
        corners = [(top, left) for left in lefts if left < pixels.shape[1]]
        for (_, left), logits in zip(corners, compute(pixels, corners)):
            if total is None:
                total = np.zeros((len(logits), shape[0], canvas[1]), np.float32)
            for plane, values in zip(total, logits):
                plane[:, left : left + shape[1]] += enlarge(values, shape, aligned)
        number = bottom - top
        for plane in total:
            plane[:number] *= weights[0][top:bottom, None]
            plane[:number] *= weights[1]
        yield total[:, :number]
        for plane in total:
            plane[: len(plane) - number] = plane[number:]
            plane[len(plane) - number :] = 0


def _read_strips(
    strips: Iterator[np.ndarray],
    old: Sequence[int],
    new: Sequence[int],
    aligned: bool,
    threshold: float,
) -> np.ndarray:
    """Cut padding off strips of an image, enlarge them to a picture, and choose its labels.

    Args:
        strips: Of averaged logits, from top to bottom.
        old: Height and width of the image.
        new: Height and width of the picture.
        aligned: Whether corners are aligned when logits are enlarged.
        threshold: See :func:`mmcare_runtime.results.choose`.
    """
    labels, rows = np.empty(new, np.int64), locate(old[0], new[0], aligned)
    top = begin = 0
    last: Any = None  # row of the strip above
    for strip in strips:
        strip = strip[:, : old[0] - top, : old[1]]
        bottom = top + strip.shape[1]
        end = len(rows) if bottom == old[0] else int(np.searchsorted(rows, bottom - 1, 'right'))
        first = top if last is None else top - 1

        def enlarge_plane(plane: np.ndarray, above: Any) -> np.ndarray:
            plane = plane if above is None else np.concatenate([above, plane])
            plane = interpolate(plane, rows[begin:end] - first)  # noqa: B023
            return enlarge(plane, (len(plane), new[1]), aligned)

        if end > begin:
            above = [None] * len(strip) if last is None else last
            planes = map(enlarge_plane, strip, above)
            labels[begin:end] = choose(planes, len(strip), (end - begin, new[1]), threshold)
        if bottom == old[0]:
            break
        top, begin, last = bottom, end, strip[:, -1:].copy()
    return labels


def slide_boxes(
    pixels: np.ndarray, description: Mapping[str, Any], compute: Windows
) -> dict[str, Any]:
    """Detect objects in overlapping windows, in the picture's own size, and merge them by NMS.

    The NMS is the file's; for files without, such as DETR's, boxes with an IoU above 0.5 are one
    object. ``max_per_img`` is for each window. Part of an object that a window cuts is removed if
    another window has found the object. An object larger than the overlap may be found in parts.

    Args:
        pixels: (H, W, C).
        description: Of the file, with its NMS.
        compute: Takes pixels and the top left corners of windows; yields their results.

    Returns:
        What is found in one picture, see :meth:`mmcare_runtime.Model.predict`.
    """
    shape = description['shape']
    sides = zip(pixels.shape, shape, tile_stride(shape))
    tops, lefts = (place_windows(*side) for side in sides)
    corners = [(top, left) for top in tops for left in lefts]
    places: list[tuple[int, int, np.ndarray]] = []  # of masks: top, left, mask of a part
    has_masks = False
    parts: dict[str, list[np.ndarray]] = dict(boxes=[], scores=[], labels=[], cut=[])
    for (top, left), results in zip(corners, compute(pixels, corners)):
        low, high = [left, top], [left + shape[1], top + shape[0]]
        boxes = results['boxes'] + np.array(low * 2, np.float32)
        begins = (boxes[:, :2] < np.array(low) + CUT) & (np.array(low) > 0)
        ends = (boxes[:, 2:] > np.array(high) - CUT) & (high < np.array(pixels.shape[1::-1]))
        parts['boxes'].append(boxes)
        parts['cut'].append((begins | ends).any(1))
        for name in ('scores', 'labels'):
            parts[name].append(results[name])
        has_masks = 'masks' in results
        for mask in results.get('masks', ()):
            x, y, width, height = cv2.boundingRect(mask.astype(np.uint8))
            places.append((top + y, left + x, mask[y : y + height, x : x + width].copy()))
    merged: dict[str, Any] = {name: np.concatenate(values) for name, values in parts.items()}
    test_cfg = description.get('test_cfg') or description['decode']['test_cfg']
    iou, number = test_cfg['nms']['iou_threshold'], len(merged['boxes'])
    iou = iou if iou < 1 else MERGED  # DETR's
    kept = np.array(nms(merged['boxes'], merged['scores'], merged['labels'], iou, number), int)
    boxes, labels, cut = (merged[name][kept] for name in ('boxes', 'labels', 'cut'))
    kept = kept[~_are_parts(boxes, labels, cut, iou)]
    merged = {name: values[kept] for name, values in merged.items() if name != 'cut'}
    if has_masks:
        merged['masks'] = np.zeros((len(kept), *pixels.shape[:2]), bool)
        for canvas, index in zip(merged['masks'], kept.tolist()):
            top, left, mask = places[index]
            canvas[top : top + mask.shape[0], left : left + mask.shape[1]] = mask
    return merged


def _are_parts(boxes: np.ndarray, labels: np.ndarray, cut: np.ndarray, share: float) -> np.ndarray:
    """Tell which cut boxes have more than a share of their area in a larger box of their class."""
    sides = boxes[:, 2:] - boxes[:, :2]
    areas, parts = sides.prod(1), np.zeros(len(boxes), bool)
    for index in cut.nonzero()[0]:
        low = np.maximum(boxes[index, :2], boxes[:, :2])
        high = np.minimum(boxes[index, 2:], boxes[:, 2:])
        inside = np.maximum(high - low, 0).prod(1) > share * areas[index]
        parts[index] = (inside & (areas > areas[index]) & (labels == labels[index])).any()
    return parts
