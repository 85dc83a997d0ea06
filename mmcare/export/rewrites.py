"""Rewrite networks, and their programs of torch.export, as runtimes need them.

Rewriting does not change results. Once a runtime no longer needs a rewrite, a test in
tests/test_export/test_upstream.py fails.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from math import prod
from operator import attrgetter
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.overrides import TorchFunctionMode

from mmcare.deployment import fuse

aten = torch.ops.aten


class MatrixPool(nn.AdaptiveAvgPool2d):
    """Adaptive pooling as two matrix products, for maps of the size that it gets first.

    Converters write one or two operators for each bin, 95 for the head of UperNet. Each
    matrix is the second factor: in float16, XNNPACK takes no product that begins with a constant.
    """

    rows: Tensor
    columns: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C, *output_size)."""
        if not hasattr(self, 'rows'):
            bins = super().forward(x).shape[2:]
            self.rows, self.columns = (
                F.adaptive_avg_pool1d(torch.eye(side), number)
                for side, number in zip(x.shape[2:], bins, strict=True)
            )
        return ((x @ self.columns).transpose(2, 3) @ self.rows).transpose(2, 3)


def use_matrix_pools(network: nn.Module, image: Tensor) -> None:
    """Replace adaptive pooling to several bins, in place, for images as large as ``image``."""
    for name, pool in [*network.named_modules(remove_duplicate=False)]:
        if type(pool) is nn.AdaptiveAvgPool2d and pool.output_size not in (1, (1, 1)):
            network.set_submodule(name, MatrixPool(pool.output_size))
    network(image)


class Constant(nn.Module):
    """Returns what a module gives for maps of one size, which depends on nothing else."""

    value: Tensor

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.register_buffer('value', value)

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """Return the value."""
        return self.value


def fix_encodings(network: nn.Module, image: Tensor) -> None:
    """Compute encodings of positions once, in place, for images as large as ``image``.

    Converters write their arithmetic of integers, which Core ML does not have.
    """
    found: dict[nn.Module, list[Tensor]] = {}

    def keep(module: nn.Module, _: Any, output: Tensor) -> None:
        found.setdefault(module, []).append(output)

    encodings = [x for x in network.modules() if type(x).__name__ == 'SinePositionalEncoding']
    if not encodings:
        return
    hooks = [module.register_forward_hook(keep) for module in encodings]
    network(image)
    for hook in hooks:
        hook.remove()
    for name, module in [*network.named_modules(remove_duplicate=False)]:
        if len(found.get(module, ())) == 1:  # not one for each of several maps
            network.set_submodule(name, Constant(found[module][0]))


def normalize_inside(
    network: Any, mean: Sequence[float], std: Sequence[float], first_conv: str | None
) -> nn.Module:
    """Let a :class:`mmcare.export.tasks.Task` take pixels.

    The normalization is fused into the convolution ``first_conv`` of the backbone, in place. If
    that is None, it comes before the network, as it must if the network pads images with zeros.
    """
    norm = nn.BatchNorm2d(len(mean), eps=0).eval().requires_grad_(False)
    norm.running_mean, norm.running_var = torch.tensor(mean), torch.tensor(std) ** 2
    if first_conv is None:
        return nn.Sequential(norm, network)
    fuse(network.backbone.get_submodule(first_conv), norm, norm_first=True)
    return network


def separate_convolutions(network: nn.Module) -> None:
    """Give each module its own copy of a convolution that it shares, in place.

    RTMDet's head has one convolution for all levels and a norm for each level. ExecuTorch
    names the fused weights of such a pair after the convolution alone, so that all levels would get
    the last level's. pnnx does not convert such a pair.
    """
    known: set[nn.Module] = set()
    for name, module in [*network.named_modules(remove_duplicate=False)]:
        if isinstance(module, nn.Conv2d):
            if module in known:
                network.set_submodule(name, deepcopy(module))
            known.add(module)


class ChannelsLast(nn.Module):
    """A program of images and maps (1, H, W, C); names are those of the file."""

    def __init__(self, program: nn.Module, names: Sequence[str], layouts: Sequence[Any]) -> None:
        super().__init__()
        self.program, self.names, self.layouts = program, names, layouts
        self.training = False  # programs have no eval()

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        """Map an image to outputs by name."""
        image = image if image.is_floating_point() else image.float()
        outputs = self.program(image.permute(0, 3, 1, 2).contiguous())
        outputs = [
            x.permute(0, 2, 3, 1) if layout == 'NHWC' else x
            for x, layout in zip(outputs, self.layouts, strict=True)
        ]
        return dict(zip(self.names, outputs, strict=True))


def _split(x: Tensor, size: int | list[int], dim: int = 0) -> list[Tensor]:
    total = x.shape[dim]
    if isinstance(size, int):
        size = [min(size, total - start) for start in range(0, total, size)]
    return [x.narrow(dim, sum(size[:index]), length) for index, length in enumerate(size)]


