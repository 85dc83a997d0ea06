"""Token mixers: decoupled features, Eq. 5-7 of the CARE paper, and the variants of Table 3."""

import torch
from torch import Tensor, nn


class DecoupledMixer(nn.Module):
    """Split the features, learn global and local information apart, put them together again.

    Args:
        global_learner: Long-range information from the first ``global_channels`` (d1).
        local_learner: Local inductive bias from the other ``local_channels`` (d2).
    """

    def __init__(
        self,
        global_learner: nn.Module,
        local_learner: nn.Module,
        global_channels: int,
        local_channels: int,
    ) -> None:
        super().__init__()
        self.split_widths = (global_channels, local_channels)
        self.global_learner = global_learner
        self.local_learner = local_learner

    def forward(self, features: Tensor) -> Tensor:
        """Map (B, d1 + d2, H, W) to (B, d1 + d2, H, W)."""
        global_features, local_features = features.split(self.split_widths, dim=1)
        return torch.cat(
            [self.global_learner(global_features), self.local_learner(local_features)], dim=1
        )


class StackedMixer(nn.Module):
    """Local, global and again local information, one after the other on all channels: Eq. 3.

    Args:
        local_learner1, global_learner, local_learner2: Keep the shape (B, C, H, W).
    """

    def __init__(
        self, local_learner1: nn.Module, global_learner: nn.Module, local_learner2: nn.Module
    ) -> None:
        super().__init__()
        self.local_learner1 = local_learner1
        self.global_learner = global_learner
        self.local_learner2 = local_learner2

    def forward(self, features: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C, H, W)."""
        return self.local_learner2(self.global_learner(self.local_learner1(features)))


class GlobalMixer(nn.Module):
    """Long-range information alone.

    Args:
        global_learner: Keeps the shape (B, C, H, W).
    """

    def __init__(self, global_learner: nn.Module) -> None:
        super().__init__()
        self.global_learner = global_learner

    def forward(self, features: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C, H, W)."""
        return self.global_learner(features)
