"""Weights of a file fill a network, or an error is raised."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from mmengine.logging import print_log
from torch import nn

from mmcare.weights.names import BACKBONE_PARTS, name_arch

SHAPE = 'of another shape'
COUNTERS = ('num_batches_tracked', '_extra_state')


class CheckpointError(RuntimeError):
    """A checkpoint file that is damaged, refused, or does not fit."""


@contextmanager
def loaded_whole(
    model: nn.Module, kinds: tuple[type, ...], file: Any, source: nn.Module | None = None
) -> Iterator[None]:
    """Check modules of some kinds at the moment when PyTorch or MMEngine loads their weights.

    A CARE that a file of its ``init_cfg`` has filled in this process, or heads that MMEngine has
    initialized, keep these weights, with a warning, if the file has none for them.

    Args:
        model: With the modules, anywhere; what wraps it may rename keys while it loads.
        kinds: See ``network`` of :func:`check_whole`.
        file: Where the weights come from, for messages.
        source: Of a copy, such as EMA's: the model that ``init_cfg`` has filled.

    Raises:
        CheckpointError: While weights are loaded, see :func:`check_whole`.
    """

    def check(filled: Any, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        is_filled = getattr(filled, 'is_init', False)
        if hasattr(filled, 'arch_zoo'):  # MMEngine also marks random weights as initialized
            is_filled &= 'Pretrained' in str(filled.init_cfg)
        if is_filled and not _select(module, state, prefix):
            text = f'{file} has no weights of {prefix[:-1]}, which keeps those of its init_cfg.'
            print_log(text, logger='current', level=logging.WARNING)
        else:
            check_whole(module, state, prefix, file)

    handles = [
        module._register_load_state_dict_pre_hook(partial(check, filled), with_module=True)
        for module, filled in zip(model.modules(), (source or model).modules())
        if isinstance(module, kinds)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def check_whole(network: Any, state: Mapping[str, Any], prefix: str, file: Any) -> dict[str, Any]:
    """Return what a network takes of a file's weights, or raise unless they fill it.

    MM toolboxes load with ``strict=False``: what is missing would stay random.

    Args:
        network: A :class:`mmcare.models.CARE`, or its two heads, whose number of classes may be
            another than the file's; nothing is loaded.
        state: Weights of a model by name.
        prefix: Name of the network in the model, such as ``'backbone.'``.
        file: Where they come from, for the message.

    Returns:
        Weights by the network's own names, without those of stages that are not built. Those of
        output norms may be missing.

    Raises:
        CheckpointError: If a weight is missing, left over, of another shape, not a tensor, of
            integers in place of floating point or the reverse, or not finite.
    """
    given, is_backbone = _select(network, state, prefix), hasattr(network, 'arch_zoo')
    wanted = network.state_dict()
    needed = [name for name in wanted if not name.startswith('out_norms.')]
    faults = {'missing': [n for n in needed if n not in given and not n.endswith(COUNTERS)]}
    for name, value in given.items():
        fault = '' if name.endswith(COUNTERS) else _find_fault(value, wanted.get(name))
        if fault and (is_backbone or fault != SHAPE):
            faults.setdefault(fault, []).append(name)
    lines = [f'{file} does not fit the {type(network).__name__} (prefix {prefix!r}).']
    for fault, names in faults.items():
        if names:
            more = f' and {len(names) - 3} more' if len(names) > 3 else ''
            lines.append(f'{fault}: {", ".join(prefix + name for name in names[:3])}{more}')
    if len(lines) > 1:
        lines += _advise(network, given, prefix) if is_backbone else []
        raise CheckpointError('\n  '.join(lines))
    return given


def _select(network: Any, state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Select the weights of a network, without those of stages that are not built."""
    given = {k[len(prefix) :]: value for k, value in state.items() if k.startswith(prefix)}
    if not hasattr(network, 'arch_zoo'):
        return given
    return {name: value for name, value in given.items() if not _is_left_out(network, name)}


def _is_left_out(backbone: Any, name: str) -> bool:
    """Whether a name is that of another part of a model, or of a stage that is not built."""
    part, number, *_ = [*name.split('.'), '']
    if part == 'stages':
        return number in map(str, range(len(backbone.stages), 4))
    return not name.startswith(BACKBONE_PARTS) or (
        part == 'out_norms' and number not in backbone.out_norms
    )


def _find_fault(value: Any, wanted: torch.Tensor | None) -> str:
    if wanted is None:
        return 'not in the model'
    plain = isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_meta
    if not plain or value.is_floating_point() != wanted.is_floating_point():
        return 'not tensors of such numbers'
    if value.shape != wanted.shape:
        return SHAPE
    return '' if value.to(wanted.dtype).isfinite().all() else 'not finite'


def _advise(backbone: Any, given: Mapping[str, Any], prefix: str) -> list[str]:
    """Say what weights look like and what to do if they do not fit, in lines."""
    lines = []
    if not given:
        lines.append(
            f'No key of a CARE begins with {prefix!r}. Weights of a backbone alone are loaded by '
            'init_cfg=dict(type="Pretrained", checkpoint=FILE) of the backbone; a classifier takes '
            "published files with mmcare.SafeLoadingHook or 'mmcare.engine.safe_loading'."
        )
    elif backbone.deploy != ('folded' in given):
        lines.append(
            'The model is folded (deploy=True), the weights are not: fold them first '
            '(tools/reparameterize_model.py), or leave deploy out.'
            if backbone.deploy
            else 'The weights are folded (tools/reparameterize_model.py), the model is not: build '
            'it with deploy=True to evaluate, or load the weights from before folding to train.'
        )
    arch = name_arch(given, backbone.arch_zoo)
    return [*lines, f'They have the blocks and channels of arch={arch!r}.'] if arch else lines