def _mean(x: Tensor, dim: list[int], keepdim: bool = False, dtype: Any = None) -> Tensor:
    if x.dim() != 4 or dim != [2] or not keepdim:
        return NotImplemented  # leaves it as it is
    batch, heads, rows, values = x.shape
    moved = x.reshape(batch * heads, rows, 1, values).transpose(1, 3)
    return moved.mean((2, 3), True, dtype=dtype).reshape(batch, heads, 1, values)


def _adaptive_avg_pool2d(x: Tensor, size: list[int]) -> Tensor:
    """Pool whole maps without strides: PyTorch's own mean is as_strided for channels last."""
    return x.mean((2, 3), True) if [*size] == [1, 1] and x.dim() == 4 else NotImplemented


def _amax(x: Tensor, dim: list[int], keepdim: bool = False) -> Tensor:
    if x.dim() != 4 or dim not in ([2], [2, 3]) or not keepdim:
        return NotImplemented  # leaves it as it is
    kernel = [x.shape[2], x.shape[3] if 3 in dim else 1]
    return aten.max_pool2d.default(x, kernel, kernel)


def _matmul(x: Tensor, y: Tensor) -> Tensor:
    if x.dim() != 4 or x.shape[:2] != y.shape[:2]:
        return NotImplemented  # leaves it as it is
    product = aten.bmm.default(x.flatten(0, 1), y.flatten(0, 1))
    return product.reshape(*x.shape[:3], y.shape[3])


def _bitwise_or(x: Tensor, y: Tensor) -> Tensor:
    """Compute with truth values by the operator that coremltools has, as TOOD's head does."""
    return aten.logical_or.default(x, y) if x.dtype == torch.bool else NotImplemented


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Make a matrix of a weight of one row, as GFL's mean of a distribution has.

    XNNPACK does not take the row, or computes something else in float16; coremltools raises an
    error.
    """
    if weight.dim() > 1:
        return NotImplemented  # leaves it as it is
    return aten.linear.default(x, weight[None], bias).squeeze(-1)


def _product(x: Tensor, y: Tensor) -> Tensor:
    """Multiply by one column, or a single row, as a sum: LiteRT's converter confuses their shapes.

    TOOD's head has such columns, and a CARE's attention with one head has such a row.
    """
    if x.dim() > 2 and y.dim() > 2 and y.shape[-1] == 1:
        return (x * y.mT).sum(-1, True)
    if x.dim() > 3 and y.dim() > 1 and x.shape[:-1].numel() == 1:
        return (x.mT * y).sum(-2, True)
    return NotImplemented  # leaves it as it is


def _linear_of_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Map (B, rows, 1, C) by a convolution, for K-Net: LiteRT's converter confuses the shapes."""
    if x.dim() != 4 or x.shape[2] > 1 or weight.dim() == 1:
        return _linear(x, weight, bias)
    maps = aten.conv2d.default(x.permute(0, 3, 1, 2), weight[:, :, None, None], bias)
    return maps.permute(0, 2, 3, 1)


