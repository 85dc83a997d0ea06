"""Build norms, and fuse batch norms in evaluation mode into convolutions."""

from __future__ import annotations

import torch
from mmcv.cnn import build_norm_layer
from mmengine.registry import MODELS
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrize import is_parametrized

from mmcare.registry import built_type


class LayerNorm2d(nn.LayerNorm):
    """Layer norm over the channels of a (B, C, H, W) map, position by position."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to the same shape."""
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def build_norm(norm_cfg: dict, channels: int) -> nn.Module:
    """Build a norm for (B, C, H, W) maps; ``'LN'`` becomes :class:`LayerNorm2d`."""
    if built_type(MODELS, norm_cfg) is nn.LayerNorm:
        norm_cfg = {**norm_cfg, 'type': LayerNorm2d}
    return build_norm_layer(norm_cfg, channels)[1]


def is_fixed(norm: nn.Module) -> bool:
    """Whether a norm is a batch norm in evaluation mode, which is affine in each channel."""
    return isinstance(norm, _BatchNorm) and not norm.training and norm.running_mean is not None


@torch.no_grad()
def fuse(conv: nn.Conv2d, norm: _BatchNorm, norm_first: bool) -> nn.Module:
    """Change the weights of a convolution so that it also computes the norm next to it.

    Args:
        conv: Has a bias; if the norm comes first, it has neither padding nor groups.
        norm: See :func:`is_fixed`.
        norm_first: True for ``conv(norm(x))``, False for ``norm(conv(x))``.

    Returns:
        The identity, which replaces the norm.
    """
    assert norm.running_mean is not None and norm.running_var is not None, 'see is_fixed'
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
