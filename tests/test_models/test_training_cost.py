"""What saves memory and time in training keeps gradients and statistics."""

import re

import pytest
import torch
from helpers import THIN, newer, thin_backbone

ARCH = {**THIN, 'depths': (1, 2, 1, 2)}
WITH_CP = (False, True, 'activations')
OPTIONS = [dict(with_cp=cp, norm_eval=fixed) for fixed in (False, True) for cp in WITH_CP[1:]]
OPTIONS += [dict(with_cp=cp, act_cfg=dict(type='SiLU', inplace=True)) for cp in WITH_CP[1:]]


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
def test_recomputation_gradients(options, autocast):
    """Drop path included; under autocast the same operations are rounded alike."""
    plain, model = (
        thin_backbone(arch=ARCH, drop_path_rate=0.5, **kwargs).train()
        for kwargs in (dict(options, with_cp=False), options)
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


@newer
@pytest.mark.parametrize('with_cp', WITH_CP)
def test_compiled(with_cp, monkeypatch):
    """As MMEngine's ``compile`` does it: one graph, in training and evaluation."""
    # PyTorch 2.11 cannot compile this function; 2.13 can.
    unknown = torch._dynamo.disable(torch.amp.is_autocast_available)
    monkeypatch.setattr(torch.amp, 'is_autocast_available', unknown)
    image, found = torch.randn(2, 3, 64, 64), []
    for compiled in (False, True):
        model = thin_backbone(with_cp=with_cp).train()
        if compiled:
            model.compile(backend='aot_eager', fullgraph=True)
        outputs, gradients = outputs_and_gradients(model, image)
        with torch.no_grad():
            predicted = model.eval()(image)
        found.append((outputs, gradients, dict(model.named_buffers()), predicted))
    torch._dynamo.reset()
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


def test_drop_path_skips_whole_samples():
    """What is kept is divided by its share."""
    model = thin_backbone(drop_path_rate=0.6)
    block = model.stages[2].blocks[0]
    state = torch.randn(64, 32, 4, 4)
    with torch.no_grad():
        update = block(state) - state
        block.training = True  # its norms are not
        found = block(state) - state
    kept = found.flatten(1).any(1)
    assert 0 < kept.sum() < 64 and block.drop_path_rate == pytest.approx(0.4)
    torch.testing.assert_close(found[kept], update[kept] / 0.6, rtol=1e-3, atol=1e-5)


@newer
def test_exported_operators():
    """Those of the released network: neither drop path nor the layout of training is among them."""
    found = []
    for rate in (0.0, 0.5):
        model = thin_backbone(drop_path_rate=rate).eval()
        program = torch.export.export(model, (torch.randn(1, 3, 64, 96),)).run_decompositions()
        nodes = program.graph.nodes
        found.append([str(node.target) for node in nodes if node.op == 'call_function'])
    assert found[0] == found[1]
    assert not [name for name in found[0] if re.search('clone|copy|dropout|bernoulli', name)]
