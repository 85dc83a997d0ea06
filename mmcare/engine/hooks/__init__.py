"""Hooks, registered as ``mmcare.X``."""

from __future__ import annotations

from typing import Any

from mmengine.hooks import Hook


class SwitchableHook(Hook):
    """A hook that a config can switch off.

    Args:
        enabled: With False (``--cfg-options default_hooks.NAME.enabled=False``), MMEngine's
            ``Hook``, which does nothing, is built in its place.
    """

    def __new__(cls, enabled: bool = True, **options: Any) -> Any:
        return super().__new__(cls if enabled else Hook)

    def __init__(self, enabled: bool = True) -> None:
        super().__init__()
