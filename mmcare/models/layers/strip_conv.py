"""Long-range information where linear attention would be dear: stages 1 and 2."""

from torch import Tensor, nn

from mmcare.models.layers.local_learner import depthwise_conv


class StripConv(nn.Module):
    """Sum of a tall (11x1) and a wide (1x11) depth-wise convolution (Section 3.5 of the paper).

    Args:
        channels: Width of the global features, d1.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.vertical = depthwise_conv(channels, (11, 1))
        self.horizontal = depthwise_conv(channels, (1, 11))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C, H, W)."""
        return self.vertical(x) + self.horizontal(x)
