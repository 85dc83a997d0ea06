"""Folding: exact in evaluation mode, for evaluation only, and never mixed up with unfolded."""

from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from mmengine.hooks import EMAHook
from mmengine.registry import HOOKS as ROOT_HOOKS
from mmengine.runner.checkpoint import load_checkpoint
from published_reference import published_weights, reference_image
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from mmcare.checkpoint import CheckpointError, convert_checkpoint, from_published
from mmcare.engine import FoldBeforeTestHook
from mmcare.models import CARE
from mmcare.models.layers import (
    FoldedLinearAttention,
    LinearAttention,
    LocalLearner,
    fold_norm_conv,
    merge_local_kernels,
)

TINY = dict(
    depths=(1, 1, 1, 2),
    widths=(12, 12, 24, 24),
    memory_widths=(4, 4, 8, 8),
    expansions=((2, 2), (2, 3), (3, 2), (2, 4)),
    head_channels=(4, 4, 8, 8),
)
ABLATIONS = [
    {},
    dict(decoupling='symmetric'),
    dict(decoupling='stacked'),
    dict(decoupling='global_only'),
    dict(inter1=False),
    dict(inter2=False),
    dict(memory=False),
    dict(early_conv=False),
    dict(multi_scale=False),
    dict(expand_last=False),
    dict(feature_map='identity'),
    dict(decoupling='symmetric', inter1=False, memory=False, early_conv=False),
    dict(decoupling='stacked', inter2=False, multi_scale=False, expand_last=False),
    dict(decoupling='global_only', inter1=False, inter2=False, memory=False),
    dict(out_indices=(1,)),
    dict(out_norm_cfg=dict(type='BN')),
    dict(norm_cfg=dict(type='LN')),
    dict(norm_cfg=dict(type='BN', affine=False)),
]


def random_network(arch=TINY, **arguments):
    """A network in evaluation mode whose every weight and statistic matters."""
    network = CARE(arch, **arguments).eval()
    for module in network.modules():
        if isinstance(module, _BatchNorm):
            module.running_mean.normal_()
            module.running_var.uniform_(0.1, 4)
            if module.affine:
                nn.init.normal_(module.weight)
                nn.init.normal_(module.bias)
    for name, parameter in network.named_parameters():
        if name.endswith('gamma'):
            nn.init.normal_(parameter)
    return network


def fold(network):
    folded = deepcopy(network)
    folded.switch_to_deploy()
    return folded


@torch.no_grad()
def deviation(network, other, image):
    """Largest difference of two networks' maps, as a share of each map's largest magnitude."""
    pairs = list(zip(network(image), other(image), strict=True))
    assert all(expected.shape == found.shape for expected, found in pairs)
    return max(((a - b).abs().max() / a.abs().max()).item() for a, b in pairs)


def reference_network(arch):
    network = CARE(arch).eval()
    state = from_published(published_weights(arch))
    network.load_state_dict({k: v for k, v in state.items() if not k.startswith('head.')})
    return network


# ------------------------------------------------------------ exact


@pytest.mark.parametrize('arch', ['s0', 's1', 's2'])
def test_published_networks(arch):
    network = reference_network(arch)
    folded = fold(network)
    assert deviation(network, folded, reference_image(64, 96)) < 1e-5
    assert not any(isinstance(module, _BatchNorm) for module in folded.modules())
    again = deepcopy(folded.state_dict())
    folded.switch_to_deploy()
    assert again.keys() == folded.state_dict().keys()
    assert all(torch.equal(value, again[key]) for key, value in folded.state_dict().items())


@pytest.mark.parametrize('arguments', ABLATIONS, ids=str)
def test_ablations(arguments):
    network = random_network(**arguments)
    assert deviation(network, fold(network), torch.randn(2, 3, 70, 40)) < 1e-5


@pytest.mark.parametrize('value', [0.0, 1e-6])
def test_small_gamma(value):
    network = random_network()
    for name, parameter in network.named_parameters():
        if name.endswith('gamma'):
            nn.init.constant_(parameter, value)
    folded = fold(network)
    assert deviation(network, folded, torch.randn(1, 3, 64, 64)) < 1e-5
    assert all(parameter.isfinite().all() for parameter in folded.parameters())


