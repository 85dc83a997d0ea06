"""Find the state in attributes of a training run that MMEngine saves in no checkpoint."""

from __future__ import annotations

import pickle
import random
from collections import deque
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any, Dict, Tuple

import numpy as np
import torch
from mmengine.dataset import worker_init_fn
from mmengine.hooks import EarlyStoppingHook, Hook
from mmengine.model import is_model_wrapper
from mmengine.utils import is_method_overridden
from torch import nn
from torch.utils.data import get_worker_info

# Hooks of these packages write their state to checkpoints or set it again, as hooks that switch
# pipelines do. EarlyStoppingHook does not, see `restorable`.
TOOLBOXES = ('mmcare', 'mmdet', 'mmengine', 'mmpose', 'mmpretrain', 'mmseg')
OF_MODULES = frozenset(vars(nn.Module()))  # attributes that PyTorch itself changes
SEEDED = 'set_random_state'  # a method of objects that have their own random generators
GENERATORS = random.Random, np.random.Generator, np.random.RandomState

Key = Tuple[Any, str]  # name of an object, attribute
Numbers = Dict[Key, Any]
WHOLE = 'whole'  # a key of the numbers in checkpoints; mmcare 1.0.0 saved parts of objects
PREPROCESSOR = 'data_preprocessor'
_MISSING = object()


class _Reference:
    """Tell whether a value is the same object as before, and tensors also if they were changed."""

    def __init__(self, value: Any) -> None:
        self.value = value  # keeps it alive: another object could get its id
        self.version: Any = None
        if isinstance(value, torch.Tensor):
            self.version = value.is_inference() or value._version
        elif isinstance(value, np.ndarray):
            self.version = value.tobytes()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Reference):
            return NotImplemented
        return self.value is other.value and self.version == other.version

    __hash__ = None  # type: ignore[assignment]


def restorable(runner: Any) -> dict[str, Any]:
    """Return objects, by name, that may have numbers to restore: modules, early stopping."""
    model = runner.model.module if is_model_wrapper(runner.model) else runner.model
    stopping = (hook for hook in runner.hooks if isinstance(hook, EarlyStoppingHook))
    return {**dict(model.named_modules()), **{f'hook {i}': h for i, h in enumerate(stopping)}}


def not_restorable(runner: Any) -> dict[int, Any]:
    """Return objects whose state may be lost: hooks, this process's transforms."""
    hooks = [
        hook
        for hook in runner.hooks
        if type(hook).__module__.partition('.')[0] not in TOOLBOXES
        and not isinstance(hook, EarlyStoppingHook)
        and not is_method_overridden('before_save_checkpoint', Hook, hook)
        and not is_method_overridden('after_load_checkpoint', Hook, hook)
    ]
    loader = runner.train_dataloader
    steps = [] if loader.num_workers else transforms(loader.dataset)
    unseeded = [step for step in steps if not hasattr(step, SEEDED)]
    return dict(enumerate([*hooks, *unseeded]))


def read_state(objects: Mapping[Any, Any]) -> dict[Key, Any]:
    """Return copies of objects' numbers, and marks of their other attributes, to be compared.

    Buffers of modules count if no checkpoint holds them, or if they are not there yet.
    """
    return {
        (name, attribute): _mark(value)
        for name, item in objects.items()
        for attribute, value in _attributes(item).items()
    }


def _attributes(item: Any) -> dict[str, Any]:
    if not isinstance(item, nn.Module):
        return vars(item)
    unsaved = item._non_persistent_buffers_set
    buffers = {k: v for k, v in item._buffers.items() if v is None or k in unsaved}
    return {**{k: v for k, v in vars(item).items() if k not in OF_MODULES}, **buffers}


