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
from mmengine.optim import OptimWrapperDict
from mmengine.runner import BaseLoop, EpochBasedTrainLoop, find_latest_checkpoint, set_random_seed

from mmcare.compatibility import skips_batches
from mmcare.engine import training_state
from mmcare.engine.hooks import SwitchableHook
from mmcare.engine.hooks.atomic_checkpoint_hook import AtomicCheckpointHook, repeats_validation
from mmcare.engine.optim import fit_groups
from mmcare.registry import HOOKS
from mmcare.weights.names import without_wrapper
from mmcare.weights.reading import CheckpointError

STATE = 'training_state'  # in checkpoints


@HOOKS.register_module()
class ExactResumeHook(SwitchableHook):
    """Seed all random generators for each iteration, and resume from complete checkpoints only.

    MMEngine does not save the states of generators. With this hook the random numbers of a training
    iteration depend only on its number, the rank and the run's seed. Dataloader workers' random
    numbers also depend on the epoch. A run cannot resume exactly from checkpoints that are written
    within an epoch or between accumulated gradients. On GPUs also set
    ``randomness.deterministic=True``, but not for segmentors: PyTorch fails, see docs/resume.md.

    Numbers that modules of the model change as attributes, such as the image size of mmdet's
    ``BatchSyncRandomResize``, and those of ``EarlyStoppingHook`` are added to checkpoints. A
    warning names hooks and transforms whose state changes and is in no checkpoint.

    Raises:
        CheckpointError: If a run resumes from a file that lacks weights or the optimizer's state,
            or has another number of schedulers, or other parameter groups that cannot be fitted to
            the run's. MMEngine would silently reinitialize what is missing.
    """

    priority = 'VERY_HIGH'

    def __init__(self, enabled: bool = True) -> None:
        super().__init__(enabled)
        self._numbers: training_state.Numbers | None = None  # before the run, or before its resume
        self._contents: dict[tuple[Any, str], Any] = {}
        self._objects: dict[int, Any] = {}
        self._first_iter = 0

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
            'default_hooks.checkpoint.type=mmcare.AtomicCheckpointHook': repeats_validation(runner)
            and not any(isinstance(hook, AtomicCheckpointHook) for hook in runner.hooks),
        }
        if missing := ', '.join(setting for setting, needed in advice.items() if needed):
            _warn(runner, f'Set {missing}.')

    def after_load_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        """Check the checkpoint that training resumes from."""
        if not runner._resume or not isinstance(runner._train_loop, BaseLoop):
            return
        state = checkpoint.get('state_dict', checkpoint)
        saved = {k: getattr(v, 'shape', ()) for k, v in without_wrapper(state).items()}
        model = runner.model.module if is_model_wrapper(runner.model) else runner.model
        wanted = {k: getattr(v, 'shape', ()) for k, v in model.state_dict().items()}
        unfit = [key for key in wanted if saved.get(key) != wanted[key]]
        held, needed = checkpoint.get('param_schedulers') or (), runner.param_schedulers
        if unfit:
            fault = f'{len(unfit)} weights of the model are not in it or have another shape: '
            fault += ', '.join(unfit[:10])
        elif not _holds_state(checkpoint.get('optimizer', {}), runner.optim_wrapper):
            fault = 'the state of the optimizer is missing'
        elif needed is not None and len(held) != len(needed):
            fault = f'it has {len(held)} schedulers, the run has {len(needed)}'
        elif fault := fit_groups(checkpoint, runner):
            pass
        else:
            lists = (held, map(vars, needed)) if isinstance(needed, list) else ((), ())
            kept, ignored = ([s.get('T_max', s.get('end')) for s in part] for part in lists)
            if kept != ignored:  # a longer run would keep the last rate, which is tiny
                text = f"The checkpoint's schedules, which end at {kept}, are kept; the config's "
                text += f'end at {ignored}. To train longer, start over, or use load_from.'
                print_log(text, logger='current', level=logging.WARNING)
            objects = training_state.restorable(runner)
            self._numbers = training_state.read_numbers(objects)
            if isinstance(checkpoint.get(STATE), dict):
                training_state.write_numbers(objects, checkpoint[STATE])
            return
        raise CheckpointError(
            f'{runner._load_from or find_latest_checkpoint(runner.work_dir)} cannot be resumed '
            f'from: {fault}. To load only its weights: --cfg-options resume=False load_from=FILE'
        )

    def before_train(self, runner: Any) -> None:
        """Replay the consumed batches, so that the workers' generators advance."""
        iterator: Any = getattr(runner.train_loop, 'dataloader_iterator', None)
        if hasattr(iterator, 'skip_iter'):  # onedl-mmengine would skip the batches
            iterator.skip_iter = lambda number: deque(islice(iterator, number), maxlen=0)
        if self._numbers is None:
            self._numbers = training_state.read_numbers(training_state.restorable(runner))
        self._first_iter = runner.iter

    def before_train_epoch(self, runner: Any) -> None:
        """Seed the workers for the epoch."""
        if not self._objects:  # the run starts: before_train of all hooks has run
            self._objects = training_state.not_restorable(runner)
            self._contents = training_state.read_contents(self._objects)
            changing = {i: training_state.find_changing(o) for i, o in self._objects.items()}
            self._warn_of_lost_state(runner, [k for k in self._contents if k[1] in changing[k[0]]])
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
            self._warn_of_changes(runner)

    def before_save_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        """Add the numbers that have changed."""
        if self._numbers is None:  # not in training
            return
        numbers = training_state.read_numbers(training_state.restorable(runner))
        checkpoint[STATE] = {
            key: value
            for key, value in numbers.items()
            if key not in self._numbers or self._numbers[key] != value
        }
        self._warn_of_changes(runner)

    def _warn_of_changes(self, runner: Any) -> None:
        contents = training_state.read_contents(self._objects)
        changed = [k for k, value in self._contents.items() if contents.get(k) != value]
        self._warn_of_lost_state(runner, changed)

    def _warn_of_lost_state(self, runner: Any, keys: list[tuple[int, str]]) -> None:
        """Warn once of each attribute that training changes."""
        if not keys:
            return
        for key in keys:
            del self._contents[key]
        names = {f'{type(self._objects[index]).__name__}.{name}' for index, name in keys}
        _warn(
            runner,
            f'Training changes {", ".join(sorted(names))}, which no checkpoint holds. For '
            'transforms, set train_dataloader.num_workers; a hook can write its state in '
            'before_save_checkpoint, and read it in after_load_checkpoint.',
        )


def _warn(runner: Any, advice: str) -> None:
    run = 'This resumed run does' if runner._resume else 'A resume of this run will'
    text = f'{run} not reproduce an uninterrupted run. {advice}'
    print_log(text, logger='current', level=logging.WARNING)


def _holds_state(optimizer: dict[str, Any], wrapper: Any) -> bool:
    """Return whether a state dict has the state that an optimizer, or each of several, needs.

    Optimizers without momentum need no state, nor do optimizers of frozen parameters.
    """
    if isinstance(wrapper, OptimWrapperDict):
        return all(_holds_state(optimizer.get(name, {}), part) for name, part in wrapper.items())
    groups = [
        group
        for group in wrapper.optimizer.param_groups
        if any(parameter.requires_grad for parameter in group['params'])
    ]
    needed = any('betas' in group or group.get('momentum') for group in groups)
    return 'param_groups' in optimizer and (bool(optimizer.get('state')) or not needed)
