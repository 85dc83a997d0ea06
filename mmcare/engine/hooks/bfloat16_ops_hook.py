"""Detectors under bfloat16 autocast: mmcv's compiled ops get what they can take."""

from typing import Any

import torch
from mmengine.hooks import Hook
from mmengine.registry import HOOKS as MMENGINE_HOOKS
from mmengine.runner import Runner
from torch import nn

from mmcare.registry import HOOKS

ATTACHED = '_mmcare_bfloat16_ops'  # marks modules that have their casts


@HOOKS.register_module()
@MMENGINE_HOOKS.register_module()
class BFloat16OpsHook(Hook):
    """Hand RoI layers, losses and NMS float32 where autocast makes bfloat16.

    mmcv's RoIAlign and NMS know float32 and float16, not bfloat16. Features are cast where they
    enter a RoI extractor and predictions where they leave a head; all convolutions and linear
    layers stay in bfloat16. Without autocast, and in float16, nothing changes.
    """

    def before_run(self, runner: Runner) -> None:
        """Attach the casts to the RoI extractors and heads of the model."""
        self.attach(runner.model)

    @staticmethod
    def attach(model: nn.Module) -> None:
        """Attach the casts to a model, once."""
        for module in model.modules():
            if getattr(module, ATTACHED, False):
                continue
            if hasattr(module, 'roi_layers'):
                module.register_forward_pre_hook(lambda _, inputs: _to_float32(inputs))
                setattr(module, ATTACHED, True)
            if hasattr(module, 'predict_by_feat'):
                module.register_forward_hook(lambda _, inputs, output: _to_float32(output))
                setattr(module, ATTACHED, True)


def _to_float32(value: Any) -> Any:
    """Cast the bfloat16 tensors in a nest of tuples and lists."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype == torch.bfloat16 else value
    if isinstance(value, list | tuple):
        return type(value)(_to_float32(part) for part in value)
    return value
