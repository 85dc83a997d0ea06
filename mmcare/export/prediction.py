"""What a file finds in a picture: boxes, a label map or probabilities, by its description alone."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mmcv
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mmcare.export.preprocessing import pad_to

Place = tuple[int, int, int, int]  # of a picture in an image: top, left, height, width


def predict(
    run: Callable[[Tensor], Sequence[np.ndarray]],
    description: Mapping[str, Any],
    picture: str | os.PathLike | np.ndarray,
) -> dict[str, Any]:
    """Prepare a picture as a file describes, run the file, and read its outputs.

    Args:
        run: Maps an image (1, 3, H, W) to the outputs of the file of a whole model.
        description: Of the file.
        picture: A path, or pixels (H, W, 3) as OpenCV reads them (BGR, from 0 to 255).

    Returns:
        Of a detector, ``boxes`` (N, 4) as x1, y1, x2, y2 in pixels of the picture, ``scores`` (N,)
        and ``labels`` (N,), the best first. Of a segmentor, ``labels`` (H, W). Of a classifier,
        ``scores`` (K,) and ``labels`` (K,), the best first. ``names`` of the classes, or None.

    Raises:
        ValueError: If the file is not of a whole model, or does not describe what is needed.
        FileNotFoundError: If there is no picture.
    """
    if description.get('part') != 'model':
        raise ValueError('only files of whole models predict: export with --part model')
    pixels = picture if isinstance(picture, np.ndarray) else read_pixels(picture)
    image, place = prepare(pixels, description['inputs'][0], description['shape'])
    kind, activation = description['outputs'][0].get('kind'), description.get('activation')
    outputs = [*map(torch.from_numpy, run(image))]
    if kind == 'boxes':
        detections = read_detections(description, outputs)
        found = suppress(*detections, place, description['test_cfg'])
    elif 'decode' in description:
        found = decode_boxes(outputs, description['decode'], place)
    elif kind == 'labels':
        whole = crop(outputs[0][None], place).float()
        whole = F.interpolate(whole, pixels.shape[:2], mode='nearest-exact')
        found = dict(labels=whole[0, 0].long())
    elif kind == 'probabilities':
        found = rank(outputs[0][0])
    elif len(outputs) > 1 or activation is None:
        raise ValueError('the file does not describe how its outputs are decoded')
    elif outputs[0].dim() == 4:
        shapes = image.shape[2:], place, pixels.shape[:2]
        found = dict(labels=read_labels(outputs[0], *shapes, description.get('threshold', 0.3)))
    else:
        (logits,) = outputs[0]
        found = rank(logits.sigmoid() if activation == 'sigmoid' else logits.softmax(0))
    if 'boxes' in found:
        found['boxes'] *= torch.tensor([*np.divide(pixels.shape[1::-1], place[:1:-1])] * 2).float()
    results = {name: value.numpy() for name, value in found.items()}
    return dict(results, names=description.get('classes'))


def read_pixels(path: str | os.PathLike) -> np.ndarray:
    """Read a picture as pixels (H, W, 3) in BGR, or raise a ValueError."""
    pixels = mmcv.imread(os.fspath(path))
    if pixels is None:
        raise ValueError(f'{path} is not a picture')
    return pixels


def prepare(
    pixels: np.ndarray, taken: Mapping[str, Any], shape: Sequence[int]
) -> tuple[Tensor, Place]:
    """Resize, crop, normalize and pad pixels (H, W, 3) to an image (1, 3, *shape).

    Args:
        pixels: In BGR, from 0 to 255.
        taken: Describes the input of a file.
        shape: Its height and width.

    Returns:
        The image, and where the picture is in it.
    """
    if taken['kind'] == 'tensor' and not taken['mean']:
        raise ValueError('the file does not name mean and std of images')
    how, sides = taken['resize'] or {}, pixels.shape[:2]
    if how.get('shorter'):
        height, width = (side * how['shorter'] // min(sides) for side in sides)
    else:
        ratio = min(np.divide(shape, sides))
        if not how:  # the test pipeline leaves sizes as they are
            ratio = min(ratio, 1)
        height, width = (round(side * ratio) for side in sides)
    options = {key: how[key] for key in ('interpolation', 'backend') if key in how}
    pixels = np.atleast_3d(mmcv.imresize(pixels, (width, height), **options))
    if how.get('crop'):
        rows, columns = how['crop']
        top, left = (max(round(side / 2), 0) for side in (height - rows, width - columns))
        pixels = pixels[top : top + rows, left : left + columns]
    if taken['channels'] == 'RGB':
        pixels = pixels[..., ::-1]
    image = torch.from_numpy(pixels.astype(np.float32)).permute(2, 0, 1)
    if taken['kind'] == 'tensor':
        mean, std = torch.tensor([taken['mean'], taken['std']])[..., None, None]
        image = (image - mean) / std
    letterbox = taken.get('letterbox', 'top-left')  # files of 1.0.0rc5 do not say it
    padded, (left, _, top, _) = pad_to(image[None], shape, taken['padding'], letterbox)
    return padded, (top, left, *image.shape[1:])


def crop(maps: Tensor, place: Place) -> Tensor:
    """Cut padding off maps (..., H, W)."""
    top, left, height, width = place
    return maps[..., top : top + height, left : left + width]


def read_labels(
    logits: Tensor, shape: Any, place: Place, whole: Any, threshold: float = 0.3
) -> Tensor:
    """Enlarge logits (1, K, h, w) to an image, cut off padding, enlarge to a picture, and choose.

    One channel is that of class 1 where its probability is above the threshold.
    """
    number = logits.shape[1]
    labels = torch.zeros(whole, dtype=torch.int64)
    best = torch.full(whole, -math.inf if number > 1 else math.log(threshold / (1 - threshold)))
    for label in range(number):  # one by one: all classes of a photograph take gigabytes
        plane = F.interpolate(logits[:, label : label + 1], shape, mode='bilinear')
        plane = F.interpolate(crop(plane, place), whole, mode='bilinear')[0, 0]
        labels[plane > best] = label if number > 1 else 1
        best = best.maximum(plane)
    return labels


def decode_boxes(
    raw: Sequence[Tensor], decode: Mapping[str, Any], place: Place
) -> dict[str, Tensor]:
    """Decode the maps of a one-stage detector as mmdet's base head does; the best boxes first.

    Args:
        raw: Scores of all levels, then boxes, then factors of scores if there are any.
        decode: Describes priors, the coder of boxes and thresholds, see docs/deploy.md.
        place: Of the picture in the image.
    """
    params, test, number = decode['prior_params'], decode['test_cfg'], len(decode['strides'])
    anchors = params.get('base_anchors', [[[0.0] * 4]] * number)
    kinds = [raw[start : start + number] for start in range(0, len(raw), number)]
    levels = []
    for stride, around, *maps in zip(decode['strides'], anchors, *kinds, strict=True):
        y, x = torch.meshgrid(*map(torch.arange, maps[0].shape[2:]), indexing='ij')
        cells = (torch.stack([x, y, x, y], 2) + params.get('offset', 0)) * stride
        priors = (cells[:, :, None] + torch.tensor(around)).reshape(-1, 4)
        # (1, priors * values, H, W) to (H * W * priors, values)
        maps = [x.permute(0, 2, 3, 1).reshape(len(priors), -1) for x in maps]
        scores, values, *factors = maps
        is_sigmoid = decode['score_activation'] == 'sigmoid'  # softmax has a class for nothing
        scores = scores.sigmoid() if is_sigmoid else scores.softmax(1)[:, :-1]
        index, labels = (scores > test.get('score_thr', 0)).nonzero().T
        scores = scores[index, labels]
        best = scores.argsort(descending=True)
        best = best[: test['nms_pre']] if test.get('nms_pre', -1) > 0 else best
        index, labels, scores = index[best], labels[best], scores[best]
        for factor in factors:
            scores = scores * factor[index, 0].sigmoid()
        boxes = decode_values(values[index], priors[index], decode['coder'])
        levels.append((boxes, scores, labels))
    boxes, scores, labels = map(torch.cat, zip(*levels, strict=True))
    return suppress(boxes, scores, labels, place, test)


def suppress(
    boxes: Tensor, scores: Tensor, labels: Tensor, place: Place, test: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Move boxes to a picture in an image, clip them, and keep the best after NMS as mmdet does."""
    from torchvision.ops import batched_nms, clip_boxes_to_image  # which backbones do without

    top, left, *size = place
    boxes = clip_boxes_to_image(boxes - boxes.new_tensor([left, top] * 2), size)
    large = (boxes[:, 2:] - boxes[:, :2] > test.get('min_bbox_size', -1)).all(1)
    boxes, scores, labels = boxes[large], scores[large], labels[large]
    kept = batched_nms(boxes, scores, labels, test['nms']['iou_threshold'])[: test['max_per_img']]
    return dict(boxes=boxes[kept], scores=scores[kept], labels=labels[kept])


