"""The attention of exported networks: the released one's results, also in pure float16."""

from copy import deepcopy

import pytest
import torch
from helpers import craft_heads, deviation, newer

from mmcare.models.averaged_attention import average_attention
from mmcare.models.backbones.care import LinearAttention

BIASES = (-25, -15, -9, -6, -3, 0, 30, 300, 2000)
LIMITS = {torch.float32: 1e-5, torch.float16: 3e-2}  # of float16 2.3e-2 was seen, at x = 500
SIZES = [(1, 1), (7, 9), (50, 84)]  # the last of stage 3 of an image of 800x1344


@pytest.mark.parametrize('heads', [1, None])
@pytest.mark.parametrize('parts', [('queries',), ('keys',), ('queries', 'keys')], ids=str)
@pytest.mark.parametrize('size', SIZES)
@pytest.mark.parametrize('dtype', [torch.float32, pytest.param(torch.float16, marks=newer)])
@torch.no_grad()
def test_both_forms(dtype, size, parts, heads):
    """Both in float64 agree; ELU + 1 itself is off by 1e-2 in float32 where it cancels."""
    for bias in BIASES:
        for channels, scale in (1, 1), (16, 1), (16, 100):
            attention = craft_heads(LinearAttention(32, channels), bias, parts, heads)
            x = scale * torch.randn(2, 32, *size)
            expected = deepcopy(attention).double()(x.double())
            averaged = deepcopy(attention).to(dtype)
            average_attention(averaged)
            found = averaged(x.to(dtype))
            assert found.dtype == dtype
            largest = expected.abs().max().clamp(min=torch.finfo(dtype).tiny)
            assert (found.double() - expected).abs().max() <= LIMITS[dtype] * largest


@pytest.mark.parametrize('dtype', [torch.float32, pytest.param(torch.float16, marks=newer)])
@torch.no_grad()
def test_queries_and_keys_that_never_meet(dtype):
    """Each is off where the other one is on: their products are far below float16."""
    attention = LinearAttention(32, 16)
    queries, keys = attention.query_key.bias.chunk(2)
    queries[:8], keys[8:] = -15, -15
    x = torch.randn(1, 32, 16, 16)
    expected = deepcopy(attention).double()(x.double())
    average_attention(attention.to(dtype))
    assert deviation([expected], [attention(x.to(dtype)).double()]) <= LIMITS[dtype]
