"""Core ML's non-maximum suppression (NMS), which follows the network of a one-stage detector.

A row has a box and its confidence in each class. What the fields mean:
https://apple.github.io/coremltools/mlmodel/Format/NonMaximumSuppression.html
"""

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmcare.export.errors import ExportError
from mmcare.export.plain_operators import nms_mask_operator
from mmcare.export.tasks.base import Description
from mmcare_runtime.results import nms, to_corners
from mmcare_runtime.text import tell_apart

ON_MAC = platform.system() == 'Darwin'
THRESHOLDS = ('iouThreshold', 'confidenceThreshold')  # inputs, as in Create ML's detectors
DRAWN = 512  # rows that a file's NMS is checked on
PER_OBJECT = 4  # rows near each other


def append_nms(model: Any, description: Description) -> Any:
    """Append NMS to a model of boxes and scores, as a pipeline."""
    import coremltools as ct

    program = model.get_spec()
    pipeline = ct.proto.Model_pb2.Model(specificationVersion=program.specificationVersion)
    pipeline.pipeline.models.add().CopyFrom(program)
    step = pipeline.pipeline.models.add(specificationVersion=program.specificationVersion)
    for output in program.description.output:
        step.description.input.add().CopyFrom(output)
        kept = step.description.output.add(name=output.name)
        kept.type.multiArrayType.dataType = output.type.multiArrayType.dataType
        sizes = kept.type.multiArrayType.shapeRange.sizeRanges
        values = output.type.multiArrayType.shape[1]
        sizes.add(lowerBound=0, upperBound=-1)
        sizes.add(lowerBound=values, upperBound=values)
    pipeline.description.input.MergeFrom(program.description.input)
    pipeline.description.output.MergeFrom(step.description.output)
    nms = step.nonMaximumSuppression
    nms.iouThreshold = description['test_cfg']['nms']['iou_threshold']
    nms.confidenceThreshold = description['test_cfg'].get('score_thr', 0.0)
    nms.pickTop.perClass = True
    boxes, scores = (output.name for output in program.description.output)
    nms.coordinatesInputFeatureName = nms.coordinatesOutputFeatureName = boxes
    nms.confidenceInputFeatureName = nms.confidenceOutputFeatureName = scores
    nms.iouThresholdInputFeatureName, nms.confidenceThresholdInputFeatureName = THRESHOLDS
    for whole in (step, pipeline):
        for name in THRESHOLDS:
            threshold = whole.description.input.add(name=name)
            threshold.type.doubleType.SetInParent()
            threshold.type.isOptional = True
    nms.stringClassLabels.vector.extend(name_classes(step, description))
    return ct.models.MLModel(pipeline, weights_dir=model.weights_dir, skip_model_load=True)


def name_classes(step: Any, description: Description) -> list[str]:
    """Name the classes of an NMS model; names of several classes get numbers."""
    number = step.description.input[1].type.multiArrayType.shape[1]
    return tell_apart(description.get('classes') or [str(index) for index in range(number)])


def split_pipeline(path: Path, folder: Path) -> tuple[Path, Any]:
    """Write the network of a pipeline as a package into a folder; also return the NMS model."""
    import coremltools as ct

    model = ct.models.MLModel(str(path), skip_model_load=True)
    spec = model.get_spec()
    network, step = spec.pipeline.models
    network.description.metadata.CopyFrom(spec.description.metadata)  # with the description
    package = folder / path.name
    network_model = ct.models.MLModel(network, weights_dir=model.weights_dir, skip_model_load=True)
    network_model.save(str(package))
    return package, step


