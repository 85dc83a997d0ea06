"""Norms built from MM configs, all of them acting on (B, C, H, W)."""

from mmcv.cnn import build_norm_layer
from torch import Tensor, nn


class LayerNorm2d(nn.LayerNorm):
    """Layer norm over the channels of a (B, C, H, W) map, position by position."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C, H, W)."""
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def build_norm(norm_cfg: dict, channels: int) -> nn.Module:
    """Build a norm for (B, C, H, W) maps; ``type='LN'`` becomes :class:`LayerNorm2d`."""
    if norm_cfg.get('type') == 'LN':
        norm_cfg = {**norm_cfg, 'type': LayerNorm2d}
    return build_norm_layer(norm_cfg, channels)[1]
