"""Folding: exact in evaluation mode, for evaluation only, and never mixed up with unfolded."""

from copy import deepcopy

import pytest
import torch
from helpers import THIN, published_weights, reference_image, thin_backbone
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from mmcare.models import CARE
from mmcare.weights.reading import CheckpointError


def fold(network):
    folded = deepcopy(network)
    folded.switch_to_deploy()
    return folded


def hook_on_every_norm_and_conv(network):
    """Let the plain form run: norms are not merged past hooks."""
    for module in network.modules():
        module.register_forward_hook(lambda *_: None)
    return network


@torch.no_grad()
def assert_same(network, other, image, atol=1e-5):
    for expected, found in zip(network(image), other(image), strict=True):
        assert (expected - found).abs().max() <= atol * expected.abs().max()


@pytest.mark.parametrize('arch', ['s0', 's1', 's2'])
def test_published_networks(arch):
    network = CARE(arch).eval()
    network.load_state_dict(published_weights(arch))
    folded = fold(network)
    assert_same(hook_on_every_norm_and_conv(network), folded, reference_image(64, 96))
    assert not any(isinstance(module, _BatchNorm) for module in folded.modules())
    again = deepcopy(folded)
    again.switch_to_deploy()
    assert all(map(torch.equal, again.state_dict().values(), folded.state_dict().values()))


@pytest.mark.parametrize(
    'arguments',
    [
        dict(expand_last=False),
        dict(out_indices=(1,)),
        dict(out_norm_cfg=dict(type='BN')),
        dict(norm_cfg=dict(type='LN')),
        dict(norm_cfg=dict(type='GN', num_groups=4)),
        dict(norm_cfg=dict(type='SyncBN')),
        dict(layer_scale_init_value=0.0),
    ],
    ids=str,
)
def test_arguments(arguments):
    network = thin_backbone(**arguments)
    folded = fold(network)
    assert_same(hook_on_every_norm_and_conv(network), folded, torch.randn(2, 3, 70, 40))
    for name, module in folded.named_modules():  # of the output norms alone is something left
        assert not isinstance(module, _BatchNorm) or name.startswith('out_norms.')


def test_the_dtype_stays():
    network = thin_backbone().double()
    assert_same(network, fold(network), torch.randn(1, 3, 64, 64).double(), 1e-12)


class Doubling(nn.Conv2d):
    """A stand-in for what quantization or adapters put in the place of a convolution."""

    def forward(self, x):
        return 2 * super().forward(x)


def test_replaced_layers_and_hooks_are_not_bypassed():
    """Merging a norm into a convolution leaves what hangs on calling them at work."""
    plain = thin_backbone()
    interaction = plain.stages[0].blocks[0].inter1
    seen, image = [], torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        expected = plain(image)
        handle = interaction.norm.register_forward_hook(lambda *_: seen.append(1))
        torch.testing.assert_close(plain(image), expected)
        handle.remove()
        assert seen == [1]
        conv = interaction.expand
        interaction.expand = Doubling(conv.in_channels, conv.out_channels, 1)
        interaction.expand.load_state_dict(conv.state_dict())
        assert not torch.allclose(plain(image)[0], expected[0])


def test_a_folded_network_does_not_train():
    model = nn.Sequential(fold(thin_backbone(with_cp=True)))
    with pytest.raises(RuntimeError, match='is folded'):
        model.train()
    assert not CARE(THIN, deploy=True, frozen_stages=1).training
    model.eval()


def test_folded_weights_fit_folded_networks_only():
    plain, folded = thin_backbone(), fold(thin_backbone())
    other = CARE(THIN, deploy=True)
    other.load_state_dict(folded.state_dict())
    assert_same(folded, other, torch.randn(1, 3, 64, 64), 0)
    with pytest.raises(CheckpointError, match=r'weights are folded .* build it\n? *with deploy=T'):
        plain.load_state_dict(folded.state_dict(), strict=False)
    with pytest.raises(CheckpointError, match='the weights are not: fold them first'):
        other.load_state_dict(plain.state_dict(), strict=False)
    without_norm_weights = CARE(THIN, norm_cfg=dict(type='IN'))
    with pytest.raises(CheckpointError, match='weights are folded'):
        without_norm_weights.load_state_dict(folded.state_dict(), strict=False)
    old = {k.replace('stem.conv', 'stem.folded_conv'): v for k, v in folded.state_dict().items()}
    for network in (plain, other):
        with pytest.raises(CheckpointError, match=r'1\.0\.0rc1.*fold again'):
            network.load_state_dict(old, strict=False)