def suppress(step: Any, inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Compute an NMS model: drop rows of low confidence, then those that a better row overlaps.

    A row has the class in which its confidence is largest. With ``perClass``, only rows of one
    class suppress each other. A row that is kept keeps its confidence in all classes.

    Args:
        step: The ``Model`` message of the NMS.
        inputs: By name: boxes (N, 4) as centre, width and height, scores (N, K), and, if others
            than the model's are wanted, thresholds.

    Returns:
        The boxes and scores that are kept, by name, the best first.
    """
    about = step.nonMaximumSuppression
    boxes = inputs[about.coordinatesInputFeatureName]
    scores = inputs[about.confidenceInputFeatureName]
    iou = inputs.get(about.iouThresholdInputFeatureName, about.iouThreshold)
    least = inputs.get(about.confidenceThresholdInputFeatureName, about.confidenceThreshold)
    best = scores.max(1)
    (rows,) = (best >= least).nonzero()
    labels = scores[rows].argmax(1) if about.pickTop.perClass else np.zeros_like(rows)
    kept = rows[nms(to_corners(boxes[rows]), best[rows], labels, iou, len(rows))]
    return {
        about.coordinatesOutputFeatureName: boxes[kept],
        about.confidenceOutputFeatureName: scores[kept],
    }


def check_nms(path: Path, step: Any, description: Description) -> None:
    """Compare the NMS of a file with the config's, on drawn boxes, and its names of classes.

    On a Mac, Core ML computes it, elsewhere :func:`suppress`. What it should keep comes from the
    description by torchvision's NMS.

    Raises:
        ExportError: If it keeps other boxes, or names other classes.
    """
    about, classes = step.nonMaximumSuppression, name_classes(step, description)
    if [*about.stringClassLabels.vector] != classes:
        raise ExportError(f'the NMS of {path.name} names other classes; it is not written')
    boxes, scores = draw_rows(len(classes))
    inputs = {
        name: values.numpy()
        for name, values in zip(
            (output['name'] for output in description['outputs']), (boxes, scores), strict=True
        )
    }
    if ON_MAC:
        import coremltools as ct

        outputs = ct.models.MLModel(step).predict(inputs)
    else:
        outputs = suppress(step, inputs)
    found = [outputs[name] for name in inputs]
    rows = choose_rows(boxes, scores, description['test_cfg'])
    expected = [boxes[rows].numpy(), scores[rows].numpy()]
    if len(found[0]) != len(rows) or not all(map(np.allclose, found, expected)):
        raise ExportError(
            f"the NMS of {path.name} keeps {len(found[0])} of {len(boxes)} boxes, the config's "
            f'keeps {len(rows)}; it is not written'
        )


def draw_rows(classes: int) -> tuple[Tensor, Tensor]:
    """Draw boxes (N, 4), centre, width and height, that overlap in groups, and scores (N, K).

    The largest scores of rows are evenly spaced from 0 to 1. In each group, one row has another
    class than the others.
    """
    generator = torch.Generator().manual_seed(0)
    objects = torch.rand(DRAWN // PER_OBJECT, 4, generator=generator)
    objects = objects * torch.tensor([1.0, 1.0, 0.1, 0.1]) + 0.02
    jitter = torch.rand(DRAWN, 4, generator=generator) * 0.02
    boxes = objects.repeat(PER_OBJECT, 1) + jitter
    labels = torch.arange(len(objects)).repeat(PER_OBJECT)
    labels[-len(objects) :] += 1
    scores = torch.rand(DRAWN, classes, generator=generator)
    scores.scatter_(1, (labels % classes)[:, None], 1.0)
    steps = (torch.randperm(DRAWN, generator=generator) + 0.5) / DRAWN
    return boxes, scores * steps[:, None]


def choose_rows(boxes: Tensor, scores: Tensor, test_cfg: Mapping[str, Any]) -> Tensor:
    """Choose what a ``test_cfg`` keeps, by torchvision; the result must equal :func:`suppress`'s.

    Args:
        boxes: (N, 4), centre, width and height.
        scores: (N, K).
        test_cfg: With ``score_thr`` and ``nms``.

    Returns:
        Rows (M,), the best first.
    """
    best, labels = scores.max(1)
    order = best.argsort(descending=True, stable=True)
    center, size = boxes[order].chunk(2, 1)
    valid = (best[order] > test_cfg.get('score_thr', 0.0)).float()
    kept = nms_mask_operator(
        torch.cat([center - size / 2, center + size / 2], 1),
        test_cfg['nms']['iou_threshold'],
        labels[order],
        scores.shape[1],
        valid,
    )
    return order[kept > 0]
