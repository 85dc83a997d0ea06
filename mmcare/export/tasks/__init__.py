"""Tasks: what is exported from a model, one module for each. Nothing else looks for heads."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from mmcare.export.tasks.base import OutputFormat, PostProcess, Task
from mmcare.export.tasks.classifier import Classifier
from mmcare.export.tasks.detector import Detector
from mmcare.export.tasks.features import Backbone, Neck
from mmcare.export.tasks.instances import Instances
from mmcare.export.tasks.segmentor import Segmentor
from mmcare.models.deployment import BackboneInfo, find_care
from mmcare_runtime.description import PARTS

__all__ = ['OPTIONS', 'PARTS', 'OutputFormat', 'PostProcess', 'Task', 'make_task']

WHOLE: tuple[type[Task], ...] = (Classifier, Segmentor, Detector, Instances)  # the first that fits
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    name: option for task in WHOLE for name, option in task.options.items()
}


def make_task(model: nn.Module, part: str = 'backbone', info: BackboneInfo | None = None) -> Task:
    """Choose the task for a part of a model, and set this part to evaluation mode.

    Args:
        model: A CARE, a model of a toolbox with one, or another backbone.
        part: ``'backbone'``; ``'neck'``: backbone and neck, the model's ``extract_feat``;
            ``'model'``: a whole model with ``mode='tensor'``.
        info: Describes a backbone that is not a CARE.

    Raises:
        ValueError: If the model does not hold exactly one CARE, or lacks the part.
    """
    name, info = ('', info) if info else find_care(model)
    if part == 'backbone':
        return Backbone(model.get_submodule(name), '', info)
    if part == 'neck':
        if not getattr(model, 'with_neck', False):
            raise ValueError(f"the {type(model).__name__} has no neck: use part='backbone'")
        return Neck(model, name, info)
    for task in WHOLE:
        if task.fits(model):
            return task(model, name, info)
    summaries = [task.summary for task in WHOLE]
    raise ValueError(
        f'only {", ".join(summaries[:-1])} and {summaries[-1]} are exported whole, not a '
        f"{type(model).__name__}: use part='neck' or part='backbone'"
    )
