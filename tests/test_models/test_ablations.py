"""The paper's ablations: they train and fold. Their costs: test_analysis.py."""

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


def test_structures():
    """What parameter counts alone would not show."""
    symmetric = CAREAblation('s2', decoupling='symmetric')
    for stage in (2, 3):  # as many heads as without, which are wider
        mixer = symmetric.stages[stage].blocks[0].mixer
        assert mixer.widths[0] == symmetric.arch['widths'][stage] // 2 == 2 * mixer.widths[1]
        assert mixer.widths[0] // mixer.global_learner.head_channels == 3
    for decoupling in ('stacked', 'global_only'):  # heads keep their width
        model = CAREAblation('s2', decoupling=decoupling)
        learners = [model.stages[stage].blocks[0].mixer.global_learner for stage in (2, 3)]
        assert [learner.head_channels for learner in learners] == [16, 32]
    attention = CAREAblation('s0', early_conv=False).stages[0].blocks[0].mixer.global_learner
    assert attention.head_channels == 1
    first, middle, last = (nn.Conv2d(2, 2, 1) for _ in range(3))
    mixer = StackedMixer(lambda x: (first(x),), middle, lambda x: (last(x),), 2, 1)
    x = torch.randn(1, 2, 3, 3)
    assert torch.equal(mixer(x), last(middle(first(x))))


@pytest.mark.parametrize(
    ('arguments', 'words'),
    [
        (dict(decoupling='both'), "decoupling must be one of .*'global_only'.*got 'both'"),
        (dict(decoupling='global_only', multi_scale=False), 'multi_scale must be True without a'),
        (dict(arch='s0', decoupling='symmetric', early_conv=False), 'two halves of 8 heads each'),
        (dict(arch={**THIN, 'widths': (9, 12, 24, 24)}, decoupling='stacked'), 'cannot share 9'),
    ],
)
def test_not_well_defined(arguments, words):
    with pytest.raises(ValueError, match=words):
        CAREAblation(**{'arch': THIN, **arguments})
