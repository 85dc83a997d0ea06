"""Measure what an exported file finds against annotations, without a toolbox, on the device.

Metrics are COCO's average precision by pycocotools for detectors, mIoU for segmentors, and accuracy
for classifiers.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import warnings
from pathlib import Path
from typing import Any, Mapping

import cv2
import numpy as np

from mmcare_runtime.coco import find_faults, find_id_zero, read_coco
from mmcare_runtime.command import make_parser, open_file
from mmcare_runtime.drawing import list_coco_results
from mmcare_runtime.model import Model
from mmcare_runtime.saving import move, temporary_beside
from mmcare_runtime.schema import nchw
from mmcare_runtime.suffixes import PICTURES, list_files
from mmcare_runtime.text import escape, print_error, set_up_streams

IGNORED = 255  # of masks: a pixel that has no class
_COMMON = ('image_id', 'category_id', 'score')
COCO_METRICS = ('mAP', 'mAP_50', 'mAP_75', 'mAP_s', 'mAP_m', 'mAP_l')  # as mmdet names them


def evaluate(
    model: Model,
    images: Path,
    annotations: Path | None = None,
    reduce_zero_label: bool | None = None,
    tile: str | None = None,
    results: Path | None = None,
) -> dict[str, float]:
    """Measure a whole model.

    Args:
        model: An opened file.
        images: A folder of pictures; for classifiers, a folder with a folder for each class.
        annotations: For detectors, COCO's JSON file; for segmentors, a folder of masks, PNG with a
            class for each pixel, with the pictures' names; for classifiers, nothing.
        reduce_zero_label: Class 0 of masks means none, and others move down by one, as in ADE20K.
            None: as the description says, or False.
        tile: See :meth:`mmcare_runtime.Model.predict`.
        results: Where to write the boxes and masks that a detector finds, in the format of COCO's
            results; None: nowhere.

    Returns:
        Metrics by name: shares for COCO's, and per cent for others, as the toolboxes give them;
        with the AP or IoU of each class that the annotations have.

    Raises:
        FileNotFoundError: If pictures, annotations or a mask do not exist.
        ValueError: If the annotations do not fit this model.
    """
    output = model.description['outputs'][0]
    if model.has_boxes:
        if annotations is None or not annotations.is_file():
            raise FileNotFoundError(f'{annotations} is not a file of annotations')
        return evaluate_boxes(model, images, annotations, tile, results)
    if results is not None:
        raise ValueError("COCO's results are those of detectors")
    if len(output['shape']) == 2:
        return evaluate_classes(model, images)
    if annotations is None or not annotations.is_dir():
        raise FileNotFoundError(f'{annotations} is not a folder of masks')
    return evaluate_labels(model, images, annotations, reduce_zero_label, tile)


def evaluate_boxes(
    model: Model,
    images: Path,
    annotations: Path,
    tile: str | None = None,
    results: Path | None = None,
) -> dict[str, float]:
    """Compute COCO's average precision, of boxes, and of masks if the file finds them."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    names = model.description.get('classes') or []
    if not names:
        raise ValueError(f'{model.file} does not name its classes')
    outputs = model.description['outputs']
    coco, has_masks = read_coco(annotations), any(x.get('kind') == 'masks' for x in outputs)
    for fault in find_faults(str(annotations), coco, names, has_masks):
        raise ValueError(fault)
    categories = [category['name'] for category in coco.categories or ()]
    if [name for name in categories if name in names] != [*names]:
        warnings.warn(
            f'{annotations} has the classes in another order than {model.file}: mmdet numbers '
            'them by the order in its annotation file, whatever metainfo.classes says. If that is '
            'this file, names of classes are exchanged',
            stacklevel=2,
        )
    id_zero = find_id_zero(str(annotations), coco.annotations or ())
    if id_zero:
        warnings.warn(f'{id_zero}. This evaluation numbers them itself', stacklevel=2)
    for number, item in enumerate(coco.annotations or (), 1):
        item['id'] = number
        item.setdefault('iscrowd', 0)
        item.setdefault('area', item['bbox'][2] * item['bbox'][3])
    ids = {category['name']: category['id'] for category in coco.categories or ()}
    truth = COCO()
    truth.dataset = coco._asdict()
    with contextlib.redirect_stdout(io.StringIO()):  # it prints what it does
        truth.createIndex()
    annotated: list[dict[str, Any]] = []
    for number, image in truth.imgs.items():
        pixels = model.read_picture(images / image['file_name'])
        shape = image['height'], image['width']
        if np.abs(np.subtract(pixels.shape[:2], shape)).max() > 1:
            raise ValueError(
                f'{image["file_name"]} is read with height and width {pixels.shape[:2]}, and '
                f'{annotations} says {shape}: correct the sizes, and the boxes with them, or, if '
                'EXIF data turn the picture, see whether boxes fit the turned one'
            )
        found = model.predict(pixels, tile=tile)
        if 'masks' in found and found['masks'].shape[1:] != shape:
            raise ValueError(f'{image["file_name"]} is not of the size in {annotations}')
        annotated += list_coco_results(found, number, [ids[name] for name in names])
    if results is not None:
        with temporary_beside(results) as temporary:
            temporary.write_text(json.dumps(annotated))
            move(temporary, results, overwrite=True)
    if not annotated:
        raise ValueError('the file finds nothing in these pictures')
    metrics = {}
    kinds = {'bbox': 'bbox', 'segm': 'segmentation'}
    for kind, key in kinds.items():
        if key not in annotated[0]:
            continue
        with contextlib.redirect_stdout(io.StringIO()):
            # If rows had boxes, masks would get the areas of boxes.
            rows = [{k: v for k, v in about.items() if k in (key, *_COMMON)} for about in annotated]
            evaluation = COCOeval(truth, truth.loadRes(rows), kind)
            evaluation.params.catIds = [ids[name] for name in names]
            evaluation.params.maxDets = [100, 300, 1000]  # boxes of a picture, as in mmdet
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
        metrics.update(
            {f'{kind}_{name}': float(x) for name, x in zip(COCO_METRICS, evaluation.stats)}
        )
        # Thresholds, recalls, classes, all areas, all boxes; -1 where a class has no objects.
        precision = evaluation.eval['precision'][:, :, :, 0, -1].mean((0, 1))
        shares = dict(zip(sorted(ids[name] for name in names), precision))
        metrics.update(
            {f'{kind}_AP_{n}': float(shares[ids[n]]) for n in names if shares[ids[n]] >= 0}
        )
    return metrics


