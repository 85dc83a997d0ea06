from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from time import monotonic
from typing import Any

import numpy as np
import torch
from mmengine.dataset import worker_init_fn
from mmengine.dist import get_rank, get_world_size
from mmengine.hooks import CheckpointHook
from mmengine.optim import OptimWrapperDict
from mmengine.runner import (
    BaseLoop,
    EpochBasedTrainLoop,
    IterBasedTrainLoop,
    find_latest_checkpoint,
    set_random_seed,
)

from mmcare.compatibility import skips_batches
from mmcare.engine import training_state
from mmcare.engine.hooks import SwitchableHook, log, unwrap, warn
from mmcare.engine.hooks.atomic_checkpoint_hook import AtomicCheckpointHook, repeats_validation
from mmcare.engine.optim import IMPLEMENTATION, fit_groups
from mmcare.engine.world import LENGTH, describe_change, describe_epochs, world
from mmcare.registry import HOOKS
from mmcare.weights.names import without_wrapper
from mmcare.weights.reading import CheckpointError
from mmcare.weights.strict import find_not_finite
from mmcare_runtime.text import join_first

STATE, GENERATORS, WORLD = 'training_state', 'random_generators', 'world'  # in checkpoints
EVERY = 30  # seconds between messages about batches that are replayed
# Entries of an optimizer's groups that do not change what a step computes.
UNCOMPARED = {'params', 'param_names', *IMPLEMENTATION}
# Attributes of MMEngine's schedulers that configs set.
SCHEDULE = {'T_max', 'begin', 'by_epoch', 'end', 'end_factor', 'eta_min', 'eta_min_ratio', 'factor'}
SCHEDULE |= {'gamma', 'milestones', 'power', 'start_factor', 'step_size', 'total_iters'}


