from typing import Any

import torch
from mmengine.utils import apply_to
from torch.nn.parallel import DistributedDataParallel

from mmcare.engine.hooks import SwitchableHook, log
from mmcare.registry import HOOKS

# Modules around operators of MMCV that read memory as if it were contiguous: deformable
# convolutions (mmdet's TOODHead calls the operator itself), CARAFE and PSANet's masks. Weights that
# are standardized take views of contiguous ones only.
MISREADING = {
    'CARAFE',
    'CARAFENaive',
    'CARAFEPack',
    'ConvAWS2d',
    'ConvWS2d',
    'DeformConv2d',
    'ModulatedDeformConv2d',
    'PSAMask',
    'TOODHead',
}


@HOOKS.register_module()
class ChannelsLastHook(SwitchableHook):
    """Convert the weights of a model to channels-last before training, validation and test.

    Results agree up to rounding. RoI extractors get contiguous maps, since mmcv's RoIAlign silently
    misreads others. A model with other modules that misread them, such as mmcv's deformable
    convolutions, stays as it is, and the log says so. Checkpoints contain contiguous optimizer
    states, so that runs with and without the hook can resume from each other; fused optimizers need
    the layout of the weights.
    """

    _has_logged = False

    def before_train(self, runner: Any) -> None:
        """Change the layout in place, after initialization, which depends on the layout."""
        self.before_val(runner)
        if isinstance(runner.model, DistributedDataParallel):
            # DDP's buckets still have the old strides; unpickling builds them again.
            runner.model.__setstate__(runner.model.__getstate__())

    def before_val(self, runner: Any) -> None:
        """Change the layout in place."""
        if name := _find_misreading(runner.model):
            if not self._has_logged:
                log(f'ChannelsLastHook leaves the model as it is: {name} cannot take the layout')
            self._has_logged = True
            return
        runner.model.to(memory_format=torch.channels_last)
        for module in runner.model.modules():
            attached = module._forward_pre_hooks.values()
            if hasattr(module, 'roi_layers') and _make_contiguous not in attached:
                module.register_forward_pre_hook(_make_contiguous)

    before_test = before_val

    def before_save_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        """Make the state of the optimizer contiguous."""
        _lay_out(checkpoint, torch.contiguous_format)

    def after_load_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        """Give the state of the optimizer the layout of the weights."""
        if not _find_misreading(runner.model):
            _lay_out(checkpoint, torch.channels_last)


def _find_misreading(model: torch.nn.Module) -> str:
    """Return the name of a module that misreads channels-last, or an empty string."""
    for name, module in model.named_modules():
        if any(kind.__name__ in MISREADING for kind in type(module).__mro__):
            return f'{name} ({type(module).__name__})'
    return ''


def _make_contiguous(_: torch.nn.Module, inputs: Any) -> Any:
    return apply_to(inputs, torch.is_tensor, torch.Tensor.contiguous)


def _lay_out(checkpoint: dict, layout: torch.memory_format) -> None:
    if 'optimizer' in checkpoint:
        checkpoint['optimizer'] = apply_to(
            checkpoint['optimizer'],
            lambda x: torch.is_tensor(x) and x.dim() == 4,
            lambda x: x.contiguous(memory_format=layout),
        )
