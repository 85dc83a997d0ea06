"""Hooks, registered as ``mmcare.X``."""

from mmengine.hooks import Hook


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
