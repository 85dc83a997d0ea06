"""Testing on the folded network, without touching the one that is trained."""

import logging
from collections.abc import Callable
from copy import deepcopy
from typing import Any

from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.registry import HOOKS as MMENGINE_HOOKS
from mmengine.runner import Runner
from torch import nn

from mmcare.models.layers import Foldable
from mmcare.registry import HOOKS


@HOOKS.register_module()
@MMENGINE_HOOKS.register_module()
class FoldBeforeTestHook(Hook):
    """Fold backbones and classification heads of mmcare for the time of a test.

    The folded networks are copies (in evaluation mode: before a test the model is still in
    training mode) that compute what their originals put out. The originals stay as they are, so
    that training can go on after a test, averaged weights can be swapped back and checkpoints are
    those of unfolded networks. Validation is never folded. Wrappers around the model, such as for
    distributed data parallel or test-time augmentation, do not matter; a model with sharded
    parameters is tested as it is.

    To store folded weights, use ``tools/reparameterize_model.py``.
    """

    priority = 'VERY_LOW'  # behind EMAHook, which changes weights before the first image

    def __init__(self) -> None:
        self._redirected: list[nn.Module] = []

    def before_test_epoch(self, runner: Runner) -> None:
        """Fold, with the weights that the test uses."""
        self.unfold()
        self.fold(runner.model)

    def after_test_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """Go back to the unfolded networks."""
        self.unfold()

    def before_train(self, runner: Runner) -> None:
        """Go back to the unfolded networks if a test was interrupted."""
        self.unfold()

    def before_val(self, runner: Runner) -> None:
        """Go back to the unfolded networks if a test was interrupted."""
        self.unfold()

    def fold(self, model: nn.Module) -> None:
        """Let folded copies compute what the networks of mmcare in a model put out."""
        if any(_is_sharded(module) for module in model.modules()):
            print_log(
                'FoldBeforeTestHook: the parameters of the model are sharded, it is tested as it '
                'is; tools/reparameterize_model.py folds its checkpoint',
                logger='current',
                level=logging.WARNING,
            )
            return
        networks = [m for m in model.modules() if isinstance(m, Foldable) and not m.deploy]
        for network in networks:
            folded = deepcopy(network).eval()
            folded.switch_to_deploy()
            network.forward = _redirect(network, folded)
            self._redirected.append(network)
        names = ', '.join(type(network).__name__ for network in networks) or 'nothing to fold'
        print_log(f'FoldBeforeTestHook: {names}, folded for the test', logger='current')

    def unfold(self) -> None:
        """Let the networks compute for themselves again."""
        for network in self._redirected:
            vars(network).pop('forward', None)
        self._redirected.clear()


def _redirect(network: nn.Module, folded: nn.Module) -> Callable[..., Any]:
    """Return a forward that calls the folded network, except in training mode."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        if network.training:
            return type(network).forward(network, *args, **kwargs)
        return folded(*args, **kwargs)

    return forward


def _is_sharded(module: nn.Module) -> bool:
    """Whether a module is one of PyTorch's fully sharded ones, of either generation."""
    names = {base.__name__ for base in type(module).__mro__}
    return bool(names & {'FullyShardedDataParallel', 'FSDPModule'})
