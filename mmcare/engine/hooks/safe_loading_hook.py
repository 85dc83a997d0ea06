from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

from mmengine.model import PretrainedInit
from mmengine.runner import find_latest_checkpoint
from torch import nn

from mmcare.engine.hooks import SwitchableHook
from mmcare.models import CARE
from mmcare.models.heads import TwoHeads
from mmcare.models.loading import pretrained_cfgs, strict_loading
from mmcare.registry import HOOKS
from mmcare.weights.reading import safe_loader

KINDS = CARE, TwoHeads


@HOOKS.register_module()
class SafeLoadingHook(SwitchableHook):
    """Read ``load_from`` and the checkpoint to resume from by :mod:`mmcare.weights.reading`.

    Published CARE files load into classifiers. The weights of each CARE and of its two heads are
    checked while they are loaded, see :func:`mmcare.models.loading.strict_loading`, even in
    wrappers, in SoftTeacher's teacher, in test-time augmentation and in EMA's copy of the model. A
    file that a whole model's ``init_cfg`` of type ``'Pretrained'`` names is read and checked in the
    same way. MMEngine's loader is restored afterwards, even if loading fails. ``FlexibleRunner``
    loads before ``before_run``: for it, import :mod:`mmcare.engine.safe_loading`, and the weights
    of ``load_from`` are checked as well.

    Raises:
        CheckpointError: If a file cannot be read, or does not fill a CARE of the model.
    """

    priority = 'VERY_HIGH'  # before EMAHook, which loads weights in after_load_checkpoint

    def __init__(self, enabled: bool = True) -> None:
        super().__init__(enabled)
        self._checks = ExitStack()

    def before_run(self, runner: Any) -> None:
        """Wrap ``runner.load_or_resume``, which comes next in training, validation and test.

        Also wrap ``runner._init_model_weights``, which precedes it in training, if a model around a
        CARE is initialized from a file.
        """
        self._checks.close()  # FlexibleRunner has already loaded
        load_or_resume = runner.load_or_resume

        def load() -> None:
            with safe_loader(), self._checks:
                load_or_resume()

        runner.load_or_resume = load
        files = [cfg for module in runner.model.modules() for cfg in _cfgs_around_care(module)]
        if files and hasattr(runner, '_init_model_weights'):  # FlexibleRunner has none
            init_weights = partial(_initialize, runner.model, files, runner._init_model_weights)
            runner._init_model_weights = init_weights

    def after_load_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        """Check the weights that MMEngine loads next, with ``strict=False``."""
        self._checks.close()
        file = runner._load_from or find_latest_checkpoint(runner.work_dir)
        self._checks.enter_context(strict_loading(runner.model, KINDS, file))
        for hook in runner.hooks:
            if hasattr(hook, 'ema_model'):
                copy = strict_loading(hook.ema_model.module, KINDS, file, hook.src_model)
                self._checks.enter_context(copy)


def _cfgs_around_care(module: nn.Module) -> list[dict[str, Any]]:
    """Return the files that initialize a module with a CARE inside; a CARE reads its own."""
    cfgs = [] if isinstance(module, CARE) else pretrained_cfgs(module)
    return cfgs if any(isinstance(part, CARE) for part in module.modules()) else []


def _initialize(model: nn.Module, files: list[dict[str, Any]], init_weights: Any) -> None:
    """Initialize a model, and check the weights of files that MMEngine reads for it."""
    for cfg in files:  # with dotted names, MMEngine would overwrite the weights
        cfg['type'] = PretrainedInit
    names = ', '.join(str(cfg.get('checkpoint')) for cfg in files)
    with safe_loader(), strict_loading(model, KINDS, names):
        init_weights()
