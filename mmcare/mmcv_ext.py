"""MMCV's compiled operators by torchvision, so that detectors train without compiling MMCV.

mmcv-lite has all of MMCV's Python files; only the compiled module ``mmcv._ext`` is missing::

    python -m mmcare.mmcv_ext           # writes mmcv/_ext.py, which imports this file
    python -m mmcare.mmcv_ext --remove  # deletes it, as pip does not: before mmcv-lite goes

An operator that this file lacks raises an error when it is called; docs/faq.md says which models
need such an operator. Operators work on all devices for which torchvision has them: CPU, CUDA, MPS.
"""

from __future__ import annotations

import argparse
from operator import itemgetter
from pathlib import Path
from typing import Any, Callable, Mapping

import mmcv
import torch
import torchvision
from torch import Tensor
from torch.nn.functional import one_hot
from torchvision.ops import deform_conv2d, roi_align

__all__ = ['__getattr__']  # all that mmcv/_ext.py needs
CONTENTS = """# `python -m mmcare.mmcv_ext --remove` deletes this file.
from mmcare.mmcv_ext import *
"""
COMPILE = (
    'needs MMCV with its compiled operators: python -m mmcare.mmcv_ext --remove, '
    'pip uninstall mmcv-lite, then '
    'MMCV_WITH_OPS=1 pip install --no-build-isolation mmcv==2.1.0'
)


def __getattr__(name: str) -> Callable[..., Any]:
    """Return an operator, or a stand-in that raises: MMCV asks for all operators on import."""
    if name in globals():  # asked for by mmcv/_ext.py
        return globals()[name]
    if name.startswith('_'):
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')

    def missing(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f'{name} is not an operator of torchvision, and {COMPILE}')

    return missing


def get_compiler_version() -> str:
    """Say in MMCV's report of the environment whose operators these are."""
    return f'none, operators of torchvision {torchvision.__version__}'


get_compiling_cuda_version = get_compiler_version


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float, offset: int) -> Tensor:
    """Return the indices (K,) of the boxes (N, 4) that are kept, by falling score.

    As in MMCV, boxes and scores can have different dtypes, which autocast causes. Among boxes with
    equal scores, the first in the order of PyTorch's sort is kept, not the first of the input.
    """
    if offset:
        raise NotImplementedError(f'nms with offset=1 {COMPILE}')
    dtype = torch.promote_types(boxes.dtype, scores.dtype)
    scores, order = scores.sort(0, descending=True)
    kept = torchvision.ops.nms(boxes[order].to(dtype), scores.to(dtype), iou_threshold)
    return order[kept]


read_options = itemgetter('spatial_scale', 'sampling_ratio', 'aligned')


def roi_align_forward(
    input: Tensor, rois: Tensor, output: Tensor, *argmax: Tensor, pool_mode: int, **options: Any
) -> None:
    """Fill output (K, C, h, w) with averages of input (N, C, H, W) in rois (K, 5): index, box."""
    if pool_mode == 0:
        raise NotImplementedError(f"roi_align with pool_mode='max' {COMPILE}")
    scale, ratio, aligned = read_options(options)
    output.copy_(roi_align(input, rois, output.shape[2:], scale, ratio, aligned))


def roi_align_backward(
    grad_output: Tensor, rois: Tensor, y: Tensor, x: Tensor, grad_input: Tensor, **options: Any
) -> None:
    """Fill grad_input (N, C, H, W)."""
    size = grad_output.shape[2:]
    scale, ratio, aligned = read_options(options)
    if torch.are_deterministic_algorithms_enabled():  # torchvision's own way on GPUs
        with torch.enable_grad():
            input = torch.zeros_like(grad_input, requires_grad=True)  # RoIAlign is linear in it
            output = roi_align(input, rois, size, scale, ratio, aligned)
        (gradient,) = torch.autograd.grad(output, input, grad_output)
    else:
        gradient = torch.ops.torchvision._roi_align_backward(
            grad_output, rois, scale, *size, *grad_input.shape, ratio, aligned
        )
    grad_input.copy_(gradient)


def sigmoid_focal_loss_forward(
    input: Tensor, target: Tensor, weight: Tensor, output: Tensor, gamma: float, alpha: float
) -> None:
    """Fill output (N, C) with the losses of logits (N, C); targets (N,) of C mean background."""
    if weight.numel():
        raise NotImplementedError(f'sigmoid_focal_loss with weight {COMPILE}')
    number = input.shape[1]
    targets = one_hot(target, number + 1)[:, :number].to(input.dtype)
    output.copy_(torchvision.ops.sigmoid_focal_loss(input, targets, alpha, gamma))


def sigmoid_focal_loss_backward(
    input: Tensor, target: Tensor, weight: Tensor, grad_input: Tensor, gamma: float, alpha: float
) -> None:
    """Fill grad_input (N, C) with the gradients of these losses."""
    with torch.enable_grad():
        logits = input.detach().requires_grad_()
        losses = torch.empty_like(logits)
        sigmoid_focal_loss_forward(logits, target, weight, losses, gamma, alpha)
    (gradient,) = torch.autograd.grad(losses, logits, torch.ones_like(losses))
    grad_input.copy_(gradient)


