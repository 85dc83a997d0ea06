"""The two classification heads of the published networks, in plain PyTorch."""

import torch.nn.functional as F
from torch import Tensor, nn

NORM_EPS = 1e-6


class NormedLinear(nn.Module):
    """LayerNorm, then a linear classifier.

    Args:
        in_channels: Channels of the features, C.
        num_classes: Number of classes, K.
    """

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(in_channels, eps=NORM_EPS)
        self.fc = nn.Linear(in_channels, num_classes)

    def forward(self, features: Tensor) -> Tensor:
        """Map features (B, C) to logits (B, K)."""
        return self.fc(self.norm(features))


class TwoHeads(nn.Module):
    """Class head and distillation head on one map; mmpretrain's is in mmcare.classification.

    Args:
        in_channels: Channels of the map, C.
        num_classes: Number of classes, K. 0: no heads, the output is their input.
        pool: Pool the map and activate the features. False, without heads only: return the map.
        drop_rate: Dropout of the pooled features.

    Attributes:
        apart: Return the logits of both heads in training, not their mean.
    """

    def __init__(
        self, in_channels: int, num_classes: int, pool: bool = True, drop_rate: float = 0.0
    ) -> None:
        super().__init__()
        self.pool = pool
        self.apart = False
        self.drop = nn.Dropout(drop_rate)
        self.cls_head = NormedLinear(in_channels, num_classes) if num_classes else None
        self.distill_head = NormedLinear(in_channels, num_classes) if num_classes else None

    def forward(self, x: Tensor, pre_logits: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Map (B, C, H, W) to logits (B, K); with ``pre_logits`` to features (B, C)."""
        x = self.drop(F.gelu(x.mean((2, 3)))) if self.pool else x
        if self.cls_head is None or self.distill_head is None or pre_logits:
            return x
        logits, distilled = self.cls_head(x), self.distill_head(x)
        return (logits, distilled) if self.apart and self.training else (logits + distilled) / 2
