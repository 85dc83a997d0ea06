"""Run mmcv's compiled operators in float32 under bfloat16 autocast."""

from __future__ import annotations

from typing import Any

import torch
from mmengine.runner import Runner
from mmengine.utils import apply_to

from mmcare.engine.hooks import SwitchableHook
from mmcare.registry import HOOKS


@HOOKS.register_module()
class BFloat16OpsHook(SwitchableHook):
    """Give RoI layers, losses and NMS float32 where autocast makes bfloat16, which mmcv lacks.

    Features are cast where they enter a RoI extractor and predictions where they leave a head;
    convolutions and linear layers stay in bfloat16.
    """

    def before_run(self, runner: Runner) -> None:
        """Attach the casts to the RoI extractors and heads of the model."""
        for module in runner.model.modules():
            # Not twice: a runner can train, then test.
            if hasattr(module, 'roi_layers') and _cast not in module._forward_pre_hooks.values():
                module.register_forward_pre_hook(_cast)
            if hasattr(module, 'predict_by_feat') and _cast not in module._forward_hooks.values():
                module.register_forward_hook(_cast)


def _cast(_: Any, *values: Any) -> Any:
    """Cast the bfloat16 tensors in what a module gets (before it runs) or gives (after it)."""
    value = values[-1]
    return apply_to(value, lambda x: getattr(x, 'dtype', 0) == torch.bfloat16, torch.Tensor.float)
