"""Hooks, registered as ``mmcare.X``."""

from __future__ import annotations

from typing import Any

from mmengine.hooks import Hook


class SwitchableHook(Hook):
    """A hook that a config can switch off.

    Args:
        enabled: False (``--cfg-options default_hooks.NAME.enabled=False``) builds MMEngine's
            ``Hook`` in its place, which does nothing.
    """

    def __new__(cls, enabled: bool = True, **options: Any) -> Any:
        return super().__new__(cls if enabled else Hook)

    def __init__(self, enabled: bool = True) -> None:
        super().__init__()
