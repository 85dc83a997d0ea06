"""The network as one program of torch.export, and what runtimes want written differently."""

import re
from collections.abc import Callable, Mapping
from itertools import accumulate, groupby
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from mmcare.models.backbones.care import TOTAL_STRIDE

LARGEST_SIDE = 4096
aten = torch.ops.aten


def _elu(x: Tensor, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Tensor:
    negative = alpha * torch.exp(torch.clamp(x, max=0.0) * input_scale) - alpha
    return scale * (torch.relu(x) + negative)


def _split(x: Tensor, size: int | list[int], dim: int = 0) -> list[Tensor]:
    if isinstance(size, int):
        starts: Any = range(0, x.shape[dim], size)
        ends = [*starts[1:], x.shape[dim]]
    else:
        starts, ends = list(accumulate(size[:-1], initial=0)), list(accumulate(size))
    return [x.narrow(dim, start, end - start) for start, end in zip(starts, ends, strict=True)]


def _sum(x: Tensor, dim: list[int], keepdim: bool = False, dtype: Any = None) -> Tensor:
    return x.mean(dim, keepdim, dtype=dtype) * float(prod(x.shape[one] for one in dim))


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
    goes to slower operators. Others stay ``aten.conv2d``, and these alone are quantized: pieces in
    int8 would lose more in the sum than they save.
    """
    sides = weight.shape[2:]
    values = prod(sides)
    fast = values <= 9 or 18 < values <= 25
    length = (9 if values <= 18 else 25) // min(sides)
    if fast or not length or groups != x.shape[1] or (*stride, *dilation) != (1, 1, 1, 1):
        return NotImplemented  # leaves it as it is
    dim = 3 if sides[1] == max(sides) else 2
    extent = x.shape[dim] + 2 * padding[dim - 2] - weight.shape[dim] + 1
    # Each piece pads the image itself, since ExecuTorch (1.5.1) cannot pad between int8 and float.
    parts = [
        aten.convolution(
            x,
            piece,
            None if index else bias,
            stride,
            padding,
            dilation,
            False,
            (0, 0),
            groups,
        ).narrow(dim, index * length, extent)
        for index, piece in enumerate(weight.split(length, dim))
    ]
    return sum(parts[1:], parts[0])


Table = Mapping[Any, Callable[..., Any]]
# A crop that takes everything becomes an alias, which is of no use to any runtime.
COREML: Table = {aten.alias.default: lambda x: x}
COREAI: Table = {**COREML, aten.elu.default: _elu}  # coreai-torch 0.4.3 has no ELU
# ExecuTorch 1.5.1 gives XNNPACK neither ELU nor sum, and no operators with several outputs.
XNNPACK: Table = {
    **COREAI,
    aten.conv2d.default: _conv2d,
    aten.split.Tensor: _split,  # of chunks
    aten.split_with_sizes.default: _split,
    aten.sum.dim_IntList: _sum,
}


def export_program(
    network: torch.nn.Module, channels: int, shape: tuple[int, int], dynamic: bool = False
) -> ExportedProgram:
    """Export a network of images (1, C, H, W) as it is: nothing is rewritten.

    Args:
        network: Fold it first; otherwise its norms are exported as operators.
        channels: Of the images.
        shape: Height and width.
        dynamic: Height and width are free, in multiples of 32 up to 4096.
    """
    dynamic_shapes = None
    if dynamic:
        # A side of one block would be taken for a fixed one: torch.export specialises sizes of 1.
        shape = max(shape[0], 2 * TOTAL_STRIDE), max(shape[1], 2 * TOTAL_STRIDE)
        height, width = (
            TOTAL_STRIDE * Dim(name, min=1, max=LARGEST_SIDE // TOTAL_STRIDE)
            for name in ('height_in_blocks', 'width_in_blocks')
        )
        dynamic_shapes = ({2: height, 3: width},)
    image = torch.zeros(1, channels, *shape)
    return torch.export.export(network, (image,), dynamic_shapes=dynamic_shapes)


def count_convolutions(program: ExportedProgram) -> list[list[Any]]:
    """Count the convolutions of stem, stages, and the rest of the model, in the program's order."""
    stages = []
    for node in program.graph.nodes:
        if node.target in (aten.conv2d.default, aten.convolution.default):
            path = str([*node.meta['nn_module_stack'].values()][-1][0])
            found = re.search(r'\bstem\b|\bstages\.\d+', path)
            stages.append(found[0] if found else 'rest')
    return [[stage, len([*group])] for stage, group in groupby(stages)]
