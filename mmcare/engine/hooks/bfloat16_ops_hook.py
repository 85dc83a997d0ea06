from __future__ import annotations

from typing import Any

import torch
from mmengine.runner import Runner
from mmengine.utils import apply_to

from mmcare.engine.hooks import SwitchableHook
from mmcare.registry import HOOKS


@HOOKS.register_module()
class BFloat16OpsHook(SwitchableHook):
    """Run RoI layers, losses and NMS in float32 under autocast, since mmcv has no bfloat16.

    Features are cast before RoI extractors, and predictions after heads. Convolutions and linear
    layers stay in bfloat16.
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
    """Cast bfloat16 tensors in the last argument: the inputs of a pre-hook, a hook's output."""
    value = values[-1]
    return apply_to(value, lambda x: getattr(x, 'dtype', 0) == torch.bfloat16, torch.Tensor.float)
