"""Hooks, registered as ``mmcare.X``."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.model import is_model_wrapper
from mmengine.runner import BaseLoop

log = partial(print_log, logger='current')
warn = partial(log, level=logging.WARNING)


class SwitchableHook(Hook):
    """A hook that a config can switch off.

    MMEngine removes only its own default hooks by ``default_hooks.NAME=None``.

    Args:
        enabled: With False (``--cfg-options default_hooks.NAME.enabled=False``), the methods that
            MMEngine calls do nothing.
    """

    def __init__(self, enabled: bool = True) -> None:
        super().__init__()
        self.enabled = enabled
        for stage in () if enabled else self.stages:
            setattr(self, stage, _do_nothing)


def _do_nothing(*_: Any, **__: Any) -> None:
    """Stand for a method of a hook that is switched off."""


def built_loops(runner: Any) -> dict[str, Any]:
    """Return the loops that a runner has built, by mode: ``'train'``, ``'val'`` and ``'test'``."""
    loops = {mode: getattr(runner, f'_{mode}_loop') for mode in ('train', 'val', 'test')}
    return {mode: loop for mode, loop in loops.items() if isinstance(loop, BaseLoop)}


def unwrap(model: Any) -> Any:
    """Return the model within DDP and the like."""
    return model.module if is_model_wrapper(model) else model
