"""Build norms. What fuses them is in :mod:`mmcare.deployment`; its names stay here, too."""

from __future__ import annotations

from mmcv.cnn import build_norm_layer
from mmengine.registry import MODELS
from torch import Tensor, nn

from mmcare.deployment import check_fusible, fuse
from mmcare.deployment import is_fusible as is_fixed  # its name in 1.0
from mmcare.registry import built_type

__all__ = ['LayerNorm2d', 'build_norm', 'check_fusible', 'fuse', 'is_fixed']


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
