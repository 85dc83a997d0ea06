"""Find the state in attributes of a training run that MMEngine saves in no checkpoint."""

from __future__ import annotations

import os
import pickle
import random
import time
from collections import deque
from collections.abc import Iterator, Mapping
from copy import deepcopy
from threading import Thread
from types import FunctionType, MethodType, ModuleType
from typing import Any, Dict, Tuple

import numpy as np
import torch
from mmengine.dataset import worker_init_fn
from mmengine.hooks import EarlyStoppingHook, Hook
from mmengine.runner import EpochBasedTrainLoop
from mmengine.utils import is_method_overridden
from torch import nn
from torch.utils.data import Dataset, Sampler, get_worker_info

from mmcare.engine.hooks import unwrap

# Hooks of these packages write their state to checkpoints or set it again, as hooks that switch
# pipelines do. EarlyStoppingHook does not, see `restorable`.
TOOLBOXES = (
    *('mmaction', 'mmagic', 'mmcare', 'mmdet', 'mmdet3d', 'mmengine', 'mmocr', 'mmpose'),
    *('mmpretrain', 'mmrotate', 'mmseg', 'mmyolo'),
)
OF_MODULES = frozenset(vars(nn.Module()))  # attributes that PyTorch itself changes
SEEDED = 'set_random_state'  # a method of objects that have their own random generators
GENERATORS = random.Random, np.random.Generator, np.random.RandomState

GLOBAL = random._inst, np.random.mtrand._rand, torch.default_generator
# Objects in which neither generators of samplers and transforms nor numbers are looked for.
OPAQUE = type, ModuleType, FunctionType, MethodType, nn.Module, torch.Tensor, Dataset
DEPTH, WIDTH = 6, 1000  # of objects in objects; entries of a container, which may hold the data

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
    """Return objects, by name, that may have numbers to restore.

    These are the model's modules, objects that modules hold as attributes, such as the assigners of
    detectors, and early stopping.
    """
    modules = dict(unwrap(runner.model).named_modules())
    held: dict[int, tuple[str, Any]] = {}
    for name, module in modules.items():
        values = {k: v for k, v in vars(module).items() if k not in OF_MODULES}
        for path, item in _objects_in(values, name):
            held.setdefault(id(item), (path, item))
    stopping = (hook for hook in runner.hooks if isinstance(hook, EarlyStoppingHook))
    return {**dict(held.values()), **modules, **{f'hook {i}': h for i, h in enumerate(stopping)}}


