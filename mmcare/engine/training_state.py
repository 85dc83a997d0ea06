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

Numbers = Dict[Tuple[Any, str], Any]  # by (name of an object, attribute)


def restorable(runner: Any) -> dict[str, Any]:
    """Return objects, by name, that may have numbers to restore: modules, early stopping."""
    model = runner.model.module if is_model_wrapper(runner.model) else runner.model
    stopping = (hook for hook in runner.hooks if isinstance(hook, EarlyStoppingHook))
    return {**dict(model.named_modules()), **{f'hook {i}': h for i, h in enumerate(stopping)}}


def not_restorable(runner: Any) -> dict[int, Any]:
    """Return objects whose state may be lost: hooks, preprocessors, this process's transforms."""
    hooks = [
        hook
        for hook in runner.hooks
        if type(hook).__module__.partition('.')[0] not in TOOLBOXES
        and not isinstance(hook, EarlyStoppingHook)
        and not is_method_overridden('before_save_checkpoint', Hook, hook)
        and not is_method_overridden('after_load_checkpoint', Hook, hook)
    ]
    model = runner.model.module if is_model_wrapper(runner.model) else runner.model
    preprocessor = getattr(model, 'data_preprocessor', None)
    modules = [*preprocessor.modules()] if isinstance(preprocessor, nn.Module) else []
    loader = runner.train_dataloader
    steps = [] if loader.num_workers else transforms(loader.dataset)
    unseeded = [step for step in steps if not hasattr(step, SEEDED)]
    return dict(enumerate([*hooks, *modules, *unseeded]))


def read_numbers(objects: Mapping[Any, Any]) -> Numbers:
    """Copy objects' numbers, and tuples and lists of numbers, by object and attribute."""
    return {
        (name, attribute): deepcopy(value)
        for name, item in objects.items()
        for attribute, value in vars(item).items()
        if attribute not in OF_MODULES and _is_numeric(value)
    }


def write_numbers(objects: Mapping[Any, Any], numbers: Numbers) -> None:
    """Set the numeric attributes of objects to the numbers of a checkpoint."""
    for name, attribute in read_numbers(objects):
        value = numbers.get((name, attribute), [''])
        if _is_numeric(value):
            setattr(objects[name], attribute, value)


def read_contents(objects: Mapping[Any, Any]) -> dict[tuple[Any, str], Any]:
    """Return values, by attribute, that show whether objects change, without numbers of modules."""
    contents: dict[tuple[Any, str], Any] = {}
    for name, item in objects.items():
        for attribute, value in vars(item).items():
            if isinstance(item, nn.Module) and (attribute in OF_MODULES or _is_numeric(value)):
                continue
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