@HOOKS.register_module()
class ExactResumeHook(SwitchableHook):
    """Seed all random generators for each iteration, and resume from complete checkpoints only.

    MMEngine does not save the states of generators. With this hook the random numbers of a training
    iteration depend only on its number, the rank and the run's seed. Dataloader workers' random
    numbers also depend on the epoch. A run cannot resume exactly from checkpoints that are written
    within an epoch or between accumulated gradients. On GPUs also set
    ``randomness.deterministic=True``, but not for segmentors: PyTorch fails, see docs/resume.md.

    Numbers that modules of the model change as attributes, such as the image size of mmdet's
    ``BatchSyncRandomResize``, and those of ``EarlyStoppingHook`` are added to checkpoints, unless
    the same object changes other values, such as tensors: it is restored whole or not at all. A
    warning names modules, hooks and transforms whose state changes and is in no checkpoint. Values
    that are empty before training, as caches are, are named in the log without a warning.

    Random generators of samplers and transforms are saved and restored in epoch-based runs.
    Iteration-based runs replay what these draw; a warning names generators that start from another
    state than in the first run.

    MMEngine keeps the options of the checkpoint's optimizer and schedulers. A warning names those
    that the config has changed. Checkpoints hold the number of processes, the batch size, the
    accumulation and the number of workers; a warning says what other ones change.

    Raises:
        CheckpointError: If a run resumes from a file that lacks weights or the optimizer's state,
            has weights that are not finite, is of another optimizer, other parameters, groups of
            parameters that cannot be fitted to the run's, or another number of schedulers. MMEngine
            would silently reinitialize what is missing.
    """

    priority = 'VERY_HIGH'

    def __init__(self, enabled: bool = True) -> None:
        super().__init__(enabled)
        self._restorable: dict[str, Any] = {}
        self._state: dict[Any, Any] | None = None  # before the run, or before its resume
        self._unvalidated: dict[Any, Any] = {}  # the state before a validation
        self._validated: dict[Any, Any] = {}  # what validations alone change, after the last one
        self._named: set[tuple[str, str]] = set()  # classes and attributes, in warnings
        self._logged: set[tuple[str, str]] = set()  # the same in the log
        self._generators: dict[Any, Any] = {}  # their states before the run
        self._changed: set[int] = set()  # ids of transforms and samplers that lose other state
        self._contents: dict[tuple[Any, str], Any] = {}
        self._objects: dict[int, Any] = {}
        self._first_iter = 0

    def before_run(self, runner: Any) -> None:
        """Warn if a resume cannot be exact."""
        if not isinstance(runner._train_loop, BaseLoop):  # a test
            return
        by_epoch = isinstance(runner.train_loop, EpochBasedTrainLoop)
        loader = runner.train_dataloader
        accumulated = getattr(runner.optim_wrapper, '_accumulative_counts', 1)
        hooks = [hook for hook in runner.hooks if isinstance(hook, CheckpointHook)]
        saving = [hook for hook in hooks if hook.interval > 0]
        advice = {
            'randomness.seed': runner._randomness_cfg.get('seed') is None,
            'train_dataloader.num_workers': not (by_epoch or loader.num_workers),
            'train_dataloader.persistent_workers=False': by_epoch and loader.persistent_workers,
            'default_hooks.checkpoint.type=mmcare.AtomicCheckpointHook': repeats_validation(runner)
            and not any(isinstance(hook, AtomicCheckpointHook) for hook in hooks),
            # Otherwise checkpoints are written within an epoch, or at the end of the run alone.
            f'default_hooks.checkpoint.by_epoch={by_epoch}': any(
                hook.by_epoch != by_epoch
                for hook in saving
                if isinstance(runner.train_loop, (EpochBasedTrainLoop, IterBasedTrainLoop))
            ),
            # Gradients that have been accumulated are not saved.
            'default_hooks.checkpoint.interval to a multiple of accumulative_counts': any(
                hook.interval * (len(loader) if hook.by_epoch else 1) % accumulated
                for hook in saving
            ),
        }
        if missing := ', '.join(setting for setting, needed in advice.items() if needed):
            _warn_inexact(runner, f'Set {missing}.')

    def after_load_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        """Check the checkpoint that training resumes from."""
        if not runner._resume or not isinstance(runner._train_loop, BaseLoop):
            return
        fault = (
            _find_fault(runner, checkpoint)
            or fit_groups(checkpoint, runner)
            or _find_misfit(checkpoint['optimizer'], runner.optim_wrapper)
        )
        if fault:
            raise CheckpointError(
                f'{runner._load_from or find_latest_checkpoint(runner.work_dir)} cannot be resumed '
                f'from: {fault}. To load only its weights: --cfg-options resume=False '
                'load_from=FILE'
            )
        saved, meta = checkpoint.get(WORLD), checkpoint['meta']
        cause = describe_epochs(runner, meta)
        change = describe_change(saved, runner, meta) if isinstance(saved, dict) else ''
        if change:
            _warn_inexact(runner, f'{change} {cause}'.strip())
        ignored = [*_compare_optimizers(checkpoint['optimizer'], runner.optim_wrapper)]
        if isinstance(runner.param_schedulers, list):
            ignored += _compare_schedulers(checkpoint['param_schedulers'], runner.param_schedulers)
        if ignored:
            options = dict.fromkeys(ignored)  # the same for many groups
            text = "The checkpoint's settings are kept, and the config's ignored: "
            text += f'{join_first(options, 5)}. '
            if cause:
                text += f'Schedules count iterations. {cause} '
            text += 'To use those of the config, start over, or '
            text += 'load only the weights: --cfg-options resume=False load_from=FILE.'
            warn(text)
        self._read_state(runner)
        if isinstance(checkpoint.get(STATE), dict):
            refused = training_state.write_numbers(self._restorable, checkpoint[STATE])
            if names := self._name(self._restorable, refused):
                _warn_inexact(
                    runner,
                    f'{names} start as constructed: the file was written by mmcare 1.0, which '
                    'saved parts of objects, or by a model with other modules.',
                )

        self._restore_generators(runner, checkpoint.get(GENERATORS))

    def _restore_generators(self, runner: Any, saved: Any) -> None:
        """Restore the generators of samplers and transforms; name those that draw other numbers.

        Loops over iterations replay all draws. Their generators must start as in the first run.
        """
        by_epoch = isinstance(runner.train_loop, EpochBasedTrainLoop)
        saved, differing = saved if isinstance(saved, dict) else {}, []
        found = training_state.find_generators(runner.train_dataloader)
        for key, (owner, generator) in found.items():
            state = training_state.generator_state(generator)
            if by_epoch and key in saved:
                try:
                    training_state.set_generator_state(generator, saved[key])
                    continue
                except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
                    training_state.set_generator_state(generator, state)  # of another type
            elif key in saved and training_state.same_state(saved[key], state):
                continue
            differing.append(f'{type(owner).__name__}.{key[1]}')
        if differing:
            advice = 'its state is in no checkpoint' if by_epoch else 'seed it as in the first run'
            _warn_inexact(
                runner, f'A random generator starts anew: {", ".join(differing)} ({advice}).'
            )

    def before_train(self, runner: Any) -> None:
        """Replay the consumed batches, so that the workers' generators advance."""
        if not self._generators:
            found = training_state.find_generators(runner.train_dataloader)
            self._generators = {
                key: training_state.generator_state(part) for key, (_, part) in found.items()
            }
        iterator: Any = getattr(runner.train_loop, 'dataloader_iterator', None)
        loader = getattr(iterator, '_dataloader', None)
        if isinstance(loader, torch.utils.data.DataLoader):  # samplers may draw in this process
            batches = iterator._iterator
            if hasattr(batches, '_sampler_iter'):  # onedl-mmengine starts later
                batches._sampler_iter = training_state.isolate(batches._sampler_iter, runner.seed)
            # A sampler that ends starts again within the run.
            iterator._dataloader = training_state.SeededLoader(loader, runner.seed)
        if hasattr(iterator, 'skip_iter'):  # onedl-mmengine would skip the batches
            iterator.skip_iter = lambda number: deque(_replay(iterator, number), maxlen=0)
        elif iterator is not None and runner.iter:
            replayed = _replay(iterator, runner.iter)
            runner.train_loop.dataloader_iterator = chain(replayed, iterator)
        if self._state is None:
            self._read_state(runner)
        self._first_iter = runner.iter

    def _read_state(self, runner: Any) -> None:
        self._restorable = training_state.restorable(runner)
        self._state = training_state.read_state(self._restorable)

    def before_train_epoch(self, runner: Any) -> None:
        """Seed the workers for the epoch."""
        if not self._objects:  # the run starts: before_train of all hooks has run
            self._objects = training_state.not_restorable(runner)
            self._contents = training_state.read_contents(self._objects)
        self.before_train_iter(runner, 0)  # the loader may draw random numbers
        loader = runner.train_dataloader
        function, seeding = loader.worker_init_fn, training_state.seed_worker
        if getattr(function, 'func', None) in (worker_init_fn, seeding):
            seed = runner.seed + runner.epoch * loader.num_workers * get_world_size()
            loader.worker_init_fn = partial(seeding, **{**function.keywords, 'seed': seed})
        iterator = getattr(runner.train_loop, 'dataloader_iterator', None)
        if iterator is not None and not skips_batches():
            deque(islice(iterator, runner.iter), maxlen=0)

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Seed the generators for the iteration."""
        # Without mixing, iterations of runs with neighboring seeds would draw the same numbers.
        mixed = np.random.SeedSequence([runner.seed, runner.iter, get_rank()])
        seed = int(mixed.generate_state(1)[0])
        set_random_seed(seed)
        loader = runner.train_dataloader
        if not loader.num_workers:
            training_state.seed_generators(loader.dataset, seed)
        if runner.iter == self._first_iter + 1:  # all hooks and transforms have run once
            self._find_numbers(runner)
            # Samplers that group pictures hold some within an epoch, and none at its end.
            self._warn_of_changes(runner, ignored=training_state.samplers(loader))

    def before_val_epoch(self, runner: Any) -> None:
        """Read the state before a validation."""
        if self._state is not None:
            self._unvalidated = training_state.read_state(self._restorable)

    def after_val_epoch(self, runner: Any, metrics: dict[str, float] | None = None) -> None:
        """Find what the validation has changed, and training has not, such as priors of heads."""
        if self._state is None:
            return
        before, known = self._unvalidated, {**self._state, **self._validated}
        for key, value in training_state.read_state(self._restorable).items():
            if value != before.get(key) and before.get(key) == known.get(key):
                self._validated[key] = value

    def before_save_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        """Add the numbers that have changed."""
        if self._state is None:  # not in training
            return
        checkpoint[STATE] = {**self._find_numbers(runner), training_state.WHOLE: True}
        checkpoint[WORLD] = world(runner)
        self._warn_of_changes(runner)
        checkpoint[GENERATORS] = self._generators
        if isinstance(runner.train_loop, EpochBasedTrainLoop):
            checkpoint['meta'][LENGTH] = len(runner.train_dataloader)
            found = training_state.find_generators(runner.train_dataloader)
            checkpoint[GENERATORS] = {
                key: training_state.generator_state(generator)
                for key, (owner, generator) in found.items()
                if id(owner) not in self._changed  # whole or not at all
            }

    def _find_numbers(self, runner: Any) -> training_state.Numbers:
        """Return the numbers to store; name once what changes with them and cannot be stored."""
        objects = self._restorable
        before = self._state or {}
        numbers, left_out = training_state.split_changes(objects, before, self._validated)
        lasting = {name for (name, _), is_filled in left_out.items() if not is_filled}
        if names := self._name(objects, [key for key in left_out if key[0] in lasting]):
            _warn_inexact(
                runner,
                f'Training changes {names}, which no checkpoint holds: objects that change more '
                'than numbers start as constructed.',
            )
        filled = [key for key in left_out if key[0] not in lasting]
        if names := self._name(objects, filled, self._logged):
            text = f'No checkpoint holds {names}, which are empty before training or change in '
            log(f'{text}validations alone: a resumed run fills them again.')
        return numbers

    def _name(
        self,
        objects: Mapping[Any, Any],
        keys: Iterable[tuple[Any, str]],
        named: set[tuple[str, str]] | None = None,
    ) -> str:
        """Name attributes that have not been named yet: ``'Head.priors, Head.sizes'``."""
        named = self._named if named is None else named
        fresh = {(type(objects[name]).__name__, attribute) for name, attribute in keys}
        fresh -= named
        named |= fresh
        return ', '.join(sorted(map('.'.join, fresh)))

    def _warn_of_changes(self, runner: Any, ignored: Sequence[Any] = ()) -> None:
        """Warn once of each attribute that has changed since the run started."""
        contents = training_state.read_contents(self._objects)
        changed = [
            key
            for key, value in self._contents.items()
            if contents.get(key) != value and self._objects[key[0]] not in ignored
        ]
        for key in changed:
            del self._contents[key]
            self._changed.add(id(self._objects[key[0]]))
        if names := self._name(self._objects, changed):
            _warn_inexact(
                runner,
                f'Training changes {names}, which no checkpoint holds. For transforms, set '
                'train_dataloader.num_workers; a hook can write its state in '
                'before_save_checkpoint, and read it in after_load_checkpoint.',
            )


def _replay(batches: Iterator[Any], number: int) -> Iterator[Any]:
    """Yield the first batches, which are only loaded again; say how long that takes."""
    start = last = monotonic()
    for done, batch in enumerate(islice(batches, number), 1):
        now = monotonic()
        if now - last >= EVERY:
            last, left = now, (now - start) / done * (number - done)
            text = f'Replaying batches, so that augmentations go on as they would have: {done} of '
            log(f'{text}{number}, about {left / 60:.0f} minutes left')
        yield batch


def _warn_inexact(runner: Any, advice: str) -> None:
    run = 'This resumed run does' if runner._resume else 'A resume of this run will'
    warn(f'{run} not reproduce an uninterrupted run. {advice}')


def _find_fault(runner: Any, checkpoint: dict[str, Any]) -> str:
    """Say why a run cannot go on from a checkpoint; empty if it can."""
    model = unwrap(runner.model)
    state = without_wrapper(checkpoint.get('state_dict', checkpoint))
    saved = {k: getattr(v, 'shape', ()) for k, v in state.items()}
    wanted = {k: getattr(v, 'shape', ()) for k, v in model.state_dict().items()}
    unfit = [key for key in wanted if saved.get(key) != wanted[key]]
    if unfit:
        fault = f'{len(unfit)} weights of the model are not in it or have another shape: '
        return fault + ', '.join(unfit[:10])
    if not_finite := find_not_finite(state, model):
        return f'{len(not_finite)} weights are not finite, such as {not_finite[0]}'
    if not _holds_state(checkpoint.get('optimizer', {}), runner.optim_wrapper):
        return 'the state of the optimizer is missing'
    held, needed = checkpoint.get('param_schedulers') or (), runner.param_schedulers
    if needed is not None and len(held) != len(needed):
        return f'it has {len(held)} schedulers, the run has {len(needed)}'
    return ''


def _optimizers(
    saved: dict[str, Any], wrapper: Any
) -> Iterator[tuple[dict[str, Any], torch.optim.Optimizer]]:
    """Yield each optimizer of a run, after its state in a checkpoint."""
    if isinstance(wrapper, OptimWrapperDict):
        for name, part in wrapper.items():
            yield saved.get(name, {}), part.optimizer
    else:
        yield saved, wrapper.optimizer


def _holds_state(saved: dict[str, Any], wrapper: Any) -> bool:
    """Return whether a checkpoint has the state that an optimizer, or each of several, needs.

    Optimizers without momentum need no state, nor do optimizers of frozen parameters.
    """
    for state, optimizer in _optimizers(saved, wrapper):
        needed = any(
            'betas' in group or group.get('momentum')
            for group in optimizer.param_groups
            if any(parameter.requires_grad for parameter in group['params'])
        )
        if 'param_groups' not in state or (needed and not state.get('state')):
            return False
    return True


def _find_misfit(saved: dict[str, Any], wrapper: Any) -> str:
    """Say why optimizers could not go on from a checkpoint: PyTorch would fail in the first step.

    Options that a later PyTorch has added are no reason: these are True, False or None.
    """
    for state, optimizer in _optimizers(saved, wrapper):
        groups, kind = state['param_groups'], type(optimizer).__name__
        sizes = [
            [len(group.get('params', ())) for group in part]
            for part in (groups, optimizer.param_groups)
        ]
        numeric = {k for k, v in optimizer.defaults.items() if type(v) in (int, float, tuple)}
        lacking = sorted(numeric - {*groups[0]}) if groups else []
        if lacking:
            return f'its optimizer has no {", ".join(lacking)}, which the {kind} of the run needs'
        if sizes[0] != sizes[1]:
            numbers = [f'{sum(part)} parameters in {len(part)} groups' for part in sizes]
            return f'its optimizer has {numbers[0]}, the {kind} of the run has {numbers[1]}'
    return ''


def _compare_optimizers(saved: dict[str, Any], wrapper: Any) -> Iterator[str]:
    """Yield the options of optimizers that differ: ``'lr=0.1 (config: 0.2)'``."""
    for state, optimizer in _optimizers(saved, wrapper):
        for kept, given in zip(state['param_groups'], optimizer.param_groups):
            for name in sorted(given.keys() & kept.keys() - UNCOMPARED):
                # Schedulers change lr, and momentum, which is the first of betas.
                if name.startswith('initial_') or (name == 'betas' and 'initial_momentum' in kept):
                    continue
                values = [group.get(f'initial_{name}', group[name]) for group in (kept, given)]
                values = [list(v) if isinstance(v, tuple) else v for v in values]
                if values[0] != values[1]:
                    yield f'{name}={values[0]} (config: {values[1]})'


def _compare_schedulers(held: Sequence[dict[str, Any]], needed: Sequence[Any]) -> Iterator[str]:
    """Yield the options of schedulers that differ: ``'CosineAnnealingLR.T_max=4 (config: 9)'``."""
    for kept, scheduler in zip(held, needed):
        for name in sorted(SCHEDULE & kept.keys() & vars(scheduler).keys()):
            value = getattr(scheduler, name)
            if kept[name] != value:
                yield f'{type(scheduler).__name__}.{name}={kept[name]} (config: {value})'
