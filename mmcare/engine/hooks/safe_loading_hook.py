"""Checkpoints of a run are read without running code from them, and fill every CARE."""

from __future__ import annotations

from typing import Any

from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from mmengine.runner import find_latest_checkpoint

from mmcare.models import CARE
from mmcare.models.heads import TwoHeads
from mmcare.registry import HOOKS
from mmcare.weights.names import without_wrapper
from mmcare.weights.reading import safe_loader
from mmcare.weights.whole import check_whole


@HOOKS.register_module()
class SafeLoadingHook(Hook):
    """Read ``load_from`` and the checkpoint to resume from by :mod:`mmcare.weights.reading`.

    Published CARE files load into classifiers. A CARE anywhere in the model is loaded whole or
    raises; so are its two heads. MMEngine's own loader is back afterwards, even if loading fails.
    ``FlexibleRunner`` loads before any hook runs: import :mod:`mmcare.engine.safe_loading` there.

    Raises:
        CheckpointError: If a file cannot be read, or does not fill a CARE of the model.
    """

    priority = 'VERY_HIGH'  # before EMAHook, which loads weights in after_load_checkpoint

    def before_run(self, runner: Any) -> None:
        """Wrap ``runner.load_or_resume``, which comes next in training, validation and test."""
        runner.load_or_resume = safe_loader()(runner.load_or_resume)

    def after_load_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        """Check what MMEngine is about to load with ``strict=False``."""
        model = runner.model.module if is_model_wrapper(runner.model) else runner.model
        file = runner._load_from or find_latest_checkpoint(runner.work_dir)
        states = [checkpoint.get('state_dict', checkpoint)]
        states += [checkpoint['ema_state_dict']] if 'ema_state_dict' in checkpoint else []
        for name, module in model.named_modules():
            for state in states if isinstance(module, (CARE, TwoHeads)) else ():
                check_whole(module, without_wrapper(state), f'{name}.' if name else '', file)
