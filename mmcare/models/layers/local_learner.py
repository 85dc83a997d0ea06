"""Local inductive bias: LocalBias of Eq. 7, Eq. 14-16 of the CARE paper."""

import torch
from torch import Tensor, nn


def depthwise_conv(channels: int, kernel_size: int | tuple[int, int]) -> nn.Conv2d:
    """Return a depth-wise convolution, zero-padded so that it keeps height and width."""
    height, width = (kernel_size, kernel_size) if isinstance(kernel_size, int) else kernel_size
    return nn.Conv2d(
        channels, channels, (height, width), padding=(height // 2, width // 2), groups=channels
    )


class LocalLearner(nn.Module):
    """Depth-wise 3x3 on the first half of the channels, depth-wise 7x7 on the second.

    Two receptive fields at the cost of one convolution per channel: the decoupling of the paper,
    applied once more inside the local features (Eq. 14-16).

    Args:
        channels: Width of the local features, d2; even.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv3x3 = depthwise_conv(channels // 2, 3)
        self.conv7x7 = depthwise_conv(channels // 2, 7)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C, H, W)."""
        near, far = x.chunk(2, dim=1)
        return torch.cat([self.conv3x3(near), self.conv7x7(far)], dim=1)


class SingleScaleLearner(nn.Module):
    """Depth-wise 3x3 on all channels: the local learner without its second scale (Table 5).

    Args:
        channels: Width of the local features, d2.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv3x3 = depthwise_conv(channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C, H, W)."""
        return self.conv3x3(x)
