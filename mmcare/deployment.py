"""What exporters ask of a backbone, and exact fusing of batch norms into convolutions.

Exporters know no backbone: they ask :func:`describe_backbone` and :func:`prepare_backbone`. The
default answers hold for any backbone. A package registers better ones for its own classes::

    @describe_backbone.register
    def _(backbone: MyBackbone) -> BackboneInfo: ...
"""

from __future__ import annotations

from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import singledispatch
from typing import Any, Mapping, NamedTuple

import torch
from mmcv.cnn import fuse_conv_bn
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_flatten

# Sides of the square images that a backbone is tried with. Some need a minimum size.
SIDES = 64, 128, 224, 256, 384, 512, 640
TOLERANCE = 1e-4  # of fusing, as a share of each output's largest magnitude


class Arch(NamedTuple):
    """A backbone that has a name of its own, such as ``'s0'``."""

    name: str  # of files
    config: Mapping[str, Any]


# By the name that users type.
ARCHS: dict[str, Arch] = {}


@dataclass(frozen=True)
class BackboneInfo:
    """What an exporter needs to know of a backbone."""

    arch: str = ''  # its name, or its values
    in_channels: int = 3
    output_names: tuple[str, ...] = ()
    stride: int = 32  # of the last map
    first_conv: str | None = None  # has no padding, so the images' normalization can be fused
    stages: str = r'(?!)'  # regular expression for the stage in the name of a module


def has_answers(backbone: nn.Module) -> bool:
    """Whether a class of backbones has answers of its own."""
    return describe_backbone.dispatch(type(backbone)) is not describe_backbone.dispatch(object)


def find_backbone(model: nn.Module) -> str:
    """Return the name of the backbone in a model or in its student; empty for a known backbone.

    Raises:
        ValueError: If the model has no module named ``backbone``, or several within its parts.
    """
    if has_answers(model):
        return ''
    if isinstance(getattr(model, 'backbone', None), nn.Module):
        return 'backbone'  # not that of a teacher within
    found = [name for name, _ in model.named_modules() if name.split('.')[-1] == 'backbone']
    outer = [name for name in found if not any(name.startswith(f'{other}.') for other in found)]
    students = [name for name in outer if 'student' in name.split('.')]
    outer = students or outer
    if len(outer) != 1:
        held = ', '.join(outer or (name for name, _ in model.named_children()))
        number = 'several modules' if outer else 'no module'
        raise ValueError(f'the {type(model).__name__} has {number} named backbone; it has: {held}')
    return outer[0]


