"""Fusing: exact in evaluation mode, for evaluation only, and never mixed up with plain."""

from copy import deepcopy

import pytest
import torch
from helpers import THIN, deviation, thin_backbone
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from mmcare.models import CARE


def fuse(network):
    fused = deepcopy(network)
    fused.switch_to_deploy()
    return fused


@pytest.mark.parametrize(
    'arguments',
    [
        dict(expand_last=False),
        dict(out_indices=(1,)),
        dict(out_norm_cfg=dict(type='BN')),
        dict(norm_cfg=dict(type='LN')),
        dict(norm_cfg=dict(type='GN', num_groups=4)),
        dict(norm_cfg=dict(type='SyncBN')),
        dict(layer_scale_init_value=0),
    ],
    ids=str,
)
def test_arguments(arguments):
    network = thin_backbone(**arguments).double()
    fused = fuse(network)
    image = torch.randn(2, 3, 70, 40).double()
    assert deviation(network(image), fused(image)) <= 1e-12
    for name, module in fused.named_modules():  # of the output norms alone is something left
        assert not isinstance(module, _BatchNorm) or name.startswith('out_norms.')
    torch.testing.assert_close(fuse(fused).state_dict(), fused.state_dict(), rtol=0, atol=0)


def test_a_fused_network_does_not_train():
    model = nn.Sequential(fuse(thin_backbone(with_cp=True)))
    with pytest.raises(RuntimeError, match='is fused'):
        model.train()
    assert not CARE(THIN, deploy=True, frozen_stages=1).training
    model.eval()


def test_fused_weights_fit_fused_networks_only():
    """By PyTorch's rules; files are in tests/test_weights."""
    plain, fused = thin_backbone(), fuse(thin_backbone())
    other = CARE(THIN, deploy=True)
    other.load_state_dict(fused.state_dict())
    image = torch.randn(1, 3, 64, 64)
    assert deviation(fused(image), other(image)) == 0
    without_norm_weights = CARE(THIN, norm_cfg=dict(type='IN'))
    for network in (plain, without_norm_weights):
        with pytest.raises(RuntimeError, match=r'Unexpected key.* in state_dict: .*"folded"'):
            network.load_state_dict(fused.state_dict())
    with pytest.raises(RuntimeError, match=r'Missing key.* in state_dict: "folded"'):
        other.load_state_dict(without_norm_weights.state_dict())
