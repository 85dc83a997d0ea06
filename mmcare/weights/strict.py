"""Load all weights of a model, or raise an error that names those that do not fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, singledispatch
from typing import Any, Callable

import torch
from torch import Tensor, nn

from mmcare.weights.names import select
from mmcare.weights.reading import CheckpointError
from mmcare_runtime.text import escape, join_first

MISSING, UNEXPECTED, SHAPE = 'missing', 'not in the model', 'of another shape'
VALUES = 'not a dense tensor with values', 'of another data type', 'not finite'
COUNTERS = ('num_batches_tracked', '_extra_state')


def load_strictly(model: nn.Module, state: Mapping[str, Any], file: Any) -> None:
    """Load all weights of a model; modules check theirs by :func:`check_weights`.

    Args:
        model: Any module.
        state: Its weights by name.
        file: Where the weights come from, for messages.

    Raises:
        CheckpointError: If a weight is missing, unexpected, of another shape, not a tensor, not
            finite, or integer in place of floating point or the reverse.
    """
    # PyTorch converts the values that it copies, and copies also those that are not finite.
    faults = find_faults(state, model.state_dict())
    faults = {fault: names for fault, names in faults.items() if fault in VALUES}
    if faults:
        raise CheckpointError(describe_faults(faults, model, '', file))
    with checked_loading(model, partial(check_weights, file=file)):
        try:
            model.load_state_dict(state)
        except CheckpointError:
            raise
        except RuntimeError as error:
            raise CheckpointError(f'{file} does not fit. {error}') from None


@singledispatch
def check_weights(
    module: nn.Module, state: Mapping[str, Any], prefix: str, file: Any
) -> dict[str, Any]:
    """Select the weights of a module from those of a model, and check that they fill it.

    A type of module registers a check of its own by ``check_weights.register(TYPE)``. Other modules
    are not checked: PyTorch compares names and shapes when it loads.

    Args:
        module: Nothing is loaded into it.
        state: Weights of the model by name.
        prefix: Name of the module in the model, such as ``'backbone.'``.
        file: Where the weights come from, for messages.

    Returns:
        The weights to load, by their names in the module.

    Raises:
        CheckpointError: If the module's own check refuses the weights.
    """
    return select(state, prefix)


def has_check(module: nn.Module) -> bool:
    """Whether the type of a module has registered a check of its own."""
    return check_weights.dispatch(type(module)) is not check_weights.dispatch(object)


@contextmanager
def checked_loading(
    model: nn.Module, check: Callable[[nn.Module, Mapping[str, Any], str], Mapping[str, Any]]
) -> Iterator[None]:
    """Check the weights of modules that have a check while PyTorch or MMEngine loads them.

    Args:
        model: Contains the modules.
        check: Takes a module, the weights of the model and the module's prefix. It returns the
            weights to load in place of those of the same names.
    """

    def replace(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        checked = check(module, state, prefix)
        state.update({prefix + name: value for name, value in checked.items()})

    handles = [
        module._register_load_state_dict_pre_hook(replace, with_module=True)
        for module in model.modules()
        if has_check(module)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def find_faults(
    weights: Mapping[str, Any], wanted: Mapping[str, Any], optional: tuple[str, ...] = ()
) -> dict[str, list[str]]:
    """Return the names of weights that do not fit, by their fault.

    Args:
        weights: Weights by name.
        wanted: The state dict that they should fill.
        optional: First parts of names that may be missing; counters of batches may always be.
    """
    faults: dict[str, list[str]] = {}
    for name in wanted:
        if name not in weights and not name.startswith(optional) and not name.endswith(COUNTERS):
            faults.setdefault(MISSING, []).append(name)
    for name, value in weights.items():
        fault = '' if name.endswith(COUNTERS) else find_fault(value, wanted.get(name))
        if fault:
            faults.setdefault(fault, []).append(name)
    return faults


def find_fault(value: Any, wanted: Tensor | None) -> str:
    """Name the fault of a weight; empty if there is none."""
    if wanted is None:
        return UNEXPECTED
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_meta:
        return VALUES[0]
    if value.is_floating_point() != wanted.is_floating_point():
        return VALUES[1]
    if value.shape != wanted.shape:
        return SHAPE
    return '' if value.to(wanted.dtype).isfinite().all() else VALUES[2]


def find_not_finite(state: Mapping[str, Any], model: nn.Module) -> list[str]:
    """Return the names of a model's parameters and running statistics that are not finite.

    Other buffers may hold infinity on purpose.
    """
    names = [*dict(model.named_parameters())]
    names += [name for name in state if name.endswith(('running_mean', 'running_var'))]
    values = {name: state[name] for name in names if isinstance(state.get(name), Tensor)}
    return [name for name, value in values.items() if not value.isfinite().all()]


def describe_faults(
    faults: Mapping[str, Iterable[str]], module: nn.Module, prefix: str, file: Any
) -> str:
    """Return a text that names the first three weights of each fault."""
    lines = [f'{file} does not fit the {type(module).__name__} (prefix {prefix!r}).']
    for fault, names in faults.items():
        lines.append(f'{fault}: {join_first(escape(prefix + name) for name in names)}')
    return '\n  '.join(lines)
