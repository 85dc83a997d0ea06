"""Norms, and how one with fixed statistics goes into the convolution beside it.

A batch norm in evaluation mode is an affine map of each channel, so that norm and convolution are
one convolution with other weights. These are computed in every forward pass, inside autograd
(:func:`norm_then_conv`, :func:`conv_then_norm`; the normalised map is not kept), or once
(:func:`fold_before`, :func:`fold_behind`). Both give the same numbers.
"""

from typing import TypeGuard

import torch
import torch.nn.functional as F
from mmcv.cnn import build_norm_layer
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class LayerNorm2d(nn.LayerNorm):
    """Layer norm over the channels of a (B, C, H, W) map, position by position."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to the same shape."""
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def build_norm(norm_cfg: dict, channels: int) -> nn.Module:
    """Build a norm for (B, C, H, W) maps; ``type='LN'`` becomes :class:`LayerNorm2d`."""
    if norm_cfg.get('type') == 'LN':
        norm_cfg = {**norm_cfg, 'type': LayerNorm2d}
    return build_norm_layer(norm_cfg, channels)[1]


def norm_then_conv(x: Tensor, norm: nn.Module, conv: nn.Conv2d) -> Tensor:
    """Return ``conv(norm(x))``; from one convolution where the norm's statistics are fixed.

    Args:
        x: (B, C, H, W).
        norm: Any module; merged if it is a batch norm in evaluation mode.
        conv: Without padding and groups, since zeros are padded behind the norm.
    """
    if is_fixed(norm) and _only_computes(norm, conv):
        return F.conv2d(x, *_merge_before(norm, conv), conv.stride)
    return conv(norm(x))


def conv_then_norm(x: Tensor, conv: nn.Conv2d, norm: nn.Module) -> Tensor:
    """Return ``norm(conv(x))``, see :func:`norm_then_conv`."""
    if is_fixed(norm) and _only_computes(norm, conv):
        return F.conv2d(x, *_merge_behind(conv, norm), conv.stride)
    return norm(conv(x))


def fold_before(norm: nn.Module, conv: nn.Conv2d) -> nn.Module:
    """Change the weights of ``conv`` so that it computes ``conv(norm(x))``.

    Returns:
        The module that replaces the norm: the identity, or the norm itself where it depends on its
        input (layer norm, training mode).
    """
    if not is_fixed(norm):
        return norm
    _set_weights(conv, *_merge_before(norm, conv))
    return nn.Identity()


def fold_behind(conv: nn.Conv2d, norm: nn.Module) -> nn.Module:
    """Change the weights of ``conv`` so that it computes ``norm(conv(x))``.

    Returns:
        The module that replaces the norm, see :func:`fold_before`.
    """
    if not is_fixed(norm):
        return norm
    _set_weights(conv, *_merge_behind(conv, norm))
    return nn.Identity()


def is_fixed(norm: nn.Module) -> TypeGuard[_BatchNorm]:
    """Whether a norm is an affine map of each channel: a batch norm in evaluation mode."""
    return (
        type(norm).forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward)
        and not norm.training
        and norm.running_mean is not None
    )


def _only_computes(norm: nn.Module, conv: nn.Module) -> bool:
    """Whether calling the two has no other effects: no hooks, fake quantization or wrappers."""
    return type(conv) is nn.Conv2d and not any(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        for module in (norm, conv)
    )


@torch.no_grad()
def _set_weights(conv: nn.Conv2d, weight: Tensor, bias: Tensor) -> None:
    assert conv.bias is not None, 'each convolution beside a norm has a bias here'
    conv.weight.copy_(weight)
    conv.bias.copy_(bias)


def _merge_before(norm: _BatchNorm, conv: nn.Conv2d) -> tuple[Tensor, Tensor]:
    """Weight and bias of ``conv(norm(x))``: W scale and b + sum(W shift)."""
    assert not any(conv.padding) and conv.groups == 1, f'a norm before {conv} cannot be merged'
    scale, shift, weight, bias = _wide(norm, conv)
    bias = bias + (weight * shift[:, None, None]).sum((1, 2, 3))
    weight = weight * scale[:, None, None]
    return weight.to(conv.weight.dtype), bias.to(conv.weight.dtype)


def _merge_behind(conv: nn.Conv2d, norm: _BatchNorm) -> tuple[Tensor, Tensor]:
    """Weight and bias of ``norm(conv(x))``: W scale and b scale + shift."""
    scale, shift, weight, bias = _wide(norm, conv)
    weight = weight * scale[:, None, None, None]
    return weight.to(conv.weight.dtype), (bias * scale + shift).to(conv.weight.dtype)


def _wide(norm: _BatchNorm, conv: nn.Conv2d) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scale and shift of the norm, weight and bias of the convolution, in float32 at least."""
    dtype = torch.promote_types(conv.weight.dtype, torch.float32)
    assert norm.running_mean is not None and norm.running_var is not None, 'see is_fixed'
    assert conv.bias is not None, 'each convolution beside a norm has a bias here'
    scale = (norm.running_var.to(dtype) + norm.eps).rsqrt()
    if norm.weight is not None:
        scale = scale * norm.weight.to(dtype)
    shift = -norm.running_mean.to(dtype) * scale
    if norm.bias is not None:
        shift = shift + norm.bias.to(dtype)
    return scale, shift, conv.weight.to(dtype), conv.bias.to(dtype)
