"""Folded parts of the network: the same maps in evaluation mode, from fewer operators.

What can be computed once goes into the weights: batch norms into the convolutions beside them, and
gamma into the 1x1 convolution that closes a block. Folded parts do not train.
"""

import math
from typing import TYPE_CHECKING, Self, TypeGuard, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mmcare.models.layers.interaction import ExpandingInteraction, Interaction
from mmcare.models.layers.linear_attention import (
    LinearAttention,
    autocast_off,
    normalized_linear_attention,
)
from mmcare.models.layers.local_learner import LocalLearner, depthwise_conv
from mmcare.models.layers.mixer import DecoupledMixer

if TYPE_CHECKING:  # which needs this module
    from mmcare.models.backbones.care import DualInteraction

EPS = 1e-6  # of normalized_linear_attention
# With phi scaled by 1 / (FLOAT16_SCALE sqrt(N)) the largest product of the three sizes, on the
# reference weights at 512x512, is 12,000 of float16's 65,504, and the smallest normaliser 0.03.
FLOAT16_SCALE = 16
FLOAT16_EPS = 2.0**-14  # float16's smallest normal number; below it hardware may flush to zero


class Foldable(nn.Module):
    """A network that can be folded: a mixin, first among the bases, with :meth:`_fold` to define.

    Attributes:
        deploy: Whether it is folded.
    """

    deploy = False

    def switch_to_deploy(self) -> None:
        """Fold, in place: the same outputs in evaluation mode, from fewer operators.

        What is folded does not train, and loads only weights of what was folded, too. Folding
        again changes nothing.

        Raises:
            RuntimeError: In training mode, in which there is nothing fixed to fold.
        """
        if self.deploy:
            return
        if self.training:
            raise RuntimeError(
                f'this {type(self).__name__} is in training mode, in which it cannot be folded '
                '(batch norms depend on the batch then, and each head has a loss of its own); '
                'call eval() first'
            )
        with torch.no_grad():
            self._fold()
        self.deploy = True
        self.eval()
        self.requires_grad_(False)

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode.

        Raises:
            RuntimeError: If what is folded is to train.
        """
        if mode and self.deploy:
            raise RuntimeError(
                f'this {type(self).__name__} is folded (deploy=True, or switch_to_deploy was '
                'called) and cannot be trained; build it with deploy=False, from weights that are '
                'not folded'
            )
        return super().train(mode)

    def _fold(self) -> None:
        """Put folded modules in place of what there is."""
        raise NotImplementedError


# ---------------------------------------------------------------- norms


def can_fold(norm: nn.Module) -> TypeGuard[_BatchNorm]:
    """Whether a norm is a fixed affine map of each channel in evaluation mode."""
    return isinstance(norm, _BatchNorm) and norm.running_mean is not None


def fold_conv_norm(conv: nn.Conv2d, norm: nn.Module) -> nn.Module:
    """Return one convolution for a convolution and the norm behind it.

    A norm that depends on its input (layer norm, say) stays: both are returned, in order.
    """
    if not can_fold(norm):
        return nn.Sequential(conv, norm)
    scale, shift = _affine(norm)
    weight = conv.weight.double() * scale[:, None, None, None]
    return _with_weights(conv, weight, _bias(conv) * scale + shift)


def fold_norm_conv(norm: nn.Module, conv: nn.Conv2d) -> tuple[nn.Module, nn.Conv2d]:
    """Fold a norm into the convolution behind it.

    Exact only without padding, since zeros are padded behind the norm.

    Returns:
        What is left of the norm (the identity, or the norm itself if it depends on its input),
        and the convolution.
    """
    if not can_fold(norm):
        return norm, conv
    if any(conv.padding) or conv.groups != 1:
        raise ValueError(f'a norm cannot be folded into {conv}: it pads, or has groups')
    scale, shift = _affine(norm)
    weight = conv.weight.double()
    bias = _bias(conv) + (weight * shift[:, None, None]).sum((1, 2, 3))
    return nn.Identity(), _with_weights(conv, weight * scale[:, None, None], bias)


def _affine(norm: _BatchNorm) -> tuple[Tensor, Tensor]:
    """Scale and shift (C,) of a batch norm in evaluation mode, in float64."""
    mean, variance = norm.running_mean, norm.running_var
    assert mean is not None and variance is not None, 'see can_fold'
    scale = (variance.double() + norm.eps).rsqrt()
    if norm.weight is not None:
        scale = scale * norm.weight.double()
    shift = -mean.double() * scale
    return scale, shift if norm.bias is None else shift + norm.bias.double()


def _bias(conv: nn.Conv2d) -> Tensor:
    """Bias (C,) of a convolution, in float64; zeros if it has none."""
    if conv.bias is None:
        return torch.zeros(conv.out_channels, dtype=torch.float64, device=conv.weight.device)
    return conv.bias.double()


def _with_weights(conv: nn.Conv2d, weight: Tensor, bias: Tensor) -> nn.Conv2d:
    """A convolution like another, with other weights, in the other's dtype."""
    folded = nn.Conv2d(
        conv.in_channels,
        conv.out_channels,
        cast('tuple[int, int]', conv.kernel_size),
        cast('tuple[int, int]', conv.stride),
        cast('tuple[int, int]', conv.padding),
        groups=conv.groups,
        device='meta',  # no random weights are drawn
    )
    folded.weight = nn.Parameter(weight.to(conv.weight.dtype), requires_grad=False)
    folded.bias = nn.Parameter(bias.to(conv.weight.dtype), requires_grad=False)
    return folded.train(conv.training)


