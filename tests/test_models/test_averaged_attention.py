"""The attention of exported networks: the released one's results, also in pure float16."""

from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
from helpers import IS_NEW, craft_heads, newer
from torch.overrides import TorchFunctionMode

from mmcare.models.averaged_attention import AveragedAttention, average_attention
from mmcare.models.backbones.care import LinearAttention

BIASES = (-25, -15, -9, -6, -3, 0, 30, 300, 2000)
SMALL, LARGE = [(1, 1), (7, 9)], (50, 84)  # the last of stage 3 of an image of 800x1344
# Shares of the largest output and of the largest value. In float16, logarithms of 8 to 16 are
# rounded three times, each time by 2^-8 / sqrt(3) on average (4e-3 together); and values and sums
# by 2^-11.
LIMITS = {torch.float32: (1e-5, 0), torch.float16: (5e-3, 1e-3)}


class Float16(TorchFunctionMode):
    """Flush small numbers to zero, as some engines do, and sum products in float16, as ARM's do."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, torch.Tensor) or result.dtype != torch.float16:
            return result
        if func in (torch.bmm, torch.matmul):
            x, y = args
            result = sum(x[..., i : i + 1] * y[..., i : i + 1, :] for i in range(x.shape[-1]))
        return torch.where(result.abs() < torch.finfo(torch.float16).tiny, 0.0, result)


KINDS = [(torch.float32, nullcontext)]
KINDS += [(torch.float16, nullcontext), (torch.float16, Float16)] if IS_NEW else []


def compare(attention, x, engine):
    """Compare the averaged form with the released one in float64, both of rounded queries and keys.

    In float16 a query or key of -500 has steps of 0.25, and its exponential steps of a quarter, in
    any form.
    """
    averaged = AveragedAttention(deepcopy(attention).to(x.dtype))
    expected = attention.attend(averaged.query_key(x).double(), x.double()).reshape(x.shape)
    with engine():
        found = averaged(x)
    assert found.dtype == x.dtype
    of_output, of_values = LIMITS[x.dtype]
    limit = of_output * expected.abs().max() + of_values * x.abs().max()
    assert (found - expected).abs().max() <= limit + torch.finfo(torch.float32).tiny


@pytest.mark.parametrize('heads', [1, None])
@pytest.mark.parametrize('parts', [('queries',), ('keys',), ('queries', 'keys')], ids=str)
@pytest.mark.parametrize(
    ('dtype', 'engine', 'size'),
    [
        *((*kind, size) for kind in KINDS for size in SMALL),
        pytest.param(torch.float16, nullcontext, LARGE, marks=newer),
    ],
)
@torch.no_grad()
def test_both_forms(dtype, engine, size, parts, heads):
    for bias in BIASES:
        for channels, scale in (1, 1), (16, 1), (16, 100):
            attention = craft_heads(LinearAttention(32, channels), bias, parts, heads)
            compare(attention, (scale * torch.randn(2, 32, *size)).to(dtype), engine)


@pytest.mark.parametrize(('dtype', 'engine'), KINDS)
@torch.no_grad()
def test_queries_and_keys_that_never_meet(dtype, engine):
    """Each is off where the other one is on: their products are far below float16."""
    attention = LinearAttention(32, 16)
    queries, keys = attention.query_key.bias.chunk(2)
    queries[:8], keys[8:] = -15, -15
    compare(attention, torch.randn(2, 32, 16, 16).to(dtype), engine)


def test_subclasses():
    """Those that inherit the forward are replaced, and others are named."""
    inherits, computes = (type(name, (LinearAttention,), {}) for name in ('Inherits', 'Computes'))
    attention = inherits(32, 16).eval()
    network = torch.nn.Sequential(attention)
    average_attention(network)
    assert type(network[0]) is AveragedAttention and not network[0].training
    assert type(attention) is inherits and network[0].query_key is attention.query_key
    computes.attend = lambda self, query_key, values: values
    with pytest.raises(ValueError, match=r'^1 \(Computes\) .* its attend is not'):
        average_attention(torch.nn.Sequential(*network, computes(32, 16)))


@newer
@torch.no_grad()
def test_sums_over_many_positions():
    """Where maps are almost flat, a sum of 4200 numbers in float16 stops at half of them."""
    x = torch.randn(2, 32, 1, 1) + 0.2 * torch.randn(2, 32, 50, 84)
    compare(LinearAttention(32, 16), x.half(), Float16)
