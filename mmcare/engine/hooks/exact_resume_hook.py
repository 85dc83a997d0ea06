from __future__ import annotations

import logging
from collections import deque
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from mmengine.dataset import worker_init_fn
from mmengine.dist import get_rank, get_world_size
from mmengine.logging import print_log
from mmengine.model import is_model_wrapper
from mmengine.runner import BaseLoop, EpochBasedTrainLoop, find_latest_checkpoint, set_random_seed

from mmcare.compatibility import skips_batches
from mmcare.engine.hooks import SwitchableHook
from mmcare.registry import HOOKS
from mmcare.weights.names import without_wrapper
from mmcare.weights.reading import CheckpointError


@HOOKS.register_module()
class ExactResumeHook(SwitchableHook):
    """Seed all random generators for each iteration, and resume from complete checkpoints only.

    MMEngine does not save the states of generators. With this hook the random numbers of a training
    iteration depend only on its number, the rank and the run's seed; those of the dataloader's
    workers also on the epoch. Checkpoints written within an epoch or between accumulated gradients
    cannot be resumed exactly. On GPUs also set ``randomness.deterministic=True``, but not for
    segmentors: PyTorch raises, see docs/resume.md.

    Raises:
        CheckpointError: If a run resumes from a file that lacks weights or the optimizer's state,
            or has another number of schedulers. MMEngine would silently reinitialize them.
    """

    priority = 'VERY_HIGH'

    def before_run(self, runner: Any) -> None:
        """Warn if a resume cannot be exact."""
        if not isinstance(runner._train_loop, BaseLoop):  # a validation or test
            return
        by_epoch = isinstance(runner.train_loop, EpochBasedTrainLoop)
        loader = runner.train_dataloader
        advice = {
            'randomness.seed': runner._randomness_cfg.get('seed') is None,
            'train_dataloader.num_workers': not (by_epoch or loader.num_workers),
            'train_dataloader.persistent_workers=False': by_epoch and loader.persistent_workers,
        }
        if missing := ', '.join(setting for setting, needed in advice.items() if needed):
            run = 'This resumed run does' if runner._resume else 'A resume of this run will'
            text = f'{run} not reproduce an uninterrupted run. Set {missing}.'
            print_log(text, logger='current', level=logging.WARNING)

    def after_load_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        """Check the checkpoint that training resumes from."""
        if not runner._resume or not isinstance(runner._train_loop, BaseLoop):
            return
        state = checkpoint.get('state_dict', checkpoint)
        given = {k: getattr(v, 'shape', ()) for k, v in without_wrapper(state).items()}
        model = runner.model.module if is_model_wrapper(runner.model) else runner.model
        wanted = {k: getattr(v, 'shape', ()) for k, v in model.state_dict().items()}
        unfit = [key for key in wanted if given.get(key) != wanted[key]]
        held, needed = checkpoint.get('param_schedulers') or (), runner.param_schedulers
        if unfit:
            fault = f'{len(unfit)} weights of the model are not in it or have another shape: '
            fault += ', '.join(unfit[:10])
        elif not _holds_state(checkpoint.get('optimizer', {})):
            fault = 'the state of the optimizer is missing'
        elif needed is not None and len(held) != len(needed):
            fault = f'it has {len(held)} schedulers, the run has {len(needed)}'
        else:
            lists = (held, map(vars, needed)) if isinstance(needed, list) else ((), ())
            kept, ignored = ([s.get('T_max', s.get('end')) for s in part] for part in lists)
            if kept != ignored:  # a longer run would keep the last rate, which is tiny
                text = f'The schedules of the checkpoint, which end at {kept}, are kept; those of '
                text += f'the config end at {ignored}. To train longer, start anew or by load_from.'
                print_log(text, logger='current', level=logging.WARNING)
            return
        raise CheckpointError(
            f'{runner._load_from or find_latest_checkpoint(runner.work_dir)} cannot be resumed '
            f'from: {fault}. To load only its weights: --cfg-options resume=False load_from=FILE'
        )

    def before_train(self, runner: Any) -> None:
        """Load the batches that were trained on again, so that workers' generators advance."""
        iterator: Any = getattr(runner.train_loop, 'dataloader_iterator', None)
        if hasattr(iterator, 'skip_iter'):  # onedl-mmengine, which would skip them
            iterator.skip_iter = lambda number: deque(islice(iterator, number), maxlen=0)

    def before_train_epoch(self, runner: Any) -> None:
        """Seed the workers for the epoch."""
        self.before_train_iter(runner, 0)  # the loader may draw
        loader = runner.train_dataloader
        if getattr(loader.worker_init_fn, 'func', None) is worker_init_fn:
            seed = runner.seed + runner.epoch * loader.num_workers * get_world_size()
            loader.worker_init_fn = partial(loader.worker_init_fn, seed=seed)
        iterator = getattr(runner.train_loop, 'dataloader_iterator', None)
        if iterator is not None and not skips_batches():
            deque(islice(iterator, runner.iter), maxlen=0)

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Seed the generators for the iteration."""
        # Mixed, or iterations of runs with neighboring seeds would draw the same numbers.
        mixed = np.random.SeedSequence([runner.seed, runner.iter, get_rank()])
        set_random_seed(int(mixed.generate_state(1)[0]))


def _holds_state(optimizer: dict[str, Any]) -> bool:
    """Whether the state dict of an optimizer, or of each of several, has the state it needs."""
    if 'param_groups' not in optimizer:
        return bool(optimizer) and all(map(_holds_state, optimizer.values()))
    needed = any('betas' in group or group.get('momentum') for group in optimizer['param_groups'])
    return bool(optimizer.get('state')) or not needed
