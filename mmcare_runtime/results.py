"""Read a file's outputs by its description: boxes, masks, a label map or probabilities."""

from __future__ import annotations

import math
from typing import Any, Dict, Iterable, Mapping, Sequence

import cv2
import numpy as np

from mmcare_runtime.masks import paste_masks
from mmcare_runtime.prepare import Place

Results = Dict[str, np.ndarray]


def read_results(
    description: Mapping[str, Any],
    outputs: Sequence[np.ndarray],
    place: Place,
    size: Sequence[int],
    score: float | None = None,
) -> Results:
    """Read the outputs of the file of a whole model.

    Args:
        description: A checked description.
        outputs: In the file's order; maps are (1, C, h, w).
        place: Where the picture is in the image.
        size: Height and width of the picture.
        score: Least score of boxes, applied before NMS, or to the boxes that the file's NMS has
            kept; None: the config's alone.

    Returns:
        For a detector, ``boxes`` (N, 4) as x1, y1, x2, y2 in pixels of the picture, ``scores`` (N,)
        and ``labels`` (N,), the best first; if the file computes masks, ``masks`` (N, H, W) of
        bool, a byte for each pixel of the picture and each box. For a segmentor, ``labels`` (H, W).
        For a classifier, ``scores`` (K,) and ``labels`` (K,), the best first.

    Raises:
        ValueError: If the description does not say how the outputs are read.
    """
    kind = description['outputs'][0].get('kind')
    activation = description.get('activation')
    if kind == 'boxes':
        detections = read_detections(description, outputs, score)
        results = suppress(*detections, place, description['test_cfg'])
    elif description.get('decode') is not None:
        results = decode_boxes(outputs, description['decode'], place, score)
    elif kind == 'labels':
        labels = crop(outputs[0][0], place)
        aligned = bool(description.get('align_corners'))
        return dict(labels=enlarge_labels(labels, size, aligned).astype(np.int64))
    elif kind == 'probabilities' and outputs[0].ndim == 2:
        return rank(outputs[0][0])
    elif len(outputs) > 1 or (activation is None and kind is None):
        raise ValueError('the file does not describe how its outputs are decoded')
    elif outputs[0].ndim == 4:
        shape, aligned = description['shape'], bool(description.get('align_corners'))
        threshold, logits = read_threshold(description), read_logits(description, outputs)
        return dict(labels=read_labels(logits, shape, place, size, threshold, aligned))
    else:
        (logits,) = outputs[0]
        return rank(sigmoid(logits) if activation == 'sigmoid' else softmax(logits))
    ratios = np.divide(size, place[2:])
    ratios = np.array([ratios[1], ratios[0]] * 2, np.float32)
    results['boxes'] *= ratios
    rows = results.pop('rows')
    kinds = [output.get('kind') for output in description['outputs']]
    if 'masks' in kinds:  # they cover the boxes before clipping to the picture
        whole = (read_boxes(description, outputs)[rows] - [place[1], place[0]] * 2) * ratios
        threshold = description['test_cfg'].get('mask_thr_binary', 0.5)
        masks = outputs[kinds.index('masks')][0, rows]
        results['masks'] = paste_masks(masks, whole, size, threshold)
    return results


def read_logits(description: Mapping[str, Any], outputs: Sequence[np.ndarray]) -> np.ndarray:
    """Return the logits (B, K, h, w) of a segmentor, even if the file has probabilities."""
    (about,) = description['outputs']
    if about.get('kind') != 'probabilities':
        return outputs[0]
    return to_logits(outputs[0], about['activation'])


def sigmoid(x: np.ndarray) -> np.ndarray:
    """Compute 1 / (1 + exp(-x)) without an overflow."""
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, small) / (1 + small)


def softmax(x: np.ndarray) -> np.ndarray:
    """Compute the softmax of the last axis."""
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def crop(maps: np.ndarray, place: Place) -> np.ndarray:
    """Cut padding off maps (..., H, W)."""
    top, left, height, width = place
    return maps[..., top : top + height, left : left + width]


def locate(old: int, new: int, align_corners: bool = False) -> np.ndarray:
    """Return where new pixels are among the old ones of an axis, as in PyTorch."""
    if align_corners:
        return np.linspace(0, old - 1, new)
    return ((np.arange(new) + 0.5) * (old / new) - 0.5).clip(0, old - 1)


