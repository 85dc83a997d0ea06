"""Hooks, registered as ``mmcare.X``."""

from typing import Any

from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper


class SwitchableHook(Hook):
    """A hook that a config can switch off.

    MMEngine removes only its own default hooks by ``default_hooks.NAME=None``.

    Args:
        enabled: With False (``--cfg-options default_hooks.NAME.enabled=False``), all methods return
            at once.
    """

    def __init__(self, enabled: bool = True) -> None:
        super().__init__()
        self.enabled = enabled


def unwrap(model: Any) -> Any:
    """Return the model within DDP and the like."""
    return model.module if is_model_wrapper(model) else model
