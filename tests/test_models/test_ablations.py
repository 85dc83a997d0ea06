"""The paper's ablations: they train and fuse. Their costs: test_analysis.py."""

from itertools import product

import pytest
import torch
from helpers import THIN, thin_backbone
from torch import nn

from mmcare.models import CAREAblation
from mmcare.models.backbones.care_ablation import StackedMixer

VALUES = dict(
    decoupling=['asymmetric', 'symmetric', 'stacked', 'global_only'],
    **{name: [True, False] for name in ('inter1', 'inter2', 'memory', 'early_conv')},
)


@pytest.mark.parametrize('values', list(product(*VALUES.values())), ids=str)
def test_every_combination(values):
    multi_scale = values[0] == 'global_only' or sum(values[1:]) % 2 == 0  # half of those allowed
    arguments = dict(zip(VALUES, values), multi_scale=multi_scale)
    model = thin_backbone(CAREAblation, **arguments)
    outputs = model.train()(torch.randn(2, 3, 64, 64))
    assert tuple(output.shape[1] for output in outputs) == model.out_channels
    sum((output * torch.randn_like(output)).sum() for output in outputs).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    image = torch.randn(1, 3, 64, 32)
    with torch.no_grad():
        expected = model.eval()(image)
        model.switch_to_deploy()
        torch.testing.assert_close(model(image), expected)


def test_defaults_are_care():
    plain, ablation = thin_backbone(), thin_backbone(CAREAblation)
    ablation.load_state_dict(plain.state_dict())
    image = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(ablation(image), plain(image), rtol=0, atol=0)


def test_a_stacked_mixer():
    """Which order parameter counts alone would not show."""
    first, middle, last = (nn.Conv2d(2, 2, 1) for _ in range(3))
    mixer = StackedMixer(lambda x: (first(x),), middle, lambda x: (last(x),), 2, 1)
    x = torch.randn(1, 2, 3, 3)
    assert torch.equal(mixer(x), last(middle(first(x))))


@pytest.mark.parametrize(
    ('arguments', 'words'),
    [
        (dict(decoupling='both'), "decoupling must be one of .*'global_only'.*got 'both'"),
        (dict(arch='s0', decoupling='symmetric', early_conv=False), 'two halves of 8 heads each'),
    ],
)
def test_not_well_defined(arguments, words):
    with pytest.raises(ValueError, match=words):
        CAREAblation(**{'arch': THIN, **arguments})