def rank(scores: Tensor) -> dict[str, Tensor]:
    """Sort the scores (K,) of classes."""
    return dict(zip(('scores', 'labels'), scores.sort(descending=True), strict=True))


def read_detections(
    description: Mapping[str, Any], outputs: Sequence[Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Read what a decoded detector's file has found, before NMS where that is not in the file.

    Returns:
        Boxes (N, 4) as x1, y1, x2, y2 in pixels of the file's input, scores (N,), which are above
        the config's threshold, and labels (N,).
    """
    boxes, scores, *rest = (torch.as_tensor(output) for output in outputs)
    how = description['outputs'][0]
    boxes = boxes.reshape(-1, 4) * torch.tensor(how['scale'])
    if how['box_format'] == 'cxcywh':
        low = boxes[:, :2] - boxes[:, 2:] / 2
        boxes = torch.cat([low, low + boxes[:, 2:]], 1)
    scores = scores.reshape(len(boxes), -1)  # of each class where there are no labels
    rows, labels = (scores > description['test_cfg'].get('score_thr', 0)).nonzero(as_tuple=True)
    scores = scores[rows, labels]
    return boxes[rows], scores, rest[0].reshape(-1)[rows].long() if rest else labels


def decode_values(values: Tensor, priors: Tensor, coder: Mapping[str, Any]) -> Tensor:
    """Decode values (N, 4), distances or deltas, of priors (N, 4) to x1, y1, x2, y2."""
    low, high = priors.chunk(2, 1)
    if coder['type'] == 'DistancePointBBoxCoder':
        return torch.cat([low - values[:, :2], high + values[:, 2:]], 1)
    if coder['type'] != 'DeltaXYWHBBoxCoder':
        raise ValueError(f'a {coder["type"]} is not decoded here')
    values = values * torch.tensor(coder['stds']) + torch.tensor(coder['means'])
    shifts, scales = values.chunk(2, 1)
    shifts, most = shifts * (high - low), abs(math.log(coder['wh_ratio_clip']))
    least: float | None = -most
    if coder['add_ctr_clamp']:
        shifts, least = shifts.clamp(-coder['ctr_clamp'], coder['ctr_clamp']), None
    centers, halves = (low + high) / 2 + shifts, (high - low) * scales.clamp(least, most).exp() / 2
    return torch.cat([centers - halves, centers + halves], 1)
