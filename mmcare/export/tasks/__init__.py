"""Tasks: what is exported from a model, one module for each. Nothing else looks for heads."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from mmcare.deployment import BackboneInfo, describe_backbone, find_backbone
from mmcare.export.errors import Argument, RequestError
from mmcare.export.tasks.base import OutputFormat, PostProcess, Task
from mmcare.export.tasks.classifier import Classifier
from mmcare.export.tasks.features import Backbone, Neck
from mmcare.export.tasks.one_stage_detector import OneStageDetector
from mmcare.export.tasks.queries import QueryDetector
from mmcare.export.tasks.segmentor import Segmentor
from mmcare.export.tasks.two_stage_detector import TwoStageDetector
from mmcare_runtime.schema import PARTS

__all__ = ['OPTIONS', 'PARTS', 'OutputFormat', 'PostProcess', 'Task', 'make_task']

WHOLE: tuple[type[Task], ...] = (  # the first that fits
    Classifier,
    Segmentor,
    OneStageDetector,
    TwoStageDetector,
    QueryDetector,
)
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    name: option for task in WHOLE for name, option in task.options.items()
}


def make_task(
    model: nn.Module,
    part: str = 'backbone',
    info: BackboneInfo | None = None,
    backbone: str | None = None,
) -> Task:
    """Choose the task for a part of a model, and set this part to evaluation mode.

    Args:
        model: A backbone, or a model of a toolbox with one.
        part: ``'backbone'``; ``'neck'``: backbone and neck, the model's ``extract_feat``;
            ``'model'``: a whole model with ``mode='tensor'``.
        info: Describes the backbone; None: see :func:`mmcare.deployment.describe_backbone`.
        backbone: Name of the backbone in the model, empty if the model is one. None: empty if
            there is ``info``, else see :func:`mmcare.deployment.find_backbone`.

    Raises:
        ValueError: If the model lacks a backbone or the part, or if nothing exports it whole.
    """
    if backbone is None:
        backbone = '' if info else find_backbone(model)
    if info is None:
        info = describe_backbone(model.get_submodule(backbone))
    kind = type(model).__name__
    if part == 'backbone':
        return Backbone(model.get_submodule(backbone), '', info)
    if part == 'neck':
        if not getattr(model, 'with_neck', False):
            raise RequestError(f'the {kind} has no neck: use ', Argument('part', 'backbone'))
        return Neck(model, backbone, info)
    for task in WHOLE:
        if task.fits(model):
            return task(model, backbone, info)
    summaries = [task.summary for task in WHOLE]
    raise RequestError(
        f'only {", ".join(summaries[:-1])} and {summaries[-1]} are exported whole, not a {kind}: '
        'use ',
        Argument('part', 'neck'),
        ' or ',
        Argument('part', 'backbone'),
    )
