"""Read and load the weights of a CARE and its heads: they fill it, or an error is raised."""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from mmengine.logging import print_log
from torch import nn

from mmcare.models.heads import TwoHeads
from mmcare.weights.names import BACKBONE_PARTS, of_backbone
from mmcare.weights.reading import CheckpointError, load_weights

ADDRESSES = """\
The ImageNet weights (CARETrans_S0.pth.tar, _S1, _S2; MIT licence) are linked from the authors'
repository zhouyuan888888/CARE-Transformer on GitHub and from the model page
YuanZ1995/CARE-Transformer."""
WHERE_TO_GET_WEIGHTS = f"""\
{ADDRESSES} Either convert one,
    python tools/convert_checkpoint.py CARETrans_S1.pth.tar checkpoints/care_s1_in1k.pth
(`mim run mmcare convert_checkpoint ...` where mmcare is installed without its repository), or name
the downloaded file itself as the checkpoint, or train from scratch:
    --cfg-options model.backbone.init_cfg=None model.backbone.norm_eval=False"""
BLOCK = r'stages\.([0-3])\.blocks\.([0-9]+)\.'
SHAPE = 'of another shape'
COUNTERS = ('num_batches_tracked', '_extra_state')


def read_state_dict(
    backbone: nn.Module, checkpoint: str | os.PathLike, prefix: str | None = None, **_: Any
) -> dict[str, Any]:
    """Return what a CARE takes of a file, see :func:`check_state_dict`; nothing is loaded.

    ``prefix`` is the backbone's name in the file's model, by default ``'backbone.'`` or none.
    """
    try:
        state = of_backbone(load_weights(checkpoint), prefix)
    except FileNotFoundError as error:
        raise FileNotFoundError(f'{error}\n{WHERE_TO_GET_WEIGHTS}') from error
    return check_state_dict(backbone, state, '', checkpoint)


@contextmanager
def strict_loading(
    model: nn.Module, types: tuple[type, ...], file: Any, source: nn.Module | None = None
) -> Iterator[None]:
    """Check modules of some types when PyTorch or MMEngine loads their weights.

    A CARE that a file of its ``init_cfg`` has filled in this process, or heads that MMEngine has
    initialized, keep these weights, with a warning, if the file has none for them.

    Args:
        model: Contains the modules; a wrapper around it may rename keys while it loads.
        types: Of the modules, see ``network`` of :func:`check_state_dict`.
        file: Where the weights come from, for messages.
        source: For a copy, such as EMA's: the model that ``init_cfg`` has filled.

    Raises:
        CheckpointError: While weights are loaded, see :func:`check_state_dict`.
    """

    def check(filled: Any, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        is_filled = getattr(filled, 'is_init', False)
        if not isinstance(module, TwoHeads):  # MMEngine also marks random weights as initialized
            is_filled &= 'Pretrained' in str(filled.init_cfg)
        if is_filled and not _select(module, state, prefix):
            text = f'{file} has no weights of {prefix[:-1]}, which keeps those of its init_cfg.'
            print_log(text, logger='current', level=logging.WARNING)
        else:
            check_state_dict(module, state, prefix, file)

    handles = [
        module._register_load_state_dict_pre_hook(partial(check, filled), with_module=True)
        for module, filled in zip(model.modules(), (source or model).modules())
        if isinstance(module, types)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def check_state_dict(
    network: Any, state: Mapping[str, Any], prefix: str, file: Any
) -> dict[str, Any]:
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
    given = _select(network, state, prefix)
    is_backbone = not isinstance(network, TwoHeads)
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
    if isinstance(network, TwoHeads):
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
            'The model is fused (deploy=True), the weights are not: fuse them first '
            '(tools/reparameterize_model.py), or leave deploy out.'
            if backbone.deploy
            else 'The weights are fused (tools/reparameterize_model.py), the model is not: build '
            'it with deploy=True to evaluate, or load the weights from before fusing to train.'
        )
    arch = name_arch(given, backbone.arch_zoo)
    return [*lines, f'They have the blocks and channels of arch={arch!r}.'] if arch else lines


def name_arch(state: Mapping[str, Any], archs: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Name the arch with the blocks and channels of a backbone's weights, in each stage."""
    firsts = ['stem.conv.weight', *(f'stages.{i}.downsample.conv.weight' for i in (1, 2, 3))]
    widths = [tuple(state[key].shape[:1]) for key in firsts if torch.is_tensor(state.get(key))]
    blocks = {match.groups() for key in state if (match := re.match(BLOCK, key))}
    depths = Counter(int(stage) for stage, _ in blocks)
    for name, arch in archs.items():
        own = zip(arch['memory_widths'], arch['widths'])
        if depths == dict(enumerate(arch['depths'])) and widths == [(sum(pair),) for pair in own]:
            return name
    return None
