"""A resumed run goes on as the uninterrupted one would have."""

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
from mmengine.registry import HOOKS as MMENGINE_HOOKS
from mmengine.runner import BaseLoop, EpochBasedTrainLoop

from mmcare.registry import HOOKS

CHECKPOINT_KEY = 'generator_states'


@HOOKS.register_module()
@MMENGINE_HOOKS.register_module()
class ExactResumeHook(Hook):
    """Store the states of all random generators in checkpoints and restore them on resume.

    mmengine saves weights, optimizer and schedules but no generator states: drop path, RoI
    sampling and augmentations of a resumed run differ from those of a run that was not
    interrupted. This hook stores the states of Python's, NumPy's, torch's and CUDA's generators,
    of every rank.

    A checkpoint is written before the validation that follows it, and validation moves the
    generators too. So the states are taken once at the end of an epoch (of an iteration, in an
    iteration-based loop) and set again when training goes on, in the uninterrupted run as well.

    Worker processes of the training dataloader start each epoch with seeds that depend on the
    epoch; mmengine's own are the same in every epoch.

    An iteration-based loop loads all batches that were trained on again, as mmengine's does, so
    that the generators of its workers move on, too. onedl-mmengine's would skip them.

    A run cannot be resumed exactly, and the hook warns, without a seed in the config, since
    mmengine draws one and gives it to the samplers before it reads the checkpoint; with persistent
    workers, whose generators are out of reach; with ``num_workers=0`` in an iteration-based loop;
    from a checkpoint written in the middle of an epoch, of accumulated gradients, by another number
    of processes or without this hook; with onedl-mmengine's ``fast_forward_on_resume``. What
    remains is the hardware's: on GPUs set ``randomness=dict(seed=0, deterministic=True)``.
    """

    priority = 'VERY_HIGH'

    def __init__(self) -> None:
        self._states: list[dict[str, Any]] | None = None  # of all ranks, for the next checkpoint
        self._to_restore: list[dict[str, Any]] | None = None

    def before_run(self, runner: Any) -> None:
        """Warn if no seed was set: later the runner has one, be it drawn or the checkpoint's."""
        if isinstance(runner._train_loop, BaseLoop) and runner._randomness_cfg.get('seed') is None:
            self._warn('no seed is set', 'set randomness=dict(seed=0)')

    def before_train(self, runner: Any) -> None:
        """Warn about settings with which a run cannot be resumed exactly."""
        if runner.iter == 0:  # any checkpoint is one to start from, not one to go on from
            self._to_restore = self._states = None
        else:
            self._check_loaded_states()
            iterator: Any = getattr(runner.train_loop, 'dataloader_iterator', None)
            if hasattr(iterator, 'skip_iter'):  # onedl-mmengine
                iterator.skip_iter = partial(_load_and_drop, iterator)
        if getattr(runner.train_loop, 'fast_forward_on_resume', False):
            self._warn(
                'train_cfg.fast_forward_on_resume is True',
                'set it to False, so that the generators of workers move on',
            )
        savers = [hook for hook in runner.hooks if isinstance(hook, CheckpointHook)]
        if _by_epoch(runner) and not all(hook.by_epoch for hook in savers):
            self._warn(
                'checkpoints are written in the middle of epochs',
                'set by_epoch=True in the CheckpointHook',
            )
        accumulated = getattr(runner.optim_wrapper, '_accumulative_counts', 1)
        lengths = [
            len(runner.train_dataloader) if _by_epoch(runner) else hook.interval for hook in savers
        ]
        if any(length % accumulated for length in lengths):
            self._warn(
                f'gradients are accumulated over {accumulated} iterations, and checkpoints are '
                'written between',
                'choose an interval that is a multiple of accumulative_counts',
            )
        loader = runner.train_dataloader
        if _by_epoch(runner) and loader.persistent_workers:
            self._warn('train_dataloader.persistent_workers is True', 'set it to False')
        if not _by_epoch(runner) and loader.num_workers == 0:
            self._warn(
                'train_dataloader.num_workers is 0 in an iteration-based loop',
                'set it to 1 or more',
            )

    def before_train_epoch(self, runner: Any) -> None:
        """Restore the states of an epoch-based loop, and seed the workers for the epoch."""
        if _by_epoch(runner):
            self._restore()
            self._seed_workers(runner)

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Restore the states of an iteration-based loop."""
        if not _by_epoch(runner):
            self._restore()

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """Take the states if a checkpoint may be written after this iteration."""
        if not _by_epoch(runner) and (
            self.every_n_train_iters(runner, runner.val_interval) or self.is_last_train_iter(runner)
        ):
            self._take()  # the best checkpoint is written by validation
        elif any(self._is_due(runner, hook) for hook in runner.hooks):
            self._take()

    def after_train_epoch(self, runner: Any, metrics: Any = None) -> None:
        """Take the states at the end of an epoch."""
        if _by_epoch(runner):
            self._take()

    def before_save_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        """Put the states of all ranks into the checkpoint."""
        if self._states is not None:
            checkpoint[CHECKPOINT_KEY] = self._states

    def after_load_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        """Remember the states of a checkpoint; they are set when training goes on from it."""
        self._to_restore = self._states = checkpoint.get(CHECKPOINT_KEY)

    def _check_loaded_states(self) -> None:
        states = self._to_restore
        if states is None:
            self._warn(
                'the checkpoint holds no generator states',
                'use the hook from the first iteration on',
            )
        elif len(states) != get_world_size():
            self._warn(
                f'the checkpoint was written by {len(states)} processes and '
                f'{get_world_size()} resume from it',
                'use as many as before',
            )
            self._to_restore = self._states = None

    @staticmethod
    def _is_due(runner: Any, hook: Hook) -> bool:
        return (
            isinstance(hook, CheckpointHook)
            and not hook.by_epoch
            and (
                hook.every_n_train_iters(runner, hook.interval, hook.save_begin)
                or (hook.save_last and hook.is_last_train_iter(runner))
            )
        )

    @staticmethod
    def _warn(reason: str, remedy: str) -> None:
        print_log(
            f'A resumed run will not equal an uninterrupted one: {reason}; {remedy}.',
            logger='current',
            level=logging.WARNING,
        )

    def _take(self) -> None:
        # Checkpoints are written by one rank only, so all ranks gather here.
        self._states = self._to_restore = all_gather_object(_generator_states())

    def _restore(self) -> None:
        if self._to_restore is not None:
            _set_generator_states(self._to_restore[get_rank()])
            self._to_restore = None

    @staticmethod
    def _seed_workers(runner: Any) -> None:
        loader = runner.train_dataloader
        if getattr(loader.worker_init_fn, 'func', None) is worker_init_fn:
            stride = loader.num_workers * get_world_size()
            loader.worker_init_fn = partial(
                loader.worker_init_fn, seed=runner.seed + runner.epoch * stride
            )


def _by_epoch(runner: Any) -> bool:
    return isinstance(runner.train_loop, EpochBasedTrainLoop)


def _load_and_drop(iterator: Iterator, number: int) -> None:
    for _ in range(number):
        next(iterator)


def _generator_states() -> dict[str, Any]:
    """States of this process's generators; plain values, arrays and tensors only."""
    return dict(
        python=random.getstate(),
        numpy=np.random.get_state(),
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