def evaluate_labels(
    model: Model,
    images: Path,
    masks: Path,
    reduce_zero_label: bool | None = None,
    tile: str | None = None,
) -> dict[str, float]:
    """Compute the mean intersection over union of classes, and the share of right pixels."""
    described = model.description.get('reduce_zero_label')
    if reduce_zero_label is not None and described not in (None, reduce_zero_label):
        raise ValueError(
            f'{model.file} says reduce_zero_label={described}, not {reduce_zero_label}'
        )
    reduce_zero_label = described or reduce_zero_label
    matrix: np.ndarray | None = None
    names = model.description.get('classes')
    (output, *_) = model.description['outputs']
    # A map of labels does not say how many classes there are; one of one channel has two.
    channels = 0 if output.get('kind') == 'labels' else nchw(output)[1] or 0
    known_number = max(len(names or ()), channels and max(channels, 2))
    paths = list_files(images, PICTURES)
    if not paths:
        raise FileNotFoundError(f'{images} has no pictures')
    for path in paths:
        mask_path = masks / path.relative_to(images).with_suffix('.png')
        mask = read_mask(mask_path)
        if reduce_zero_label:
            mask = np.where((mask == 0) | (mask == IGNORED), IGNORED, mask - 1)
        labels = model.predict(path, tile=tile)['labels']
        if labels.shape != mask.shape:
            raise ValueError(f'{mask_path} is {mask.shape}, its picture {labels.shape}')
        known = mask != IGNORED
        mask, labels = mask[known], labels[known]
        if known_number and mask.max(initial=0) >= known_number:
            text = f'{mask_path} has class {mask.max()}, and {model.file} {known_number} classes'
            raise ValueError(text)
        largest = max(int(values.max(initial=0)) for values in (mask, labels))
        number = max(known_number, largest + 1, 0 if matrix is None else len(matrix))
        pairs = np.bincount(mask * number + labels, minlength=number**2).reshape(number, number)
        if matrix is not None:
            pairs[: len(matrix), : len(matrix)] += matrix
        matrix = pairs
    assert matrix is not None, 'there are pictures'
    right, expected = np.diag(matrix), matrix.sum(1)
    if not expected.any():
        raise ValueError(f'no pixel in {masks} has a class')
    union = expected + matrix.sum(0) - right
    with np.errstate(invalid='ignore'):
        shares, accuracies = right / union, right / expected
    return dict(
        aAcc=float(100 * right.sum() / expected.sum()),
        mIoU=float(100 * np.nanmean(shares)),
        mAcc=float(100 * np.nanmean(accuracies)),
        **{f'IoU_{n}': float(100 * x) for n, x in zip(names or (), shares) if x >= 0},
    )


