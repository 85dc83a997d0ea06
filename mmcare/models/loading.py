"""What strict loading knows of a CARE and of its heads; see :mod:`mmcare.weights.strict`."""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from mmengine.logging import print_log
from mmengine.model.weight_init import PretrainedInit
from mmengine.registry import WEIGHT_INITIALIZERS
from torch import Tensor, nn

from mmcare.models.heads import TwoHeads
from mmcare.registry import built_type
from mmcare.weights import strict
from mmcare.weights.names import BACKBONE_PARTS, find_prefix, select
from mmcare.weights.reading import CheckpointError, load_weights
from mmcare.weights.strict import (
    SHAPE,
    check_weights,
    checked_loading,
    describe_faults,
    find_fault,
    find_faults,
)

ADDRESSES = """\
The ImageNet weights (CARETrans_S0.pth.tar, _S1, _S2; MIT licence) are linked from the authors'
repository zhouyuan888888/CARE-Transformer on GitHub and from the model page
YuanZ1995/CARE-Transformer."""
WHERE_TO_GET_WEIGHTS = f"""\
{ADDRESSES} Either convert one,
    python tools/convert_checkpoint.py CARETrans_S1.pth.tar checkpoints/care_s1_in1k.pth
(`mim run mmcare convert_checkpoint ...` where mmcare is installed without its repository), or name
the downloaded file itself as the checkpoint, or train from scratch:
    --cfg-options model.backbone.init_cfg=None model.backbone.norm_eval=False \\
        model.backbone.from_scratch=True optim_wrapper.paramwise_cfg.custom_keys.gamma.lr_mult=3"""
BLOCK = r'stages\.([0-3])\.blocks\.([0-9]+)\.'
FIRST = 'stem.conv.weight'
OF_A_BACKBONE = (
    'Load the weights of a backbone by its init_cfg=dict(type="Pretrained", checkpoint=FILE, '
    'prefix=PREFIX), and a published file into a classifier with mmcare.SafeLoadingHook or '
    'mmcare.engine.safe_loading.'
)
# Names of no other backbone; Swin and ConvNeXt have stages, too, and RTMDet's CSPNeXt has a stem.
MIXER = r'(mixer|inter[12])\.'
OWN = rf'stem\.conv\.|folded$|{BLOCK}{MIXER}'


def pretrained_cfgs(module: Any) -> list[dict[str, Any]]:
    """Return the entries of a module's ``init_cfg`` for which MMEngine would load a file."""
    cfgs = getattr(module, 'init_cfg', None) or []
    cfgs = cfgs if isinstance(cfgs, (list, tuple)) else [cfgs]
    return [cfg for cfg in cfgs if built_type(WEIGHT_INITIALIZERS, cfg) is PretrainedInit]


def read_state_dict(
    backbone: nn.Module,
    checkpoint: str | os.PathLike,
    prefix: str | None = None,
    map_location: Any = None,
) -> dict[str, Any]:
    """Read the weights of a CARE from a file, and check them, see :func:`check_care`.

    The weights are not loaded into the CARE. The arguments are those of MMEngine's
    ``PretrainedInit``. ``prefix`` is the backbone's name in the file's model, by default
    ``'backbone.'`` or empty. Weights are read onto the CPU, whatever ``map_location`` is.
    """
    try:
        state = load_weights(checkpoint)
    except FileNotFoundError as error:
        raise FileNotFoundError(f'{error}\n{WHERE_TO_GET_WEIGHTS}') from error
    return check_weights(backbone, state, find_prefix(state, prefix), checkpoint)


