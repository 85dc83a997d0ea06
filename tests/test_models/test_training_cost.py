"""What saves memory and time in training: gradients, statistics, bytes kept, compilation."""

import pytest
import torch
from helpers import ROOT, THIN, newer, thin_backbone

from mmcare.models import CARE

ARCH = {**THIN, 'depths': (1, 2, 1, 2)}
WITH_CP = (False, True, 'activations')
OPTIONS = [dict(with_cp=cp, norm_eval=fixed) for fixed in (False, True) for cp in WITH_CP[1:]]


def outputs_and_gradients(model, image, autocast=False):
    """Outputs, and gradients of a random projection of them by parameter name."""
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)  # drop path
    with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
        outputs = model(image)
    sum((out * torch.randn(out.shape, generator=generator)).sum() for out in outputs).backward()
    return outputs, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize('options', OPTIONS, ids=str)
@pytest.mark.parametrize('autocast', [False, True])
def test_recomputation_keeps_gradients_and_statistics(options, autocast):
    """Drop path included; under autocast the same operations are rounded alike."""
    plain, model = (
        thin_backbone(arch=ARCH, drop_path_rate=0.5, **each).train()
        for each in (dict(norm_eval=options['norm_eval']), options)
    )
    image = torch.randn(4, 3, 96, 64)
    _, expected = outputs_and_gradients(plain, image, autocast)
    _, gradients = outputs_and_gradients(model, image, autocast)
    largest = max(gradient.abs().max() for gradient in expected.values())
    for name, gradient in gradients.items():
        assert gradient is not None and gradient.isfinite().all()
        assert (gradient - expected[name]).abs().max() <= 1e-5 * largest, name
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer)


def bytes_of_maps(size, **options):
    from training import bytes_kept

    model = thin_backbone(drop_path_rate=0.1, **options).train()
    return bytes_kept(model, torch.rand(2, 3, size, size), 'float32')


@newer
def test_what_is_kept_for_the_backward_pass(monkeypatch):
    """By hand: the latent maps after activation and depth-wise convolution.

    Differences of two sizes leave out what does not grow with the image.
    """
    monkeypatch.syspath_prepend(ROOT / 'benchmarks')  # where scripts find each other
    plain, again, cheap = (
        bytes_of_maps(128, with_cp=cp) - bytes_of_maps(64, with_cp=cp) for cp in WITH_CP
    )
    latent = 0
    for index, stage in enumerate(thin_backbone().stages):
        area = 2 * 4 * (128**2 - 64**2) // 4 ** (2 + index)  # batch, bytes, positions
        for inter in (stage.blocks[0].inter1, stage.blocks[0].inter2):
            latent += inter.expand.out_channels * area * (2 if inter.project else 1)
    assert plain - cheap == latent and again < 0.3 * plain


def assert_compiles(build, image):
    """As MMEngine's ``compile`` does it: one graph, in training and evaluation."""
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = build().train()
        if compiled:
            model.compile(backend='aot_eager', fullgraph=True)
        outputs, gradients = outputs_and_gradients(model, image)
        with torch.no_grad():
            predicted = model.eval()(image)
        found.append((outputs, gradients, dict(model.named_buffers()), predicted))
    torch._dynamo.reset()
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


@newer
@pytest.mark.parametrize('with_cp', WITH_CP)
def test_compiled(with_cp):
    build = lambda: thin_backbone(with_cp=with_cp, out_indices=(0, 2))  # noqa: E731
    assert_compiles(build, torch.randn(2, 3, 64, 64))


@pytest.mark.slow
@pytest.mark.parametrize(('arch', 'with_cp'), list(zip(CARE.arch_zoo, WITH_CP, strict=True)))
def test_released_networks_compiled(arch, with_cp):
    assert_compiles(lambda: CARE(arch, with_cp=with_cp), torch.randn(2, 3, 64, 64))
