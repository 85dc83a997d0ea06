"""Checkpoints of a run are read without running code from them."""

from mmengine.hooks import Hook
from mmengine.runner import Runner

from mmcare.registry import HOOKS
from mmcare.weights.reading import safe_loader


@HOOKS.register_module()
class SafeLoadingHook(Hook):
    """Read ``load_from`` and the checkpoint to resume from by :mod:`mmcare.weights.reading`.

    Published CARE files load into classifiers, and a CARE anywhere in the model is loaded whole or
    raises. MMEngine's own loader is back when the checkpoint is loaded, and if loading fails.
    ``FlexibleRunner`` loads before any hook runs: import :mod:`mmcare.engine.safe_loading` there.
    """

    def before_run(self, runner: Runner) -> None:
        """Wrap ``runner.load_or_resume``, which comes next in training, validation and test."""
        load_or_resume = runner.load_or_resume

        def load_safely() -> None:
            with safe_loader():
                load_or_resume()

        runner.load_or_resume = load_safely
