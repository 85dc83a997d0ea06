"""What saves memory and time in training: gradients, statistics, bytes kept, compilation."""

import sys

import pytest
import torch
from helpers import ROOT, THIN, thin_backbone
from torch.nn.modules.batchnorm import _BatchNorm

from mmcare.models import CARE

sys.path.insert(0, str(ROOT / 'benchmarks'))  # where scripts find each other

from training import bytes_kept

ARCH = {**THIN, 'depths': (1, 2, 1, 2)}
WITH_CP = (False, True, 'activations')
OPTIONS = [dict(with_cp=cp, norm_eval=fixed) for fixed in (False, True) for cp in WITH_CP]


def outputs_and_gradients(model, image, autocast=False):
    """Outputs, and gradients of a random projection of them by parameter name."""
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)  # drop path
    with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
        outputs = model(image)
    sum((out * torch.randn(out.shape, generator=generator)).sum() for out in outputs).backward()
    return outputs, {name: parameter.grad for name, parameter in model.named_parameters()}


def plain_form(norm_eval):
    """A network in training that neither computes again nor merges norms."""
    model = thin_backbone(arch=ARCH, drop_path_rate=0.5).train()
    for module in model.modules():
        module.register_forward_hook(lambda *_: None)  # which norms are not merged past
        if isinstance(module, _BatchNorm) and norm_eval:
            module.eval()
    return model


@pytest.mark.parametrize('options', OPTIONS, ids=str)
def test_options_keep_gradients_and_statistics(options):
    """Recomputation and merged norms give what the plain form gives, drop path included."""
    plain = plain_form(options['norm_eval'])
    model = thin_backbone(arch=ARCH, drop_path_rate=0.5, **options).train()
    image = torch.randn(4, 3, 96, 64)
    _, expected = outputs_and_gradients(plain, image)
    _, gradients = outputs_and_gradients(model, image)
    largest = max(gradient.abs().max() for gradient in expected.values())
    for name, gradient in gradients.items():
        assert gradient is not None and gradient.isfinite().all()
        assert (gradient - expected[name]).abs().max() <= 1e-5 * largest, name
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer)


@pytest.mark.parametrize('options', OPTIONS, ids=str)
def test_autocast_is_as_close_to_float32_with_all_options(options):
    """Merged weights are rounded once, in the end: rounded on the way they add half the error."""
    torch.manual_seed(0)
    image = torch.randn(4, 3, 96, 64)
    exact, plain = (
        outputs_and_gradients(plain_form(options['norm_eval']), image, autocast)[1]
        for autocast in (False, True)
    )
    model = thin_backbone(arch=ARCH, drop_path_rate=0.5, **options).train()
    _, gradients = outputs_and_gradients(model, image, autocast=True)
    if not options['norm_eval']:  # the same operations, rounded alike
        torch.testing.assert_close(gradients, plain, rtol=1e-5, atol=1e-5)
    errors = [
        torch.cat([(found[name] - exact[name]).flatten() for name in exact]).norm()
        for found in (gradients, plain)
    ]
    assert 0 < errors[0] <= 1.2 * errors[1]  # 0.9 to 1.06 over three images


def bytes_of_maps(size, **options):
    model = thin_backbone(drop_path_rate=0.1, **options).train()
    return bytes_kept(model, torch.rand(2, 3, size, size), 'float32')


def test_what_is_kept_for_the_backward_pass():
    """By hand: latent maps behind activation and depth-wise convolution; normalised maps.

    Differences of two sizes leave out what does not grow with the image, such as merged weights.
    """
    kept = [bytes_of_maps(128, **one) - bytes_of_maps(64, **one) for one in OPTIONS]
    plain, again, cheap, fixed, fixed_again, fixed_cheap = kept
    network, latent, normalised = thin_backbone(), 0, 0
    for index, stage in enumerate(network.stages):
        area = 2 * 4 * (128**2 - 64**2) // 4 ** (2 + index)  # batch, bytes, positions
        before = network.stem if index == 0 else stage.downsample
        normalised += before.norm.num_features * area * (1 if index == 0 else 4)
        for inter in (stage.blocks[0].inter1, stage.blocks[0].inter2):
            normalised += inter.norm.num_features * area
            latent += inter.expand.out_channels * area * (2 if inter.project else 1)
    assert plain - cheap == fixed - fixed_cheap == latent
    assert plain - fixed == cheap - fixed_cheap == normalised
    assert fixed_again < again < fixed_cheap and again < 0.3 * plain


def test_every_parameter_gets_a_gradient():
    model = thin_backbone(expand_last=False).eval()
    _, gradients = outputs_and_gradients(model, torch.randn(2, 3, 64, 64))
    assert all(gradient.abs().max() > 1e-5 for gradient in gradients.values())


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


@pytest.mark.parametrize('with_cp', WITH_CP)
def test_compiled(with_cp):
    build = lambda: thin_backbone(with_cp=with_cp, out_indices=(0, 2))  # noqa: E731
    assert_compiles(build, torch.randn(2, 3, 64, 64))


@pytest.mark.slow
@pytest.mark.parametrize(('arch', 'with_cp'), list(zip(CARE.arch_zoo, WITH_CP, strict=True)))
def test_released_networks_compiled(arch, with_cp):
    assert_compiles(lambda: CARE(arch, with_cp=with_cp), torch.randn(2, 3, 64, 64))
