"""A resumed run goes on as an uninterrupted one would have."""

import logging
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from mmengine.dataset import worker_init_fn
from mmengine.dist import all_gather_object, get_rank, get_world_size
from mmengine.hooks import CheckpointHook, Hook
from mmengine.logging import print_log
from mmengine.runner import BaseLoop, EpochBasedTrainLoop, find_latest_checkpoint

from mmcare.registry import HOOKS
from mmcare.weights.reading import CheckpointError

CHECKPOINT_KEY = 'generator_states'


@HOOKS.register_module()
class ExactResumeHook(Hook):
    """Store the states of all random generators in checkpoints and restore them on resume.

    mmengine saves weights, optimizer and schedules, but no generator states: drop path, RoI
    sampling and augmentations of a resumed run differ from those of an uninterrupted one. This hook
    stores the states of Python's, NumPy's, torch's and CUDA's generators, of every rank. Validation
    moves the generators after a checkpoint is written, so the states are set again when training
    goes on, in the uninterrupted run as well. Worker processes of the training dataloader start
    each epoch with other seeds; mmengine's are the same in every epoch.

    The hook warns of settings with which a run cannot be resumed exactly. Nor can it be from a
    checkpoint written within an epoch or between accumulated gradients. On GPUs set
    ``randomness=dict(seed=0, deterministic=True)`` as well.

    Raises:
        CheckpointError: If a run resumes from a file without the state of the optimizer, or with
            another number of schedulers. mmengine would start these anew without a word.
    """

    priority = 'VERY_HIGH'

    def __init__(self) -> None:
        self._states: list[dict[str, Any]] | None = None  # of all ranks, for the next checkpoint
        self._to_restore: list[dict[str, Any]] | None = None

    def before_run(self, runner: Any) -> None:
        """Warn if a later resume cannot be exact."""
        if not isinstance(runner._train_loop, BaseLoop):  # a validation or test
            return
        loader, by_epoch = runner.train_dataloader, _by_epoch(runner)
        for reason, holds in (
            ('no seed is set', runner._randomness_cfg.get('seed') is None),
            ('workers are persistent', by_epoch and loader.persistent_workers),
            ('num_workers is 0 in an iteration-based loop', not (by_epoch or loader.num_workers)),
        ):
            if holds:
                _warn(reason)

    def after_load_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        """Check a checkpoint that a run resumes from, and remember its states."""
        if not runner._resume:
            return
        given, wanted = checkpoint.get('param_schedulers') or (), runner.param_schedulers
        if not _holds_state(checkpoint.get('optimizer', {})):
            fault = 'the state of the optimizer is missing'
        elif wanted is not None and len(given) != len(wanted):
            fault = f'it holds {len(given)} schedulers, and the run has {len(wanted)}'
        else:
            self._to_restore = self._states = checkpoint.get(CHECKPOINT_KEY)
            if len(self._states or ()) != get_world_size():
                _warn('the checkpoint does not hold the generator states of as many processes')
                self._to_restore = self._states = None
            return
        file = runner._load_from or find_latest_checkpoint(runner.work_dir)
        raise CheckpointError(
            f'{file} cannot be resumed from: {fault}. To take its weights only: '
            '--cfg-options resume=False load_from=FILE'
        )

    def before_train(self, runner: Any) -> None:
        """Load batches again that were trained on, so that generators of workers move on."""
        iterator: Any = getattr(runner.train_loop, 'dataloader_iterator', None)
        if hasattr(iterator, 'skip_iter'):  # onedl-mmengine, which would skip them
            iterator.skip_iter = partial(_load_and_drop, iterator)

    def before_train_epoch(self, runner: Any) -> None:
        """Restore the states in an epoch-based loop, and seed the workers for the epoch."""
        if _by_epoch(runner):
            self._restore()
            loader = runner.train_dataloader
            if getattr(loader.worker_init_fn, 'func', None) is worker_init_fn:
                seed = runner.seed + runner.epoch * loader.num_workers * get_world_size()
                loader.worker_init_fn = partial(loader.worker_init_fn, seed=seed)

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Restore the states in an iteration-based loop."""
        if not _by_epoch(runner):
            self._restore()

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """Take the states if a checkpoint may be written after this iteration."""
        if _by_epoch(runner):
            return
        savers = [hook for hook in runner.hooks if isinstance(hook, CheckpointHook)]
        due = [(hook.interval, hook.save_begin) for hook in savers]
        due.append((runner.val_interval, 0))  # validation writes the best checkpoint
        if self.is_last_train_iter(runner) or any(
            self.every_n_train_iters(runner, *interval) for interval in due
        ):
            self._take()

    def after_train_epoch(self, runner: Any, metrics: Any = None) -> None:
        """Take the states at the end of an epoch."""
        if _by_epoch(runner):
            self._take()

    def before_save_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        """Put the states of all ranks into the checkpoint."""
        if self._states is not None:
            checkpoint[CHECKPOINT_KEY] = self._states

    def _take(self) -> None:
        # Checkpoints are written by one rank only, so all ranks gather here.
        self._states = self._to_restore = all_gather_object(_generator_states())

    def _restore(self) -> None:
        if self._to_restore is not None:
            _set_generator_states(self._to_restore[get_rank()])
            self._to_restore = None


def _by_epoch(runner: Any) -> bool:
    return isinstance(runner.train_loop, EpochBasedTrainLoop)


def _warn(reason: str) -> None:
    text = f'A resumed run will not equal an uninterrupted one: {reason}.'
    print_log(text, logger='current', level=logging.WARNING)


def _holds_state(optimizer: dict[str, Any]) -> bool:
    """Whether the state dict of an optimizer, or of several by name, holds what it needs."""
    if 'param_groups' not in optimizer:
        several = [state for state in optimizer.values() if isinstance(state, dict)]
        return bool(several) and all(map(_holds_state, several))
    needed = any('betas' in group or group.get('momentum') for group in optimizer['param_groups'])
    return bool(optimizer.get('state')) or not needed


def _load_and_drop(iterator: Iterator, number: int) -> None:
    for _ in range(number):
        next(iterator)


def _generator_states() -> dict[str, Any]:
    """States of this process's generators, as plain values and tensors."""
    name, keys, *rest = np.random.get_state()
    return dict(
        python=random.getstate(),
        numpy=(name, np.asarray(keys).tolist(), *rest),
        torch=torch.get_rng_state(),
        cuda=torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    )


def _set_generator_states(states: dict[str, Any]) -> None:
    version, numbers, gauss = states['python']
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(tuple(states['numpy']))
    torch.set_rng_state(states['torch'].cpu())  # resuming on a GPU moves all tensors there
    if states['cuda'] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states['cuda'].cpu())
