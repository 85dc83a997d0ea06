"""CARE's attention for export, written so that it stays within the range of float16."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from mmcare.models.backbones.care import LinearAttention


class AveragedAttention(nn.Module):
    """Compute :class:`LinearAttention` as an average of averages, in the dtype of the input.

    Channel c of a head averages the values over all positions, with weights phi(k_c). A position
    averages the results over the channels, with weights w_c = phi(q_c) max phi(k_c) mean(phi(k_c) /
    max phi(k_c)), and a zero with weight eps. The logarithm of phi(x) = exp(min(x, 0)) (1 + max(x,
    0)) is exact. All weights are divided by the largest, as in a softmax: the denominator is at
    least 1 / N, also where small numbers are flushed to zero, and nothing is larger than C or
    sqrt(W) times the largest value. Sums over positions are averages of rows: ARM's processors sum
    products in float16, where a sum of 4200 equal numbers stops halfway.

    In float16, results are off by at most 5e-3 of the largest output and 1e-3 of the largest value,
    for the same queries and keys. Where eps outweighs all heads, results may be 0. Queries
    and keys are also rounded to float16: its steps at 500 are 0.25, which is 28 % of exp(x).

    Args:
        attention: Its convolution is taken over.
    """

    def __init__(self, attention: LinearAttention) -> None:
        super().__init__()
        self.head_channels, self.eps = attention.head_channels, attention.eps
        self.query_key = attention.query_key
        self.train(attention.training)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, heads * C, H, W) to the same shape."""
        return self.attend(self.query_key(x), x).reshape(x.shape)

    def attend(self, query_key: Tensor, values: Tensor) -> Tensor:
        """Map (B, 2 * heads * C, H, W) and (B, heads * C, H, W) to (B, heads, C, H * W)."""
        # log(1 + x) <= x, so that this is x below 0, and log(1 + x) above.
        log_phi = torch.minimum(query_key, torch.log(query_key.relu() + 1.0))
        queries, keys = log_phi.chunk(2, dim=1)
        peaks = keys.amax((2, 3), keepdim=True)
        keys = torch.exp(keys - peaks)
        means = self.split_heads(keys.mean((2, 3), keepdim=True)).transpose(2, 3)
        queries = self.split_heads(queries + peaks)
        largest = queries.amax(2, keepdim=True).clamp(min=math.log(self.eps))  # (B, heads, 1, N)
        queries = torch.exp(queries - largest)
        rest = torch.exp(math.log(self.eps) - largest)
        values, keys = self.split_rows(values), self.split_rows(keys)
        batch, heads, height, channels, width = values.shape
        root = width**-0.5
        values, keys = (x.reshape(batch, heads * height, channels, width) for x in (values, keys))
        rows = torch.matmul(values * root, keys.transpose(2, 3)) * root
        rows = rows.reshape(batch, heads, height, channels**2).mean(2, keepdim=True)
        sums = rows.reshape(batch, heads, channels, channels)
        return torch.matmul(sums, queries) / (torch.matmul(means, queries) + rest)

    def split_heads(self, x: Tensor) -> Tensor:
        """Map (B, heads * C, H, W) to (B, heads, C, H * W)."""
        return x.reshape(x.shape[0], -1, self.head_channels, x.shape[2] * x.shape[3])

    def split_rows(self, x: Tensor) -> Tensor:
        """Map (B, heads * C, H, W) to (B, heads, H, C, W)."""
        shape = x.shape[0], -1, self.head_channels, *x.shape[2:]
        return x.reshape(shape).transpose(2, 3)


def average_attention(network: nn.Module) -> None:
    """Replace each :class:`LinearAttention` in a network by the averaged one.

    Raises:
        ValueError: If a subclass computes something else; the error names it.
    """
    for path, parent in [*network.named_modules()]:
        for name, module in parent.named_children():
            if not isinstance(module, LinearAttention):
                continue
            for method in ('forward', 'attend', 'split_heads'):
                if getattr(type(module), method) is not getattr(LinearAttention, method):
                    full = f'{path}.{name}'.lstrip('.')
                    raise ValueError(
                        f'{full} ({type(module).__name__}) cannot be exported: its {method} is not '
                        "LinearAttention's, and exports compute that one"
                    )
            setattr(parent, name, AveragedAttention(module))
