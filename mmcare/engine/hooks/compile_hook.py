from __future__ import annotations

from typing import Any

from torch import nn

from mmcare.deployment import has_answers
from mmcare.engine.hooks import SwitchableHook
from mmcare.registry import HOOKS


@HOOKS.register_module()
class CompileHook(SwitchableHook):
    """Compile each CARE of a model with ``torch.compile``, even inside DDP.

    Use it for images of one size, such as the crops of ADE20K and ImageNet: every new image size or
    batch size recompiles. Validation and test run uncompiled. Names of weights and checkpoints stay
    the same. The hook needs PyTorch 2.2, which has ``nn.Module.compile``.

    Args:
        enabled: See :class:`SwitchableHook`.
        **options: Options of ``torch.compile``, such as ``mode='max-autotune'``.
    """

    def __init__(self, enabled: bool = True, **options: Any) -> None:
        super().__init__(enabled)
        self.options = options
        self._compiled: dict[nn.Module, Any] = {}

    def before_train(self, runner: Any) -> None:
        """Compile when the first batch comes."""
        for module in runner.model.modules():
            if has_answers(module):
                module.compile(**self.options)
                self._compiled[module] = module._compiled_call_impl

    def before_val(self, runner: Any) -> None:
        """Run uncompiled."""
        for module in self._compiled:
            module._compiled_call_impl = None

    before_test = before_val

    def after_val(self, runner: Any) -> None:
        """Run compiled again."""
        for module, compiled in self._compiled.items():
            module._compiled_call_impl = compiled