def _pad(x: Tensor, pad: list[int], mode: str = 'constant', value: float | None = None) -> Tensor:
    if max(pad) > 0 or any(pad[::2]):
        return NotImplemented  # leaves it as it is
    for index, side in enumerate(pad[1::2], 1):
        x = x.narrow(-index, 0, x.shape[-index] + side) if side else x
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
    """Cut a depth-wise kernel along its longer side, and add up the pieces, where this is faster.

    XNNPACK's kernels hold 9 or 25 values: a kernel of 11 takes the time of 25, and a kernel of more
    than 25 goes to slower operators. Kernels that are not cut stay ``aten.conv2d``, and ExecuTorch
    quantizes only these.
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
    # Each piece pads the image itself, since ExecuTorch cannot pad between int8 and float.
    whole = (
        aten.convolution(x, piece, None if index else bias, *rest)
        for index, piece in enumerate(weight.split(length, dim))
    )
    parts = [part.narrow(dim, index * length, extent) for index, part in enumerate(whole)]
    return sum(parts[1:], parts[0])


def _deform_conv2d(
    x: Tensor,
    weight: Tensor,
    offset: Tensor,
    mask: Tensor,
    bias: Tensor,
    stride_h: int,
    stride_w: int,
    pad_h: int,
    pad_w: int,
    dilation_h: int,
    dilation_w: int,
    groups: int,
    offset_groups: int,
    use_mask: bool,
) -> Tensor:
    """Gather the four neighbours of each sample, weigh them, and convolve them by a kernel of 1x1.

    The map has a border of zeros: samples outside of it are 0, as in torchvision.
    """
    batch, _, height, width = x.shape
    *_, rows, columns = weight.shape
    *_, below, across = offset.shape
    cells, samples = (height + 2) * (width + 2), rows * columns * below * across
    sets = batch * offset_groups  # of a map and its samples
    offset = offset.reshape(sets, rows * columns, 2, below, across)

    def locate(axis: int, kernel: int, number: int, stride: int, pad: int, dilation: int) -> Tensor:
        """Return where samples are on an axis of the map with its border."""
        steps = torch.arange(kernel, dtype=x.dtype) * dilation + 1 - pad
        starts = torch.arange(number, dtype=x.dtype) * stride
        shape = ((kernel, 1), (1, kernel))[axis], ((number, 1), (1, number))[axis]
        first = steps.reshape(shape[0]).expand(rows, columns).reshape(1, -1, 1, 1)
        return offset[:, :, axis] + (first + starts.reshape(shape[1]))

    y = locate(0, rows, below, stride_h, pad_h, dilation_h)
    z = locate(1, columns, across, stride_w, pad_w, dilation_w)
    padded = F.pad(x, (1, 1, 1, 1)).reshape(sets, -1, cells)
    table = padded.permute(0, 2, 1).reshape(sets * cells, -1)
    starts = (torch.arange(sets) * cells).reshape(-1, 1, 1, 1)
    total: Any = 0
    for low, share_y in ((y.floor(), 1 - (y - y.floor())), (y.floor() + 1, y - y.floor())):
        row = low.clamp(0, height + 1)
        for left, share_z in ((z.floor(), 1 - (z - z.floor())), (z.floor() + 1, z - z.floor())):
            column = left.clamp(0, width + 1)
            index = row.long() * (width + 2) + column.long() + starts
            share = (share_y * share_z).reshape(-1, 1)
            total = total + table.index_select(0, index.flatten()) * share
    if use_mask:
        total = total * mask.reshape(-1, 1)
    patches = total.reshape(sets, samples, -1).permute(0, 2, 1)
    patches = patches.reshape(batch, -1, below, across)
    return F.conv2d(patches, weight.reshape(len(weight), -1, 1, 1), bias, groups=groups)


Table = Mapping[Any, Callable[..., Any]]
COREML: Table = {
    aten.adaptive_avg_pool2d.default: _adaptive_avg_pool2d,
    aten.alias.default: lambda x: x,  # left by full-size slices
    aten.bitwise_or.Tensor: _bitwise_or,
    aten.linear.default: _linear,
}
PIECES: Table = {aten.conv2d.default: _conv2d, aten.linear.default: _linear}
LITERT: Table = {
    **PIECES,
    aten.bmm.default: _product,
    aten.linear.default: _linear_of_rows,
    aten.matmul.default: _product,
}
# ExecuTorch gives XNNPACK no maxima, means only over the last two of four axes, and no
# operators with several outputs.
EXECUTORCH: Table = {
    **COREML,
    **PIECES,
    aten.amax.default: _amax,
    aten.matmul.default: _matmul,  # without expanding
    aten.mean.dim: _mean,
    aten.split.Tensor: _split,  # of chunks
    aten.split_with_sizes.default: _split,
}


def with_torchvision(table: Table) -> dict[Any, Callable[..., Any]]:
    """Add torchvision's operators to a table, for runtimes that lack them."""
    if 'torchvision' not in sys.modules:  # it imports PyTorch's compiler
        return dict(table)
    return {**table, torch.ops.torchvision.deform_conv2d.default: _deform_conv2d}


@contextmanager
def operators_of_torchvision() -> Iterator[None]:
    """Let MMCV's deformable convolutions call torchvision's, which programs can hold."""
    names = 'mmcv.ops.deform_conv', 'mmcv.ops.modulated_deform_conv'
    with ExitStack() as stack:
        for name in names:
            if name in sys.modules:
                from mmcare import mmcv_ext  # which imports torchvision

                stack.enter_context(patch.object(sys.modules[name], 'ext_module', mmcv_ext))
        yield


class OneSize(TorchFunctionMode):
    """Let PyTorch's functions compute for one size of images while a network is exported.

    Pads that do nothing and copies are left out, and negative pads become slices.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function of PyTorch, or what stands for it."""
        kwargs = kwargs or {}
        if function is Tensor.contiguous:
            return args[0]
        if function is Tensor.view and len(args) > 1 and not isinstance(args[1], torch.dtype):
            return args[0].reshape(*args[1:])  # maybe of a copy that is left out
        if function is F.pad:
            result = _pad(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return function(*args, **kwargs)


def export_program(network: nn.Module, image: Tensor) -> ExportedProgram:
    """Export a network as it is, for one size of images; only what does nothing is left out."""
    with OneSize(), operators_of_torchvision():
        return torch.export.export(network, (image,))


def separate_weights(module: Any) -> None:
    """Give each operator its own copy of a weight that it shares, in place; files hold it once.

    XNNPACK's quantizer skips convolutions that share a weight, as those of heads for several
    levels do. ExecuTorch would quantize all their biases for the first one's input.
    """
    for node in module.graph.find_nodes(op='get_attr'):
        for user in [*node.users][1:]:
            with module.graph.inserting_before(user):
                copy = module.graph.node_copy(node)
            copy.target = copy.name
            module.register_buffer(copy.target, attrgetter(node.target)(module).clone())
            user.replace_input_with(node, copy)
