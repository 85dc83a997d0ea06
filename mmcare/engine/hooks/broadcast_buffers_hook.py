"""All processes evaluate the same network: the one that is saved."""

from typing import Any

from mmengine.dist import broadcast
from mmengine.hooks import Hook
from mmengine.registry import HOOKS as MMENGINE_HOOKS
from torch import nn

from mmcare.registry import HOOKS


@HOOKS.register_module()
@MMENGINE_HOOKS.register_module()
class BroadcastBuffersHook(Hook):
    """Evaluate with the buffers of rank 0 in every process.

    Gradients are averaged over processes, running statistics of plain batch norms are not: every
    process has those of its own images, and checkpoints hold those of rank 0. A validation whose
    images are shared out would mix several networks, and its metrics would be of none of them.
    Needed wherever batch norms train without SyncBN; does no harm elsewhere.

    mmengine's SyncBuffersHook averages the statistics instead. In an iteration-based loop it does
    so behind the checkpoint, so that metrics are not those of the saved network, and a resumed run
    does not go on with the statistics of the uninterrupted one.
    """

    priority = 'LOW'  # behind EMAHook, which exchanges weights and buffers

    def before_val_epoch(self, runner: Any) -> None:
        """Take the buffers of rank 0 before validation."""
        self._broadcast(runner.model)

    def before_test_epoch(self, runner: Any) -> None:
        """Take the buffers of rank 0 before a test."""
        self._broadcast(runner.model)

    @staticmethod
    def _broadcast(model: nn.Module) -> None:
        for buffer in model.buffers():
            broadcast(buffer)