def interpolate(plane: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Interpolate linearly between the rows of a map (h, w), to one for each position."""
    low = np.floor(positions).astype(int)
    weights = (positions - low).astype(np.float32)[:, None]
    values = plane[low]
    if weights.any():
        values = values + (plane[np.minimum(low + 1, len(plane) - 1)] - values) * weights
    return values


def enlarge(plane: np.ndarray, size: Sequence[int], align_corners: bool = False) -> np.ndarray:
    """Resize a map (h, w) to a height and width, bilinearly, as PyTorch does."""
    plane = np.ascontiguousarray(plane, np.float32)
    if plane.shape == tuple(size):
        return plane
    if not align_corners:
        return cv2.resize(plane, (size[1], size[0]), interpolation=cv2.INTER_LINEAR)
    for old, new in zip(plane.shape, size):
        plane = interpolate(plane, locate(old, new, True)).T
    return plane


def enlarge_labels(
    labels: np.ndarray, size: Sequence[int], align_corners: bool = False
) -> np.ndarray:
    """Resize a map (h, w) to a height and width: each pixel gets the nearest one's label."""
    rows, columns = (
        np.floor(locate(old, new, align_corners) + 0.5).astype(int)
        for old, new in zip(labels.shape, size)
    )
    return labels[rows[:, None], columns]


def to_logits(probabilities: np.ndarray, activation: str) -> np.ndarray:
    """Return logits that give these probabilities.

    Logits of a softmax differ from the network's by one number for each pixel, the same for all
    classes: averages and interpolations have the same largest class.
    """
    values = np.asarray(probabilities, np.float32).clip(1e-30, 1)
    if activation == 'softmax':
        return np.log(values)
    return np.log(values) - np.log1p(-values.clip(max=1 - 2**-24))


def read_threshold(description: Mapping[str, Any]) -> float:
    """Return the probability above which a segmentor of one channel sees class 1."""
    return description.get('threshold', 0.3)


def choose(
    planes: Iterable[np.ndarray], number: int, size: Sequence[int], threshold: float = 0.3
) -> np.ndarray:
    """Choose the class of each pixel, at a height and width, from a map of logits for each class.

    With one channel, a pixel is class 1 if its probability is above the threshold.
    """
    labels = np.zeros(size, np.int64)
    least = -math.inf if number > 1 else math.log(threshold / (1 - threshold))
    best = np.full(size, least, np.float32)
    for label, plane in enumerate(planes):  # all classes of a photograph take gigabytes
        labels[plane > best] = label if number > 1 else 1
        np.maximum(best, plane, out=best)
    return labels


def read_labels(
    logits: np.ndarray,
    shape: Sequence[int],
    place: Place,
    size: Sequence[int],
    threshold: float = 0.3,
    align_corners: bool = False,
) -> np.ndarray:
    """Enlarge logits (1, K, h, w) to an image, cut off padding, enlarge to a picture; choose."""

    def enlarge_plane(plane: np.ndarray) -> np.ndarray:
        return enlarge(crop(enlarge(plane, shape, align_corners), place), size, align_corners)

    return choose(map(enlarge_plane, logits[0]), logits.shape[1], size, threshold)


def rank(scores: np.ndarray) -> Results:
    """Sort the scores (K,) of classes."""
    labels = np.argsort(-scores, kind='stable')
    return dict(scores=scores[labels], labels=labels)


def above(scores: np.ndarray, test_cfg: Mapping[str, Any], score: float | None) -> np.ndarray:
    """Tell which scores are above the config's threshold, and not below ``score``."""
    passes = scores > test_cfg.get('score_thr', 0)
    return passes if score is None else passes & (scores >= score)


def decode_boxes(
    raw: Sequence[np.ndarray],
    decode: Mapping[str, Any],
    place: Place,
    score: float | None = None,
) -> Results:
    """Decode the maps of a one-stage detector as mmdet's base head does; the best boxes first.

    The result must equal that of ``Boxes`` in ``mmcare/export/tasks/one_stage_detector.py`` (see
    ``tests/test_export/test_postprocessing.py``) and of the page for phones, ``decode.js`` (see
    ``projects/phone/tests/test_phone.py``).

    Args:
        raw: Scores of all levels, then boxes, then factors of scores if there are any.
        decode: Describes priors, the coder of boxes and thresholds, see docs/description.md.
        place: Where the picture is in the image.
        score: Least score, see :func:`read_results`.
    """
    params, test_cfg, number = decode['prior_params'], decode['test_cfg'], len(decode['strides'])
    anchors = params.get('base_anchors', [[[0.0] * 4]] * number)
    kinds = [raw[start : start + number] for start in range(0, len(raw), number)]
    most = test_cfg.get('nms_pre', -1)
    levels = []
    for stride, around, *maps in zip(decode['strides'], anchors, *kinds):
        height, width = maps[0].shape[2:]
        # (1, priors * values, H, W) to (H * W * priors, values)
        rows = height * width * len(around)
        logits, values, *factors = (x[0].transpose(1, 2, 0).reshape(rows, -1) for x in maps)
        is_sigmoid = decode['score_activation'] == 'sigmoid'  # softmax has a class for nothing
        scores = sigmoid(logits) if is_sigmoid else softmax(logits)[:, :-1]
        index, labels = above(scores, test_cfg, score).nonzero()
        scores = scores[index, labels]
        best = np.argsort(-scores, kind='stable')
        best = best[:most] if most > 0 else best
        index, labels, scores = index[best], labels[best], scores[best]
        for factor in factors:
            scores = scores * sigmoid(factor[index, 0])
        cells, prior = np.divmod(index, len(around))
        y, x = np.divmod(cells, width)
        corners = (np.stack([x, y, x, y], 1) + params.get('offset', 0)) * stride
        priors = (corners + np.asarray(around)[prior]).astype(np.float32)
        levels.append((decode_values(values[index], priors, decode['coder']), scores, labels))
    boxes, scores, labels = map(np.concatenate, zip(*levels))
    if score is not None:  # which factors may have lowered
        kept = scores >= score
        boxes, scores, labels = boxes[kept], scores[kept], labels[kept]
    rows = np.arange(len(boxes))
    return suppress(boxes, scores, labels, rows, place, test_cfg)


def decode_values(values: np.ndarray, priors: np.ndarray, coder: Mapping[str, Any]) -> np.ndarray:
    """Decode values (N, 4), distances or deltas, of priors (N, 4) to x1, y1, x2, y2."""
    low, high = priors[:, :2], priors[:, 2:]
    if coder['type'] == 'DistancePointBBoxCoder':
        return np.concatenate([low - values[:, :2], high + values[:, 2:]], 1)
    if coder['type'] != 'DeltaXYWHBBoxCoder':
        raise ValueError(f'boxes of decode.coder.type = {coder["type"]!r} are not decoded here')
    values = values * np.array(coder['stds'], np.float32) + np.array(coder['means'], np.float32)
    shifts, scales = values[:, :2] * (high - low), values[:, 2:]
    most, least = abs(math.log(coder['wh_ratio_clip'])), -math.inf
    if coder['add_ctr_clamp']:
        shifts = shifts.clip(-coder['ctr_clamp'], coder['ctr_clamp'])
    else:
        least = -most
    centers = (low + high) / 2 + shifts
    halves = (high - low) * np.exp(scales.clip(least, most)) / 2
    return np.concatenate([centers - halves, centers + halves], 1)


def read_detections(
    description: Mapping[str, Any], outputs: Sequence[np.ndarray], score: float | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Read what a decoded detector's file has found, before NMS if NMS is not in the file.

    Returns:
        Boxes (N, 4) as x1, y1, x2, y2 in pixels of the file's input, scores (N,), which are above
        the config's threshold, labels (N,), and the rows of the file's outputs (N,).
    """
    boxes = read_boxes(description, outputs)
    scores = outputs[1].reshape(len(boxes), -1)  # of each class where there are no labels
    rows, labels = above(scores, description['test_cfg'], score).nonzero()
    scores = scores[rows, labels]
    if description['outputs'][2:]:
        labels = outputs[2].reshape(-1)[rows].astype(np.int64)
    return boxes[rows], scores, labels, rows


def read_boxes(description: Mapping[str, Any], outputs: Sequence[np.ndarray]) -> np.ndarray:
    """Read all boxes (N, 4) of a decoded detector's file, in pixels of the file's input."""
    tensor = description['outputs'][0]
    boxes = outputs[0].reshape(-1, 4).astype(np.float32) * np.array(tensor['scale'], np.float32)
    return to_corners(boxes) if tensor['box_format'] == 'cxcywh' else boxes


def to_corners(boxes: np.ndarray) -> np.ndarray:
    """Turn boxes (N, 4), centre, width and height, to x1, y1, x2, y2."""
    low = boxes[:, :2] - boxes[:, 2:] / 2
    return np.concatenate([low, low + boxes[:, 2:]], 1)


def suppress(
    boxes: np.ndarray,
    scores: np.ndarray,
    labels: np.ndarray,
    rows: np.ndarray,
    place: Place,
    test_cfg: Mapping[str, Any],
) -> Results:
    """Move boxes to a picture in an image, clip them, and keep the best after NMS as mmdet does.

    They are not clipped if ``clip_border`` is False.
    """
    top, left, height, width = place
    boxes = boxes - np.array([left, top] * 2, np.float32)
    if test_cfg.get('clip_border', True):
        boxes = boxes.clip(0, np.array([width, height] * 2, np.float32))
    large = (boxes[:, 2:] - boxes[:, :2] > test_cfg.get('min_bbox_size', -1)).all(1)
    boxes, scores, labels, rows = boxes[large], scores[large], labels[large], rows[large]
    kept = nms(boxes, scores, labels, test_cfg['nms']['iou_threshold'], test_cfg['max_per_img'])
    return dict(boxes=boxes[kept], scores=scores[kept], labels=labels[kept], rows=rows[kept])


def nms(
    boxes: np.ndarray, scores: np.ndarray, labels: np.ndarray, iou: float, number: int
) -> list[int]:
    """Choose the best boxes (N, 4) that no better one of their class overlaps, the best first.

    The result must equal ``nms_mask`` of ``mmcare/export/plain_operators.py``, as a test in
    ``tests/test_export/test_instances.py`` shows.
    """
    order = np.argsort(-scores, kind='stable')
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    kept: list[int] = []
    while len(order) and len(kept) < number:
        best, order = order[0], order[1:]
        kept.append(int(best))
        low = np.maximum(boxes[best, :2], boxes[order, :2])
        high = np.minimum(boxes[best, 2:], boxes[order, 2:])
        shared = np.maximum(high - low, 0).prod(1)
        # Not a quotient, which is undefined for empty boxes.
        overlaps = shared > iou * (areas[best] + areas[order] - shared)
        order = order[~overlaps | (labels[order] != labels[best])]
    return kept