def read_mask(path: Path) -> np.ndarray:
    """Read a PNG with a class for each pixel, (H, W)."""
    data = np.fromfile(str(path), np.uint8)
    mask = cv2.imdecode(data, cv2.IMREAD_UNCHANGED) if len(data) else None
    # OpenCV makes colours of a palette, and 0 and 255 of one bit; Pillow keeps the numbers.
    is_binary = mask is not None and data[:4].tobytes() == b'\x89PNG' and data[24] == 1
    if mask is not None and (mask.ndim == 3 or is_binary):
        try:
            from PIL import Image
        except ImportError as error:
            raise ValueError(
                f'{path} has colours or one bit, which Pillow reads: pip install pillow'
            ) from error
        mask = np.array(Image.open(path))
    if mask is None or mask.ndim != 2:
        raise ValueError(f'{path} is not a mask with a class for each pixel')
    return mask.astype(np.int64)


def evaluate_classes(model: Model, images: Path) -> dict[str, float]:
    """Compute the shares of pictures whose class comes first, and is among the first five."""
    folders = sorted(folder.name for folder in images.iterdir() if folder.is_dir())
    names = model.description.get('classes')
    labels = {name: index for index, name in enumerate(folders)}
    unknown = {*folders} - {*(names or ())}
    if names and not unknown:
        labels = {name: names.index(name) for name in folders}
    elif unknown < {*folders}:
        raise ValueError(f'{images} has folders that are not classes: {", ".join(sorted(unknown))}')
    elif len(folders) != model.description['outputs'][0]['shape'][1]:
        raise ValueError(f'{images} has not a folder for each class')
    # As for mmpretrain, pictures beside the folders have no class.
    paths = [path for path in list_files(images, PICTURES) if path.parent != images]
    if not paths:
        raise FileNotFoundError(f'{images} has no folders of pictures')
    ranks = []
    for path in paths:
        label = labels[path.relative_to(images).parts[0]]
        order = model.predict(path)['labels']
        ranks.append(int((order == label).argmax()))
    return {f'accuracy/top{k}': 100 * float(np.less(ranks, k).mean()) for k in (1, 5)}


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = make_parser('mmcare_runtime.evaluate', __doc__)
    parser.add_argument('--images', type=Path, required=True, metavar='FOLDER')
    parser.add_argument(
        '--annotations', type=Path, metavar='FILE_OR_FOLDER', help="COCO's JSON; or masks as PNG"
    )
    parser.add_argument(
        '--reduce-zero-label',
        action='store_true',
        default=None,
        help='class 0 of masks means none, as in ADE20K; default: as the file says',
    )
    parser.add_argument('--json', action='store_true', help='print the metrics as JSON')
    parser.add_argument(
        '--results',
        type=Path,
        metavar='FILE',
        help="write boxes and masks in the format of COCO's results, with the annotations' ids; "
        'an older one is replaced',
    )
    return parser.parse_args()


def print_metrics(metrics: Mapping[str, float], as_json: bool) -> None:
    """Print a metric in each line, or JSON."""
    if as_json:
        print(json.dumps(metrics))
        return
    for name, value in metrics.items():
        print(escape(f'{name} {value:.4f}'))


def main() -> int:
    """Measure a file, print the metrics, and return the status."""
    arguments = parse_arguments()
    set_up_streams()
    try:
        metrics = evaluate(
            open_file(arguments),
            arguments.images,
            arguments.annotations,
            arguments.reduce_zero_label,
            arguments.tile,
            arguments.results,
        )
    except (ImportError, OSError, ValueError, LookupError) as error:
        print_error(error)
        return 2
    print_metrics(metrics, arguments.json)
    return 0


if __name__ == '__main__':
    sys.exit(main())