def read_pairs(options: Mapping[str, Any], *names: str) -> list[tuple[int, int]]:
    """Return the options of both axes, height first, by the names of the height's."""
    return [(options[name], options[name[:-1] + 'Ww'[name[-1] == 'h']]) for name in names]


def deform_conv_forward(
    input: Tensor,
    weight: Tensor,
    offset: Tensor,
    output: Tensor,
    *buffers: Tensor,
    **options: Any,
) -> None:
    """Fill output (N, C, H, W) with the deformable convolution of input (N, c, h, w)."""
    pairs = read_pairs(options, 'dH', 'padH', 'dilationH')
    output.copy_(deform_conv2d(input, offset, weight, None, *pairs))


def deform_conv_backward_input(
    input: Tensor,
    offset: Tensor,
    grad_output: Tensor,
    grad_input: Tensor,
    grad_offset: Tensor,
    weight: Tensor,
    *buffers: Tensor,
    **options: Any,
) -> None:
    """Fill grad_input and grad_offset."""
    pairs = read_pairs(options, 'dH', 'padH', 'dilationH')
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (input, offset)]
        output = deform_conv2d(*leaves, weight.detach(), None, *pairs)
    gradients = torch.autograd.grad(output, leaves, grad_output)
    grad_input.copy_(gradients[0])
    grad_offset.copy_(gradients[1])


def deform_conv_backward_parameters(
    input: Tensor,
    offset: Tensor,
    grad_output: Tensor,
    grad_weight: Tensor,
    *buffers: Tensor,
    scale: float,
    **options: Any,
) -> None:
    """Add the gradient, times scale, to grad_weight."""
    pairs = read_pairs(options, 'dH', 'padH', 'dilationH')
    with torch.enable_grad():
        weight = torch.zeros_like(grad_weight, requires_grad=True)  # the output is linear in it
        output = deform_conv2d(input.detach(), offset.detach(), weight, None, *pairs)
    (gradient,) = torch.autograd.grad(output, weight, grad_output)
    grad_weight.add_(gradient, alpha=scale)


def modulated_deform_conv_forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    ones: Tensor,
    offset: Tensor,
    mask: Tensor,
    output: Tensor,
    columns: Tensor,
    with_bias: bool,
    **options: Any,
) -> None:
    """Fill output (N, C, H, W) with the deformable convolution whose samples have weights, mask."""
    pairs = read_pairs(options, 'stride_h', 'pad_h', 'dilation_h')
    added = bias if with_bias else None
    output.copy_(deform_conv2d(input, offset, weight, added, *pairs, mask))


def modulated_deform_conv_backward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    ones: Tensor,
    offset: Tensor,
    mask: Tensor,
    columns: Tensor,
    grad_input: Tensor,
    grad_weight: Tensor,
    grad_bias: Tensor,
    grad_offset: Tensor,
    grad_mask: Tensor,
    grad_output: Tensor,
    with_bias: bool,
    **options: Any,
) -> None:
    """Fill the gradients; that of the bias only if there is one."""
    pairs = read_pairs(options, 'stride_h', 'pad_h', 'dilation_h')
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (input, offset, weight, mask)]
        output = deform_conv2d(*leaves[:3], None, *pairs, leaves[3])
    gradients = torch.autograd.grad(output, leaves, grad_output)
    for target, gradient in zip((grad_input, grad_offset, grad_weight, grad_mask), gradients):
        target.copy_(gradient)
    if with_bias:
        grad_bias.copy_(grad_output.sum((0, 2, 3)))


def main() -> None:
    """Put the file into the installed mmcv, or take it out again."""
    parser = argparse.ArgumentParser(prog='python -m mmcare.mmcv_ext', description=main.__doc__)
    parser.add_argument('--remove', action='store_true', help='delete mmcv/_ext.py')
    remove = parser.parse_args().remove
    path = Path(mmcv.__file__).with_name('_ext.py')
    compiled = [file for file in path.parent.glob('_ext.*') if file.suffix in ('.so', '.pyd')]
    if compiled and not remove:
        parser.exit(2, f'error: this MMCV has compiled operators, {compiled[0]}\n')
    if path.exists() and path.read_text(encoding='utf-8') != CONTENTS:
        parser.exit(2, f'error: {path} is not a file of mmcare\n')
    try:
        if not remove:
            path.write_text(CONTENTS, encoding='utf-8')
            print(
                f'{path} written: MMCV calls torchvision for nms, roi_align, the focal loss and '
                'deformable convolutions'
            )
        elif path.exists():
            path.unlink()
            print(f'{path} deleted')
        else:
            print(f'{path} does not exist')
    except OSError as error:
        parser.exit(2, f'error: {error}\n')


if __name__ == '__main__':
    main()
