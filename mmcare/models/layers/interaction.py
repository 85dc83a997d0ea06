"""The interaction block of the CARE paper, Eq. 13."""

from mmcv.cnn import build_activation_layer
from torch import Tensor, nn

from mmcare.models.layers.local_learner import depthwise_conv
from mmcare.models.layers.norm import build_norm


class ExpandingInteraction(nn.Module):
    """Norm, 1x1 convolution to the latent width, activation, depth-wise 3x3; no way back.

    The published networks end with this form: the classifier pools the latent channels.

    Args:
        channels: Width of the input.
        expansion: Latent width in multiples of ``channels``.
        norm_cfg: Config of the norm.
        act_cfg: Config of the activation.
    """

    def __init__(self, channels: int, expansion: int, norm_cfg: dict, act_cfg: dict) -> None:
        super().__init__()
        latent_channels = channels * expansion
        self.norm = build_norm(norm_cfg, channels)
        self.expand = nn.Conv2d(channels, latent_channels, 1)
        self.act = build_activation_layer(act_cfg)
        self.depthwise = depthwise_conv(latent_channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, expansion * C, H, W)."""
        return self.depthwise(self.act(self.expand(self.norm(x))))


class Interaction(ExpandingInteraction):
    """The whole interaction block: expanded, mixed, projected back and added to its input.

    Args:
        channels: Width of input and output.
        expansion: Latent width in multiples of ``channels``.
        norm_cfg: Config of the norm.
        act_cfg: Config of the activation.
    """

    def __init__(self, channels: int, expansion: int, norm_cfg: dict, act_cfg: dict) -> None:
        super().__init__(channels, expansion, norm_cfg, act_cfg)
        self.project = nn.Conv2d(channels * expansion, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C, H, W)."""
        return x + self.branch(x)

    def branch(self, x: Tensor) -> Tensor:
        """Compute what is added to the input, (B, C, H, W)."""
        return self.project(super().forward(x))