# ---------------------------------------------------------------- attention


class FoldedLinearAttention(nn.Module):
    """:class:`LinearAttention` from two products instead of three, q and k activated together.

    A row of ones below the values makes the product of keys and values hold the sum of the keys,
    too; its product with the queries then is numerator and normaliser at once. N cancels.

    Args:
        attention: Gives weights, head width and feature map.
        float16_only: For targets without float32. The products then keep the dtype of the input,
            and phi is scaled so that they stay in float16's range, see :data:`FLOAT16_SCALE`. The
            scale cancels but for the 1e-6, which becomes ``FLOAT16_EPS``.
    """

    def __init__(self, attention: LinearAttention, float16_only: bool = False) -> None:
        super().__init__()
        self.head_channels = attention.head_channels
        self.normalized = attention.attend is normalized_linear_attention
        self.float16_only = float16_only
        self.query_key = attention.query_key

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C, H, W)."""
        query_key = self.query_key(x)
        with autocast_off(x):
            query_key, values = self._split_heads(query_key), self._split_heads(x)
            attend = self._attend_normalized if self.normalized else self._attend_plain
            attended = attend(query_key, values)
        return attended.reshape(x.shape).to(x.dtype)

    def _attend_normalized(self, query_key: Tensor, values: Tensor) -> Tensor:
        """Map q and k (B, 2 heads, C, N) and v (B, heads, C, N) to (B, heads, C, N)."""
        number = values.shape[-1]
        if self.float16_only:
            scale, eps = 1 / (FLOAT16_SCALE * math.sqrt(number)), FLOAT16_EPS
            activated = F.elu(query_key) * scale + scale
        else:
            eps = EPS * number
            activated = F.elu(query_key) + 1
        queries, keys = activated.chunk(2, dim=1)
        ones = torch.ones((*values.shape[:2], 1, number), dtype=values.dtype, device=values.device)
        context = torch.cat([values, ones], dim=2) @ keys.transpose(-2, -1)
        numerator, denominator = (context @ queries).split([self.head_channels, 1], dim=2)
        return numerator / (denominator + eps)

    def _attend_plain(self, query_key: Tensor, values: Tensor) -> Tensor:
        """Shapes as in :meth:`_attend_normalized`; 1 / N comes first for float16's sake."""
        queries, keys = query_key.chunk(2, dim=1)
        return values @ (keys * (1 / values.shape[-1])).transpose(-2, -1) @ queries

    def _split_heads(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C / head channels, head channels, H * W)."""
        if not self.float16_only:
            x = x.to(torch.promote_types(x.dtype, torch.float32))
        return x.reshape(x.shape[0], -1, self.head_channels, x.shape[2] * x.shape[3])


# ---------------------------------------------------------------- blocks


class FoldedBlock(nn.Module):
    """A block with its norms and its gamma in its convolutions.

    s + gamma (t + project(h)) becomes (s + gamma t) + project'(h) with gamma in project'. Gamma is
    never divided by: it may be 0.

    Args:
        block: A ``CAREBlock``, or the bare ``DualInteraction`` that ends the published networks.
            Its parts are taken over and changed.
    """

    def __init__(self, block: 'DualInteraction') -> None:
        super().__init__()
        self.mixer = block.mixer
        self.inter1 = fold_interaction(block.inter1)
        self.inter2 = fold_interaction(block.inter2)
        *memory_widths, self.width = block.split_widths
        self.memory_widths: list[int] = memory_widths
        for module in list(self.mixer.modules()):
            for name, child in module.named_children():
                if isinstance(child, LinearAttention):
                    setattr(module, name, FoldedLinearAttention(child))
        self.gamma: nn.Parameter | None = None
        gamma = getattr(block, 'gamma', None)  # a bare block has none
        if isinstance(gamma, Tensor):
            gamma = gamma.detach()
            self.gamma = nn.Parameter(gamma[:, None, None].clone(), requires_grad=False)
            if isinstance(self.inter2, Interaction):
                project, gamma = self.inter2.project, gamma.double()
                self.inter2.project = _with_weights(
                    project,
                    project.weight.double() * gamma[:, None, None, None],
                    _bias(project) * gamma,
                )
        self.train(block.training)

    def forward(self, state: Tensor) -> Tensor:
        """Map the state (B, d' + d, H, W) to the next one, or to what a bare block puts out."""
        learners = parallel_learners(self.mixer, self.width)
        split_widths = [*self.memory_widths, *(width for width, _ in learners)]
        parts = state.split(split_widths, dim=1)
        memory, groups = parts[: len(self.memory_widths)], parts[len(self.memory_widths) :]
        features = _concatenate(
            [learner(group) for (_, learner), group in zip(learners, groups, strict=True)]
        )
        mixed = _concatenate([*memory, self.inter1(features)])
        if self.gamma is None:
            return self.inter2(mixed)
        state = state + self.gamma * mixed
        return state + self.inter2.branch(mixed) if isinstance(self.inter2, Interaction) else state


def parallel_learners(mixer: nn.Module, width: int) -> list[tuple[int, nn.Module]]:
    """Channels and module of all that works side by side in a mixer of ``width`` channels."""
    if not isinstance(mixer, DecoupledMixer):
        return [(width, mixer)]
    global_channels, local_channels = mixer.split_widths
    local = mixer.local_learner
    local_learners: list[tuple[int, nn.Module]]
    if isinstance(local, LocalLearner):
        half = local_channels // 2
        local_learners = [(half, local.conv3x3), (half, local.conv7x7)]
    else:
        local_learners = [(local_channels, local)]
    return [(global_channels, mixer.global_learner), *local_learners]


def fold_interaction(interaction: nn.Module) -> nn.Module:
    """Fold the norm of an interaction into its first convolution, in place; return it."""
    if isinstance(interaction, ExpandingInteraction):
        interaction.norm, interaction.expand = fold_norm_conv(interaction.norm, interaction.expand)
    return interaction


def merge_local_kernels(learner: LocalLearner) -> nn.Conv2d:
    """Return one depth-wise 7x7 for a local learner: its 3x3 kernels get a margin of zeros.

    One operator instead of two (and no concatenation in a :class:`StackedMixer`) for 40 more
    multiply-adds a position in half of the channels: worth it where operators are dear.
    """
    near, far = learner.conv3x3, learner.conv7x7
    merged = depthwise_conv(near.out_channels + far.out_channels, 7)
    weight = torch.cat([F.pad(near.weight, (2, 2, 2, 2)), far.weight])
    return _with_weights(merged, weight.to(near.weight), torch.cat([_bias(near), _bias(far)]))


def _concatenate(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