def test_dtypes():
    """Reduced precision is as close as without folding; attention stays in float32."""
    network = random_network()
    for name, parameter in network.named_parameters():
        if name.endswith('gamma'):
            nn.init.uniform_(parameter, 0.1, 0.4)
    image = torch.randn(1, 3, 64, 64)
    folded = fold(network)
    with torch.no_grad():
        expected = network(image)
        for dtype, limit in ((torch.float16, 0.02), (torch.bfloat16, 0.1)):
            outputs = deepcopy(folded).to(dtype)(image.to(dtype))
            for a, b in zip(expected, outputs, strict=True):
                assert b.dtype == dtype
                assert (a - b).abs().max() < limit * a.abs().max()
        with torch.autocast('cpu', torch.bfloat16):
            outputs = folded(image)
        assert all(
            (a - b).abs().max() < 0.1 * a.abs().max()
            for a, b in zip(expected, outputs, strict=True)
        )


def test_a_folded_network_of_another_dtype_keeps_it():
    network = random_network().double()
    folded = fold(network)
    assert {p.dtype for p in folded.parameters()} == {torch.float64}
    assert deviation(network, folded, torch.randn(1, 3, 64, 64).double()) < 1e-12


def test_large_sums_in_attention():
    """float16 features at 800x1344 that the released order turns into NaN."""
    attention = LinearAttention(32, 16)
    nn.init.normal_(attention.query_key.weight, std=0.3)
    x = 20 * torch.randn(1, 32, 50, 84)
    with torch.no_grad():
        expected = attention(x)
        found = FoldedLinearAttention(attention).half()(x.half())
    assert (found - expected).abs().max() < 0.02 * expected.abs().max()


@pytest.mark.parametrize('arch', ['s0', 's2'])
def test_float16_only_attention_on_the_reference(arch):
    """Finite and within 1 % of float32 where all products are rounded to float16."""
    network = reference_network(arch)
    seen = []
    for module in network.modules():
        if isinstance(module, LinearAttention):
            module.register_forward_hook(lambda m, x, out: seen.append((m, x[0], out)))
    with torch.no_grad():
        network(reference_image(512, 512))
        assert len(seen) == sum(network.arch['depths'][2:])
        for attention, x, expected in seen[:: 3 if arch == 's0' else 5] + seen[-1:]:
            small = FoldedLinearAttention(deepcopy(attention), float16_only=True).half()
            found = small(x.half())
            assert found.dtype == torch.float16 and found.isfinite().all()
            assert (found - expected).abs().max() < 0.01 * expected.abs().max()
        # Where no query and no key is active, there is still no division by zero.
        nn.init.zeros_(small.query_key.weight)
        nn.init.constant_(small.query_key.bias, -40)
        assert (small(x.half()) == 0).all()


def test_merged_kernels():
    learner = LocalLearner(8)
    merged = merge_local_kernels(learner)
    x = torch.randn(2, 8, 5, 9)
    torch.testing.assert_close(merged(x), learner(x))
    assert merged.kernel_size == (7, 7) and merged.groups == 8


def test_no_norm_in_front_of_padding():
    with pytest.raises(ValueError, match='it pads'):
        fold_norm_conv(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1))


# ------------------------------------------------------------ for evaluation only


def test_training_mode_is_refused():
    network = CARE(TINY)
    with pytest.raises(RuntimeError, match=r'in training mode.*call eval\(\) first'):
        network.switch_to_deploy()
    assert not network.deploy and hasattr(network.stem, 'norm')


def test_a_folded_network_does_not_train():
    network = fold(random_network(with_cp=True))
    model = nn.Sequential(network)
    with pytest.raises(RuntimeError, match=r'is folded .* cannot be trained; build it with'):
        model.train()
    assert not network.training
    assert not any(parameter.requires_grad for parameter in network.parameters())
    assert not CARE(TINY, deploy=True, frozen_stages=1).training
    model.eval()


# ------------------------------------------------------------ weights


