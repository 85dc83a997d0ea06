"""Run mmcv's compiled operators in float32 under bfloat16 autocast."""

from typing import Any

import torch
from mmengine.hooks import Hook
from mmengine.runner import Runner
from mmengine.utils import apply_to

from mmcare.registry import HOOKS


@HOOKS.register_module()
class BFloat16OpsHook(Hook):
    """Give RoI layers, losses and NMS float32 where autocast makes bfloat16, which mmcv lacks.

    Features are cast where they enter a RoI extractor and predictions where they leave a head;
    convolutions and linear layers stay in bfloat16.
    """

    def before_run(self, runner: Runner) -> None:
        """Attach the casts to the RoI extractors and heads of the model."""
        for module in runner.model.modules():
            if hasattr(module, 'roi_layers'):
                module.register_forward_pre_hook(lambda _, inputs: _to_float32(inputs))
            if hasattr(module, 'predict_by_feat'):
                module.register_forward_hook(lambda _, inputs, output: _to_float32(output))


def _to_float32(value: Any) -> Any:
    """Cast the bfloat16 tensors in a nest of tuples and lists."""
    return apply_to(value, lambda x: getattr(x, 'dtype', 0) == torch.bfloat16, torch.Tensor.float)