@contextmanager
def strict_loading(
    model: nn.Module, types: tuple[type, ...], file: Any, source: nn.Module | None = None
) -> Iterator[None]:
    """Check the weights of modules while PyTorch or MMEngine loads them, in a run.

    If a file has no weights at all for a module, an error is raised, with two exceptions: a CARE
    that has been filled from a file by its ``init_cfg``, and heads that MMEngine has initialized,
    keep their weights, and a warning says so.

    Args:
        model: Contains the modules.
        types: Types of the modules that are checked: ``CARE``, ``TwoHeads``.
        file: Where the weights come from, for messages.
        source: The original if ``model`` is a copy, such as EMA's: it knows what was initialized.

    Raises:
        CheckpointError: While weights are loaded, see :func:`check_care`.
    """
    originals = dict(zip(model.modules(), (source or model).modules()))

    def check(module: nn.Module, state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        if not isinstance(module, types):
            return {}
        if not _has_weights_of(module, state, prefix) and _is_filled(originals[module]):
            text = f'{file} has no weights of {prefix[:-1]}, which keeps those of its init_cfg.'
            print_log(text, logger='current', level=logging.WARNING)
            return {}
        return check_weights(module, state, prefix, file)

    with checked_loading(model, check):
        yield


def _is_filled(module: Any) -> bool:
    """Whether MMEngine has initialized a module; random weights count for heads only."""
    is_init = getattr(module, 'is_init', False)
    return is_init and (isinstance(module, TwoHeads) or bool(pretrained_cfgs(module)))


def _has_weights_of(module: nn.Module, state: Mapping[str, Any], prefix: str) -> bool:
    names = select(state, prefix)
    return any(isinstance(module, TwoHeads) or re.match(OWN, name) for name in names)


def load_strictly(
    model: nn.Module, state: Mapping[str, Any], types: tuple[type, ...], file: Any
) -> None:
    """Load all weights of a model; the name of version 1.0. Modules of all types are checked."""
    strict.load_strictly(model, state, file)


def check_state_dict(
    network: Any, state: Mapping[str, Any], prefix: str, file: Any
) -> dict[str, Any]:
    """Call :func:`mmcare.weights.strict.check_weights`; the name of version 1.0."""
    return check_weights(network, state, prefix, file)


@check_weights.register(TwoHeads)
def _check_heads(
    heads: TwoHeads, state: Mapping[str, Any], prefix: str, file: Any
) -> dict[str, Any]:
    """Check the weights of two heads, as :func:`check_care` does; they may be of other classes."""
    weights = select(state, prefix)
    faults = find_faults(weights, heads.state_dict())
    faults.pop(SHAPE, None)  # of other classes
    if faults:
        raise CheckpointError(describe_faults(faults, heads, prefix, file))
    return weights


def check_care(care: Any, state: Mapping[str, Any], prefix: str, file: Any) -> dict[str, Any]:
    """Select the weights of a CARE from those of a model, and check that they fill it.

    MM toolboxes load with ``strict=False``, which would leave missing weights random.

    Args:
        care: A :class:`mmcare.models.CARE`. Nothing is loaded into it.
        state: Weights of a model by name.
        prefix: Name of the CARE in the model, such as ``'backbone.'``.
        file: Where the weights come from, for the message.

    Returns:
        The weights by their names in the CARE, without those of stages and output norms that are
        not built; if there are no output norms at all, a warning says so. RGB weights of the first
        convolution are adapted to the CARE's ``in_channels``.

    Raises:
        CheckpointError: If a weight is missing (except of output norms), unexpected, of another
            shape, not a tensor, not finite, or integer in place of floating point or the reverse.
    """
    weights, wanted = _select(care, state, prefix), care.state_dict()
    has_norms = any(name.startswith(f'{prefix}out_norms.') for name in state)
    if has_norms and not care.out_norms:
        text = f'{file} has norms on output maps, which this {type(care).__name__} lacks: its '
        text += 'maps differ. from_scratch=True or out_norm_cfg builds norms.'
        print_log(text, logger='current', level=logging.WARNING)
    if FIRST in wanted:
        _adapt_channels(weights, wanted[FIRST], file)
    faults = find_faults(weights, wanted, optional=('out_norms.',))
    if faults:
        advice = _advise(care, weights) if weights else _name_prefixes(state)
        raise CheckpointError('\n  '.join([describe_faults(faults, care, prefix, file), *advice]))
    return weights


def _select(care: Any, state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Select the weights of a CARE, without those of stages and norms that are not built."""
    left_out = [f'stages.{index}.' for index in range(len(care.stages), 4)]
    left_out += [f'out_norms.{i}.' for i in range(4) if str(i) not in care.out_norms]
    return {
        name: value
        for name, value in select(state, prefix).items()
        if name.startswith(BACKBONE_PARTS) and not name.startswith(tuple(left_out))
    }


def _adapt_channels(state: dict[str, Any], wanted: Tensor, file: Any) -> None:
    """Change the RGB weights of the first convolution to those of other channels, as timm does.

    For one channel, the weights are summed. For others, they are repeated and scaled by 3 /
    channels, so that for multiples of 3 their sum over channels stays the same.
    """
    weight: Any = state.get(FIRST)
    width, channels, *kernel = wanted.shape
    if find_fault(weight, wanted) != SHAPE or weight.shape != (width, 3, *kernel):
        return
    rgb = weight.cpu().double()
    if channels == 1:
        adapted, change = rgb.sum(1, keepdim=True), 'summed'
    else:
        adapted, change = rgb[:, torch.arange(channels) % 3] * (3 / channels), 'repeated, scaled'
    state[FIRST] = adapted.to(weight)
    text = f'{file}: the RGB weights of {FIRST} are {change} for in_channels={channels}'
    print_log(text, logger='current')


def _name_prefixes(state: Mapping[str, Any]) -> list[str]:
    """Return lines that say where a file has weights of a CARE."""
    prefixes = [key[: -len(FIRST)] for key in state if f'.{key}'.endswith(f'.{FIRST}')]
    prefixes = [p for p in prefixes if any(re.match(BLOCK + MIXER, k) for k in select(state, p))]
    lines = [f'It has the weights of a CARE with the prefix {prefix!r}.' for prefix in prefixes]
    return [*(lines or ['It has no weights of a CARE.']), OF_A_BACKBONE]


def _advise(backbone: Any, weights: Mapping[str, Any]) -> list[str]:
    """Return lines that say what unfit weights look like, and what to do."""
    lines: list[str] = []
    wanted = backbone.state_dict()
    if backbone.deploy != ('folded' in weights):
        lines.append(
            'The model is fused (deploy=True), the weights are not: fuse them first '
            '(tools/reparameterize_model.py), or leave deploy out.'
            if backbone.deploy
            else 'The weights are fused (tools/reparameterize_model.py), the model is not: build '
            'it with deploy=True to evaluate, or load the weights from before fusing to train.'
        )
    elif _has_batch_norms(weights) != _has_batch_norms(wanted):
        lines.append(
            f'The model has norm_cfg={backbone.norm_cfg}, and the weights are of '
            f'{"batch norms" if _has_batch_norms(weights) else "other norms"}: '
            'they fit only a model with the norm_cfg that they were trained with.'
        )
    channels = [list(getattr(s.get(FIRST), 'shape', ()))[1:2] for s in (weights, wanted)]
    if all(channels) and channels[0] != channels[1]:
        text = f'They are for {channels[0][0]} channels, the model has in_channels={channels[1][0]}'
        lines.append(f'{text}: only weights for 3 channels fit others.')
    arch = name_arch(weights, backbone.arch_zoo)
    return [*lines, f'They have the blocks and channels of arch={arch!r}.'] if arch else lines


def _has_batch_norms(state: Iterable[str]) -> bool:
    return any(re.match(r'(?!out_norms\.).*\.running_mean', name) for name in state)


def name_arch(state: Mapping[str, Any], archs: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Find the arch whose stages have the blocks and channels of a backbone's weights."""
    firsts = ['stem.conv.weight', *(f'stages.{i}.downsample.conv.weight' for i in (1, 2, 3))]
    widths = [tuple(state[key].shape[:1]) for key in firsts if torch.is_tensor(state.get(key))]
    blocks = {match.groups() for key in state if (match := re.match(BLOCK, key))}
    depths = Counter(int(stage) for stage, _ in blocks)
    for name, arch in archs.items():
        pairs = zip(arch['memory_widths'], arch['widths'])
        if depths == dict(enumerate(arch['depths'])) and widths == [(sum(pair),) for pair in pairs]:
            return name
    return None
