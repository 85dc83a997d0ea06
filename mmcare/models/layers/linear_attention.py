"""Linear attention over all positions of a map: Eq. 2 and 6 of the CARE paper."""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def normalized_linear_attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Linear attention with the kernel phi = ELU + 1, as the published weights have it.

    out = phi(q) (phi(k)^T v / N) / (phi(q) . mean_N phi(k) + 1e-6)

    Args:
        queries, keys, values: (B, heads, C, N), C channels a head and N positions.

    Returns:
        (B, heads, C, N).
    """
    queries, keys = F.elu(queries) + 1, F.elu(keys) + 1
    context = keys @ values.transpose(-2, -1) / keys.shape[-1]
    normalizer = keys.mean(dim=-1, keepdim=True)
    numerator = context.transpose(-2, -1) @ queries
    denominator = normalizer.transpose(-2, -1) @ queries
    return numerator / (denominator + 1e-6)


def plain_linear_attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Linear attention with phi = identity and no normaliser, as the paper's text has it (Eq. 2).

    out = q (k^T v) / N. Shapes as in :func:`normalized_linear_attention`.
    """
    context = keys @ values.transpose(-2, -1) / keys.shape[-1]
    return context.transpose(-2, -1) @ queries


FEATURE_MAPS = {'elu': normalized_linear_attention, 'identity': plain_linear_attention}


class LinearAttention(nn.Module):
    """Multi-head linear attention with projections for q and k only; the values are the input.

    The products run in float32 whatever the dtype of the input, autocast included: sums over
    thousands of positions, cubic in the activations, leave the range of float16.

    Args:
        channels: Width of the global features, d1.
        head_channels: Channels a head; heads are contiguous blocks of q, k and v alike.
        feature_map: ``'elu'`` or ``'identity'``, see :data:`FEATURE_MAPS`.
    """

    def __init__(self, channels: int, head_channels: int, feature_map: str = 'elu') -> None:
        super().__init__()
        self.head_channels = head_channels
        self.attend = FEATURE_MAPS[feature_map]
        self.query_key = nn.Conv2d(channels, 2 * channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C, H, W)."""
        queries, keys = self.query_key(x).chunk(2, dim=1)
        with autocast_off(x):
            attended = self.attend(*map(self._split_heads, (queries, keys, x)))
        return attended.reshape(x.shape).to(x.dtype)

    def _split_heads(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, heads, C / heads, H * W), in float32 at least."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        return x.reshape(x.shape[0], -1, self.head_channels, x.shape[2] * x.shape[3])


def autocast_off(x: Tensor) -> nullcontext | torch.autocast:
    """Suspend autocast where it is on; elsewhere leave the graph alone (some devices have none)."""
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()