def _mark(value: Any) -> Any:
    if _is_numeric(value):
        return deepcopy(value)
    if isinstance(value, GENERATORS):
        return pickle.dumps(value)
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, dict):
        return {key: _mark(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return [_mark(entry) for entry in value]
    if isinstance(value, (str, set)):
        return deepcopy(value)
    return _Reference(value)


def split_changes(
    objects: Mapping[Any, Any], before: Mapping[Key, Any]
) -> tuple[Numbers, dict[Key, bool]]:
    """Compare objects with their state before training.

    An object is stored whole or not at all: if anything but numbers has changed in it, its numbers
    alone would not fit what the constructor makes. A head that keeps priors for the sizes of maps
    would find the sizes, and no priors.

    Returns:
        The numbers that have changed, of objects in which nothing else has. And, for all that has
        changed in objects in which more than numbers has, whether it was empty before training.
    """
    now = read_state(objects)
    changed = [k for k in {**before, **now} if before.get(k, _MISSING) != now.get(k, _MISSING)]
    numbers = {k: now[k] for k in changed if _is_numeric(now.get(k, _MISSING))}
    partly = {name for name, attribute in changed if (name, attribute) not in numbers}
    stored = {key: value for key, value in numbers.items() if key[0] not in partly}
    # Other modules may keep what they like if no number depends on it.
    named = {name for name, _ in numbers} | {n for n in partly if n.startswith(PREPROCESSOR)}
    empty: tuple[Any, ...] = (None, [], {}, set())
    left_out = {key: before.get(key) in empty for key in changed if key[0] in partly & named}
    return stored, left_out


def write_numbers(objects: Mapping[Any, Any], numbers: Mapping[Any, Any]) -> list[Key]:
    """Set attributes of objects to the numbers of a checkpoint, for each object all or none.

    Returns:
        What could not be set, since the object has something else there. In checkpoints of mmcare
        1.0.0, also what is None before training: it may belong to tensors that were not saved.
    """
    refused: list[Key] = []
    given: dict[Any, dict[str, Any]] = {}
    for key, value in numbers.items():
        if isinstance(key, tuple) and len(key) == 2 and key[0] in objects:
            given.setdefault(key[0], {})[key[1]] = value
    for name, values in given.items():
        item = objects[name]
        current = {k: _attributes(item).get(k, _MISSING) for k in values}
        is_whole = WHOLE in numbers or name.startswith(PREPROCESSOR)
        fits = all(
            _is_numeric(value)
            and (_is_numeric(current[k]) or (current[k] is _MISSING and not hasattr(item, k)))
            and (is_whole or not (current[k] is None or current[k] is _MISSING))
            for k, value in values.items()
        )
        if fits:
            vars(item).update(values)
        else:
            refused += [(name, attribute) for attribute in values]
    return refused


def read_contents(objects: Mapping[Any, Any]) -> dict[Key, Any]:
    """Return values, by attribute, that show whether hooks and transforms change."""
    contents: dict[Key, Any] = {}
    for name, item in objects.items():
        for attribute, value in vars(item).items():
            if value is None and not isinstance(item, Hook):
                continue  # transforms such as mmseg's take what they lack from the first sample
            if _is_numeric(value) or isinstance(value, str):
                contents[name, attribute] = deepcopy(value)
            elif isinstance(value, (deque, dict, list, set)):
                contents[name, attribute] = len(value)
            elif isinstance(value, torch.Tensor):
                contents[name, attribute] = id(value), value.is_inference() or value._version
            elif isinstance(value, GENERATORS):
                contents[name, attribute] = pickle.dumps(value)
            elif isinstance(value, torch.Generator):
                contents[name, attribute] = value.get_state().tolist()
    return contents


def _is_numeric(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_numeric, value))
    return value is None or isinstance(value, (bool, int, float))


def transforms(part: Any) -> Iterator[Any]:
    """Yield the transforms of a dataset and of datasets within, and transforms within them."""
    if isinstance(part, (list, tuple)):
        for entry in part:
            yield from transforms(entry)
    elif hasattr(part, '__dict__') and not isinstance(part, Mapping):
        if callable(part):  # datasets are not callable
            yield part
        if not hasattr(part, SEEDED):
            for attribute in ('dataset', 'datasets', 'pipeline', 'transforms'):
                yield from transforms(vars(part).get(attribute))


def seed_generators(dataset: Any, seed: int) -> None:
    """Seed transforms that have generators of their own, as Albumentations from 1.4.21 on."""
    for step in transforms(dataset):
        for item in (step, *vars(step).values()):
            if hasattr(item, SEEDED):
                # With set_random_seed, all transforms of a Compose would draw the same numbers.
                item.set_random_state(np.random.default_rng(seed), random.Random(seed))
                seed += 1


def seed_worker(worker_id: int, **options: Any) -> None:
    """Seed a worker of a dataloader as MMEngine does, and call :func:`seed_generators`."""
    worker_init_fn(worker_id, **options)
    info = get_worker_info()
    if info is not None:
        seed_generators(info.dataset, torch.initial_seed() % 2**32)