@singledispatch
def describe_backbone(backbone: nn.Module) -> BackboneInfo:
    """Describe a backbone.

    The default computes small images: channels are those of the first convolution, or three where
    these do not fit, as before a slicing step. The stride is that of the smallest map, which a
    wider image makes wider.

    Raises:
        ValueError: If the backbone computes none of these images, or returns no tensors.
    """
    network, kind = deepcopy(backbone), type(backbone).__name__
    network.eval()  # not in the line above: mmdet's ResNet returns None
    first = next(network.parameters(), torch.zeros(0))  # has the dtype and the device of images
    convs = [module for module in network.modules() if isinstance(module, nn.Conv2d)]
    size = getattr(network, 'img_size', None) or ()  # of transformers with fixed positions
    sides = [*([size] if isinstance(size, int) else size), *SIDES]
    reason: Exception | None = None
    for channels in dict.fromkeys([*(conv.in_channels for conv in convs[:1]), 3]):
        for side in sides:
            try:
                with torch.no_grad():
                    outputs, _ = tree_flatten(network(first.new_zeros(1, channels, side, side)))
            except Exception as error:  # backbones of others raise anything
                reason = error
                continue
            maps = [x for x in outputs if isinstance(x, Tensor)]  # Inception also returns None
            if not maps:
                raise ValueError(f'the {kind} returns no tensors')
            strides = [side // x.shape[3] for x in maps if x.dim() == 4]
            with suppress(Exception), torch.no_grad():  # of transformers with fixed positions
                # Not the quotient above, which is too large if convolutions do not pad.
                larger, _ = tree_flatten(network(first.new_zeros(1, channels, side, 2 * side)))
                pairs = zip(maps, [x for x in larger if isinstance(x, Tensor)])
                strides = [side // (y.shape[3] - x.shape[3]) for x, y in pairs if x.dim() == 4]
            names = tuple(f'stage{index + 1}' for index in range(len(maps)))
            return BackboneInfo(kind, channels, names, max([1, *strides]))
    text = ' '.join(str(reason).split())
    raise ValueError(f'the {kind} computes no images with sides of {SIDES} pixels: {text}')


@singledispatch
@torch.no_grad()
def prepare_backbone(backbone: nn.Module, image: Tensor) -> None:
    """Prepare a backbone for export, in place; it computes the same function afterwards.

    The default fuses batch norms into the convolutions before them by MMCV's ``fuse_conv_bn``,
    which goes by the order of modules. Where this changes outputs, nothing is fused. Modules
    within the backbone that have answers of their own are prepared by them.

    Args:
        backbone: In evaluation mode.
        image: (B, C, H, W); its height and width are those of a later export.
    """
    for module in [*backbone.modules()][1:]:
        if has_answers(module):
            prepare_backbone(module, image)
    noise = torch.randn(image.shape, generator=torch.Generator().manual_seed(0))
    try:
        fused = fuse_conv_bn(deepcopy(backbone))
        pairs = zip(tree_flatten(backbone(noise))[0], tree_flatten(fused(noise))[0])
        same = all((x - y).abs().max() <= TOLERANCE * x.abs().max() for x, y in pairs)
    except Exception:  # MMCV takes no norm without weights, and backbones of others raise anything
        return
    if same:
        fuse_conv_bn(backbone)


def fuse_all(module: nn.Module) -> None:
    """Fuse a module or, if it has no ``switch_to_deploy``, the outermost modules within that do."""
    switch_to_deploy = getattr(module, 'switch_to_deploy', None)
    if switch_to_deploy is not None:
        switch_to_deploy()
        return
    for child in module.children():
        fuse_all(child)


def is_fusible(norm: nn.Module) -> bool:
    """Whether a norm is a batch norm in evaluation mode, which is affine in each channel."""
    return isinstance(norm, _BatchNorm) and not norm.training and norm.running_mean is not None


@torch.no_grad()
def fuse(conv: nn.Conv2d, norm: _BatchNorm, norm_first: bool) -> nn.Module:
    """Change the weights of a convolution so that it also computes the norm next to it.

    Args:
        conv: Has a bias; if the norm comes first, it has neither padding nor groups.
        norm: See :func:`is_fusible`.
        norm_first: True for ``conv(norm(x))``, False for ``norm(conv(x))``.

    Returns:
        The identity, which replaces the norm.
    """
    assert norm.running_mean is not None and norm.running_var is not None, 'see is_fusible'
    assert conv.bias is not None and not (norm_first and (any(conv.padding) or conv.groups > 1))
    # In float32 at least, since roundings add up.
    dtype = torch.promote_types(conv.weight.dtype, torch.float32)
    scale = (norm.running_var.to(dtype) + norm.eps).rsqrt()
    if norm.weight is not None:
        scale = scale * norm.weight.to(dtype)
    shift = -norm.running_mean.to(dtype) * scale
    if norm.bias is not None:
        shift = shift + norm.bias.to(dtype)
    weight, bias = conv.weight.to(dtype), conv.bias.to(dtype)
    if norm_first:
        bias = bias + (weight * shift[:, None, None]).sum((1, 2, 3))
        weight = weight * scale[:, None, None]
    else:
        bias = bias * scale + shift
        weight = weight * scale[:, None, None, None]
    conv.weight.copy_(weight)
    conv.bias.copy_(bias)
    return nn.Identity()


def check_fusible(name: str, module: nn.Module) -> None:
    """Raise a RuntimeError if fusing would change what a module computes.

    Fusing would lose hooks (pruning, offloading), parametrizations (weight norm, adapters) and
    another ``forward`` (fake quantization).
    """
    types = nn.Conv2d, nn.Linear, nn.LayerNorm, _BatchNorm, nn.SyncBatchNorm
    plain = type(module).forward in [known.forward for known in types]
    changed = 'forward' in vars(module) or module._forward_hooks or module._forward_pre_hooks
    if not plain or changed or is_parametrized(module):
        raise RuntimeError(
            f'{name} ({type(module).__name__}) cannot be fused: it has hooks, parametrizations or '
            'another forward. Remove or merge them first.'
        )
