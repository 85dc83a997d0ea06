"""The network as one program of torch.export, and what runtimes want written differently."""

import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from itertools import accumulate, groupby
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from mmcare.models.backbones.care import TOTAL_STRIDE

LARGEST_SIDE = 4096
aten = torch.ops.aten


def _split(x: Tensor, size: int | list[int], dim: int = 0) -> list[Tensor]:
    if isinstance(size, int):
        starts: Any = range(0, x.shape[dim], size)
        ends = [*starts[1:], x.shape[dim]]
    else:
        starts, ends = list(accumulate(size[:-1], initial=0)), list(accumulate(size))
    return [x.narrow(dim, start, end - start) for start, end in zip(starts, ends, strict=True)]


def _mean(x: Tensor, dim: list[int], keepdim: bool = False, dtype: Any = None) -> Tensor:
    if x.dim() != 3 or [one % 3 for one in dim] != [2] or not keepdim:
        return NotImplemented  # leaves it as it is
    heads, channels, positions = x.shape
    mean = x.reshape(heads, channels, 1, positions).mean((2, 3), True, dtype=dtype)
    return mean.reshape(heads, channels, 1)


def _amax(x: Tensor, dim: list[int], keepdim: bool = False) -> Tensor:
    if x.dim() != 3 or len(dim) != 1 or not keepdim:
        return NotImplemented
    kernel = [x.shape[axis] if axis == dim[0] % 3 else 1 for axis in (1, 2)]
    shape = [1 if axis == dim[0] % 3 else x.shape[axis] for axis in range(3)]
    return aten.max_pool2d.default(x.reshape(1, *x.shape), kernel, kernel).reshape(shape)


def _pad(x: Tensor, pad: list[int], mode: str = 'constant', value: float | None = None) -> Tensor:
    if max(pad) > 0 or any(pad[::2]):
        return NotImplemented  # leaves it as it is
    for dim, side in zip((-1, -2), pad[1::2], strict=False):
        x = x.narrow(dim, 0, x.shape[dim] + side) if side else x
    return x


def _conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = (1, 1),
    padding: Any = (0, 0),
    dilation: Any = (1, 1),
    groups: int = 1,
) -> Tensor:
    """Cut a depth-wise kernel along its longer side if pieces, which are added up, are faster.

    XNNPACK's kernels hold 9 or 25 values. One of 11 would take the time of 25; one of more than 25
    goes to slower operators. Others stay ``aten.conv2d``, and ExecuTorch quantizes these alone: its
    sums of pieces in int8 would take longer.
    """
    sides = weight.shape[2:]
    values = prod(sides)
    fast = values <= 9 or 18 < values <= 25
    length = (9 if values <= 18 else 25) // min(sides)
    if fast or not length or groups != x.shape[1] or (*stride, *dilation) != (1, 1, 1, 1):
        return NotImplemented  # leaves it as it is
    dim = 3 if sides[1] == max(sides) else 2
    extent = x.shape[dim] + 2 * padding[dim - 2] - weight.shape[dim] + 1
    rest = stride, padding, dilation, False, (0, 0), groups
    # Each piece pads the image itself, since ExecuTorch (1.5.1) cannot pad between int8 and float.
    whole = (
        aten.convolution(x, piece, None if index else bias, *rest)
        for index, piece in enumerate(weight.split(length, dim))
    )
    parts = [part.narrow(dim, index * length, extent) for index, part in enumerate(whole)]
    return sum(parts[1:], parts[0])


Table = Mapping[Any, Callable[..., Any]]
# At one size: pads that do nothing go, and crops, which CARE writes as negative pads, are slices.
FIXED: Table = {aten.pad.default: _pad, aten.contiguous.default: lambda x, **_: x}
COREML: Table = {aten.alias.default: lambda x: x}  # left by full-size slices
# ExecuTorch 1.5.1 gives XNNPACK no maxima, means only over the last two of four axes, and no
# operators with several outputs.
XNNPACK: Table = {
    **COREML,
    aten.amax.default: _amax,
    aten.conv2d.default: _conv2d,
    aten.mean.dim: _mean,
    aten.split.Tensor: _split,  # of chunks
    aten.split_with_sizes.default: _split,
}


def separate_convolutions(network: nn.Module) -> nn.Module:
    """Copy a network so that each module has its own copy of a convolution that it shares.

    RTMDet's head has a convolution for all levels and a norm for each. ExecuTorch (1.5.1) calls
    the weights of such a pair, fused, by the convolution's name alone: all levels would get the
    last level's. pnnx (20261020) does not convert such a pair.
    """
    network = deepcopy(network)
    for module in [*network.modules()]:
        for name, child in module.named_children():
            if isinstance(child, nn.Conv2d):
                setattr(module, name, deepcopy(child))
    return network


def export_program(
    network: torch.nn.Module, channels: int, shape: tuple[int, int], step: int = 0
) -> ExportedProgram:
    """Export a network of images (1, C, H, W) as it is; only what does nothing is left out.

    Args:
        network: Fold it first; otherwise its norms are exported as operators.
        channels: Of the images.
        shape: Height and width.
        step: Height and width are free, in multiples of this, up to 4096. 1: from 33 on, since
            torch.export takes sizes of 1, here of the last map, for fixed ones.
    """
    if not step:
        program = torch.export.export(network, (torch.zeros(1, channels, *shape),))
        return program.run_decompositions(dict(FIXED))
    least = TOTAL_STRIDE + 1 if step == 1 else 1
    height, width = (
        step * Dim(name, min=least, max=LARGEST_SIDE // step)
        for name in ('height_in_steps', 'width_in_steps')
    )
    image = torch.zeros(1, channels, *(max(side, 2 * TOTAL_STRIDE) for side in shape))
    return torch.export.export(network, (image,), dynamic_shapes=({2: height, 3: width},))


def count_convolutions(program: ExportedProgram) -> list[list[Any]]:
    """Count the convolutions of stem, stages, and the rest of the model, in the program's order."""
    stages = []
    for node in program.graph.nodes:
        if node.target in (aten.conv2d.default, aten.convolution.default):
            path = str([*node.meta['nn_module_stack'].values()][-1][0])
            found = re.search(r'\bstem\b|\bstages\.\d+', path)
            stages.append(found[0] if found else 'rest')
    return [[stage, len([*group])] for stage, group in groupby(stages)]