def test_folded_weights_into_a_folded_network(tmp_path):
    folded = fold(random_network())
    torch.save(
        dict(state_dict={f'backbone.{k}': v for k, v in folded.state_dict().items()}),
        tmp_path / 'folded.pth',
    )
    other = CARE(
        TINY, deploy=True, init_cfg=dict(type='Pretrained', checkpoint=f'{tmp_path}/folded.pth')
    )
    other.init_weights()
    assert all(
        torch.equal(value, other.state_dict()[key]) for key, value in folded.state_dict().items()
    )
    assert other.deploy
    with pytest.raises(CheckpointError, match='folded weights, which have no published form'):
        convert_checkpoint(tmp_path / 'folded.pth', tmp_path / 'published.pth')


def test_folded_and_unfolded_do_not_mix(tmp_path):
    plain, folded = CARE(TINY), CARE(TINY, deploy=True)
    with pytest.raises(CheckpointError, match=r'weights are folded .* build it with deploy=True'):
        plain.load_state_dict(folded.state_dict(), strict=False)
    with pytest.raises(CheckpointError, match='the weights are not: fold them first'):
        folded.load_state_dict(plain.state_dict(), strict=False)
    torch.save(published_weights('s0'), tmp_path / 'published.pth')
    with pytest.raises(CheckpointError, match='fold them first'):
        load_checkpoint(CARE('s0', deploy=True), str(tmp_path / 'published.pth'))
    with pytest.raises(CheckpointError, match=r'folded weights of CARE.*\n  multi_scale: the file'):
        CARE(TINY, deploy=True, multi_scale=False).load_state_dict(folded.state_dict())


# ------------------------------------------------------------ the hook


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = random_network()


def count_calls(runner_model, image):
    """How many batch norms work in a forward pass."""
    calls = []
    handles = [
        m.register_forward_hook(lambda *_: calls.append(1))
        for m in runner_model.modules()
        if isinstance(m, _BatchNorm)
    ]
    with torch.no_grad():
        outputs = runner_model.backbone(image)
    for handle in handles:
        handle.remove()
    return len(calls), outputs


def test_hook_folds_for_the_test_only():
    hook = ROOT_HOOKS.build(dict(type='mmcare.FoldBeforeTestHook'))
    assert isinstance(hook, FoldBeforeTestHook)
    model = Model().train()  # as mmengine leaves it before a test
    runner = SimpleNamespace(model=nn.ModuleDict(dict(module=model)))  # inside of a wrapper
    before = deepcopy(model.state_dict())
    image = torch.randn(1, 3, 64, 64)
    model.eval()
    norms, expected = count_calls(model, image)
    assert norms
    model.train()
    hook.before_test(runner)
    hook.before_test_epoch(runner)
    assert model.training and model.backbone.training
    model.eval()
    none, outputs = count_calls(model, image)
    assert none == 0
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-4)
    hook.after_test_epoch(runner)
    assert count_calls(model, image)[0] == norms
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    hook.before_val(runner)
    hook.before_val_epoch(runner)
    assert count_calls(model, image)[0] == norms


def test_hook_after_an_interrupted_test():
    model, hook = Model(), FoldBeforeTestHook()
    runner = SimpleNamespace(model=model)
    hook.before_test_epoch(runner)
    model.train()
    image = torch.randn(2, 3, 64, 64)
    model.backbone(image)[0].sum().backward()  # the network itself, with gradients
    assert model.backbone.stem.conv.weight.grad.abs().max() > 0
    model.eval()
    assert count_calls(model, image)[0] == 0
    hook.before_train(runner)
    assert count_calls(model, image)[0] > 0


def test_hook_works_with_averaged_weights():
    """The test uses them, and what is trained comes back unchanged."""
    model, ema = Model().eval(), EMAHook()
    runner = SimpleNamespace(model=model)
    ema.before_run(runner)
    hook = FoldBeforeTestHook()
    assert hook.priority == 'VERY_LOW' and ema.priority == 'NORMAL'
    averaged = ema.ema_model.module.backbone
    for parameter in averaged.parameters():
        parameter.data.mul_(0.5)
    before, image = deepcopy(model.state_dict()), torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        expected = averaged(image)
    ema.before_test_epoch(runner)
    hook.before_test_epoch(runner)
    norms, outputs = count_calls(model, image)
    assert norms == 0
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-4)
    ema.after_test_epoch(runner)
    hook.after_test_epoch(runner)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