def _objects_in(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield objects with attributes within containers, by their paths: ``'head.assigners.0'``."""
    entries: Any = ()
    if isinstance(value, dict):
        entries = value.items()
    elif isinstance(value, (list, tuple)) and len(value) <= WIDTH:
        entries = enumerate(value)
    elif not isinstance(value, (*OPAQUE, *GENERATORS)) and hasattr(value, '__dict__'):
        yield path, value
    for key, entry in entries:
        yield from _objects_in(entry, f'{path}.{key}' if path else str(key))


def not_restorable(runner: Any) -> dict[int, Any]:
    """Return objects whose state may be lost: hooks, this process's transforms, samplers."""
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
    # Loops over iterations replay what samplers have drawn.
    of_loader = samplers(loader) if isinstance(runner.train_loop, EpochBasedTrainLoop) else []
    return dict(enumerate([*hooks, *unseeded, *of_loader]))


def samplers(loader: Any) -> list[Any]:
    """Return the sampler and the batch sampler of a dataloader."""
    return [part for part in (loader.batch_sampler, loader.sampler) if part is not None]


def find_generators(loader: Any) -> dict[Key, tuple[Any, Any]]:
    """Return the random generators of samplers and transforms, each after the object that has it.

    Generators that the hook seeds are left out: global ones, and those of ``SEEDED`` objects.
    """
    found: dict[Key, tuple[Any, Any]] = {}
    seen = {id(known): known for known in (*GLOBAL, loader.dataset)}
    parts = [*samplers(loader), *transforms(loader.dataset)]
    seen.update((id(part), part) for part in parts)
    for index, part in enumerate(parts):
        if not hasattr(part, SEEDED):
            for path, generator in _walk(vars(part), '', seen, DEPTH):
                found[f'{index} {type(part).__name__}', path] = part, generator
    if isinstance(loader.generator, torch.Generator) and id(loader.generator) not in seen:
        found['loader', 'generator'] = loader, loader.generator
    return found


def _walk(value: Any, path: str, seen: dict[int, Any], depth: int) -> Iterator[tuple[str, Any]]:
    """Yield generators within a value by their paths, such as ``'augmenter.random_state'``."""
    if isinstance(value, (*GENERATORS, torch.Generator)):
        yield path, value
        return
    children: dict[Any, Any] = {}
    if isinstance(value, Mapping):
        children.update(value)
    elif isinstance(value, (list, tuple)) and len(value) <= WIDTH:
        children.update(enumerate(value))
    if not isinstance(value, OPAQUE) and not hasattr(value, SEEDED):
        children.update(getattr(value, '__dict__', {}))
    if depth and len(children) <= WIDTH:
        for name, child in children.items():
            if id(child) not in seen:
                seen[id(child)] = child
                yield from _walk(child, f'{path}.{name}' if path else str(name), seen, depth - 1)


def generator_state(generator: Any) -> Any:
    """Return the state of a generator in plain values, or as a tensor."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.RandomState):
        return _listed(generator.get_state(legacy=False))
    return _listed(generator.bit_generator.state)


def set_generator_state(generator: Any, state: Any) -> None:
    """Set a generator to a state of :func:`generator_state`."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, torch.Generator):
        generator.set_state(state.cpu())
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def same_state(state: Any, other: Any) -> bool:
    """Whether two states of :func:`generator_state` are the same."""
    if isinstance(state, torch.Tensor) or isinstance(other, torch.Tensor):
        tensors = isinstance(state, torch.Tensor) and isinstance(other, torch.Tensor)
        return tensors and torch.equal(state.cpu(), other.cpu())
    return state == other


def _listed(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _listed(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray) else state


class SeededLoader:
    """A dataloader whose sampler draws from seeded global generators, in each of its epochs."""

    def __init__(self, loader: Any, seed: int) -> None:
        self._loader, self._seed, self._epoch = loader, seed, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        self._epoch += 1
        outside = _global_state()
        _seed_global(self._seed + self._epoch)
        try:
            batches = iter(self._loader)  # with workers, the first batches are drawn now
            inside = _global_state()
        finally:
            _set_global_state(outside)
        if hasattr(batches, '_sampler_iter'):  # not of each subclass
            batches._sampler_iter = _isolate(batches._sampler_iter, inside)
        return batches


def isolate(iterator: Iterator[Any], seed: int) -> Iterator[Any]:
    """Iterate over a sampler whose draws from global generators depend on a seed alone.

    Batches are drawn ahead of their iterations, so that the draws of a replay would differ.
    """
    outside = _global_state()
    _seed_global(seed)
    inside = _global_state()
    _set_global_state(outside)
    return _isolate(iterator, inside)


def _isolate(iterator: Iterator[Any], inside: tuple[Any, Any, Any]) -> Iterator[Any]:
    """Iterate over a sampler that draws from global generators with states of their own."""
    while True:
        outside = _global_state()
        _set_global_state(inside)
        try:
            indices = next(iterator)
        except StopIteration:
            return
        finally:
            inside = _global_state()
            _set_global_state(outside)
        yield indices


def _seed_global(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def _global_state() -> tuple[Any, Any, Any]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _set_global_state(state: tuple[Any, Any, Any]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])


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
    objects: Mapping[Any, Any], before: Mapping[Key, Any], validated: Mapping[Key, Any]
) -> tuple[Numbers, dict[Key, bool]]:
    """Compare objects with their state before training.

    An object is stored whole or not at all: if anything but numbers has changed in it, its numbers
    alone would not fit what the constructor makes. A head that keeps priors for the sizes of maps
    would find the sizes, and no priors.

    Args:
        objects: Objects by name.
        before: Their state before training.
        validated: What validations alone have changed, as the last one left it.

    Returns:
        The numbers that have changed, of objects in which nothing else has. And, for all that has
        changed in objects in which more than numbers has, whether the resumed run fills it again:
        it was empty before training, or validations alone change it.
    """
    now = read_state(objects)
    changed = [k for k in {**before, **now} if before.get(k, _MISSING) != now.get(k, _MISSING)]
    numbers = {k: now[k] for k in changed if _is_numeric(now.get(k, _MISSING))}
    partly = {name for name, attribute in changed if (name, attribute) not in numbers}
    stored = {key: value for key, value in numbers.items() if key[0] not in partly}
    # Other modules may keep what they like if no number depends on it.
    named = {name for name, _ in numbers} | {n for n in partly if n.startswith(PREPROCESSOR)}
    empty: tuple[Any, ...] = (None, [], {}, set())
    left_out = {
        key: before.get(key) in empty or validated.get(key, _MISSING) == now.get(key)
        for key in changed
        if key[0] in partly & named
    }
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
            if isinstance(item, Sampler) and attribute == 'epoch':
                continue  # MMEngine sets it
            if _is_numeric(value) or isinstance(value, str):
                contents[name, attribute] = deepcopy(value)
            elif isinstance(value, (deque, dict, list, set)):
                entries = value.values() if isinstance(value, dict) else value
                # Transforms that were built when they were first needed are no state.
                contents[name, attribute] = sum(not callable(entry) for entry in entries)
            elif isinstance(value, torch.Tensor):
                contents[name, attribute] = id(value), value.is_inference() or value._version
            elif isinstance(item, Hook) and isinstance(value, (*GENERATORS, torch.Generator)):
                contents[name, attribute] = _mark(value)  # of others: see find_generators
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
    """Seed a worker of a dataloader as MMEngine does, and call :func:`seed_generators`.

    The worker ends within five seconds if its parent is killed. PyTorch's own check does not see it
    while the worker waits for somebody to take its batches.
    """
    Thread(target=end_with_parent, args=(os.getppid(),), daemon=True).start()
    worker_init_fn(worker_id, **options)
    info = get_worker_info()
    if info is not None:
        seed_generators(info.dataset, torch.initial_seed() % 2**32)


def end_with_parent(parent: int, seconds: float = 5) -> None:
    """End this process when it has another parent; look for it at intervals of some seconds."""
    while os.getppid() == parent:
        time.sleep(seconds)
    os._exit(1)
