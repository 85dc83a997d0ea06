"""Every size and every tracer: maps as one would compute them by hand, laid out for mmcv."""

import pytest
import torch
from helpers import deviation, newer, thin_backbone

from mmcare.models import CARE

SIZES = [(64, 96), (50, 70), (33, 100), (41, 64)]


def image(height, width, batch=1):
    generator = torch.Generator().manual_seed(height + width)
    return torch.randn(batch, 3, height, width, generator=generator)


def exported(model, example):
    sides = [torch.export.Dim(name, min=33, max=4096) for name in ('height', 'width')]
    shapes = ({2: sides[0], 3: sides[1]},)
    return torch.export.export(model, (example,), dynamic_shapes=shapes).module()


def compiled(model, _):
    torch._dynamo.reset()
    return torch.compile(model, backend='aot_eager', fullgraph=True)


@pytest.mark.parametrize(
    ('trace', 'first'),
    [
        (torch.jit.trace, SIZES[0]),
        *(
            pytest.param(trace, first, marks=newer)
            for trace, first in (
                (exported, SIZES[0]),
                (exported, SIZES[1]),
                (compiled, SIZES[1]),
            )
        ),
    ],
)
@torch.no_grad()
def test_one_trace_for_every_size(trace, first):
    model = thin_backbone()
    traced = trace(model, image(*first))
    for size in SIZES:
        assert deviation(model(image(*size)), [*traced(image(*size))]) < 1e-4


ARGUMENTS = [{}, dict(out_norm_cfg=dict(type='LN')), dict(norm_cfg=dict(type='LN'))]


@pytest.mark.parametrize('arguments', ARGUMENTS, ids=str)
@pytest.mark.parametrize('size', SIZES[:2])
@torch.no_grad()
def test_layout(arguments, size):
    """Contiguous, never a view; channels-last if the images or the weights are."""
    model = thin_backbone(**arguments)
    plain, last = image(*size, 2), image(*size, 2).to(memory_format=torch.channels_last)
    for output in model(plain):
        assert output.is_contiguous() and output._base is None
        assert output.untyped_storage().nbytes() == 4 * output.numel()
    weights = thin_backbone(**arguments).to(memory_format=torch.channels_last)
    for network, images in ((model, last), (weights, plain)):
        for output, expected in zip(network(images), model(plain)):
            assert output.is_contiguous(memory_format=torch.channels_last)
            torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)


def test_an_empty_batch():
    """As a ResNet gives it: detectors of patches have images without patches."""
    shapes = [tuple(output.shape) for output in CARE('s0').eval()(image(64, 64, 0))]
    assert shapes == [(0, 32, 16, 16), (0, 64, 8, 8), (0, 128, 4, 4), (0, 1024, 2, 2)]
