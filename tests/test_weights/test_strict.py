"""Any model loads whole, or raises an error that names the weights."""

import copy

import pytest
import torch
from helpers import assert_equal, thin_backbone
from torch import nn

from mmcare.weights.names import of_backbone
from mmcare.weights.reading import CheckpointError
from mmcare.weights.strict import check_weights, load_strictly


def small_model():
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))


def test_a_model_without_a_check_of_its_own():
    source, model = small_model(), small_model()
    load_strictly(model, source.state_dict(), 'file.pth')
    assert_equal(model.state_dict(), source.state_dict())
    assert check_weights(model, {'a.0.bias': 1, 'b': 2}, 'a.', 'file.pth') == {'0.bias': 1}


@pytest.mark.parametrize(
    ('changes', 'words'),
    [
        ({'0.weight': None}, 'Missing.*0.weight'),
        ({'2.weight': torch.ones(1)}, 'Unexpected.*2.weight'),
        ({'0.weight': torch.ones(5, 3, 1, 1)}, r'size mismatch.*0.weight'),
        ({'1.running_var': torch.full((4,), float('inf'))}, 'not finite: 1.running_var'),
        ({'0.weight': torch.ones(4, 3, 1, 1).int()}, 'of another data type: 0.weight'),
        ({'0.bias': [1.0]}, 'not a dense tensor with values: 0.bias'),
    ],
    ids=['missing', 'unexpected', 'shape', 'infinite', 'integers', 'list'],
)
def test_what_does_not_fit(changes, words):
    state = {k: v for k, v in {**small_model().state_dict(), **changes}.items() if v is not None}
    with pytest.raises(CheckpointError, match=rf'file\.pth[\s\S]*{words}'):
        load_strictly(small_model(), state, 'file.pth')


def test_a_type_that_registers_a_check():
    """Its check may change weights; it is called for each module, in a model and alone."""

    class Doubled(nn.Linear):
        pass

    @check_weights.register(Doubled)
    def check(module, state, prefix, file):
        if f'{prefix}weight' not in state:
            raise CheckpointError(f'{file} has no {prefix}weight')
        return {'weight': 2 * state[f'{prefix}weight']}

    model = nn.Sequential(Doubled(2, 2), nn.Linear(2, 2))
    state = copy.deepcopy(model.state_dict())
    load_strictly(model, state, 'file.pth')
    assert_equal(model.state_dict(), {**state, '0.weight': 2 * state['0.weight']})
    del state['0.weight']
    with pytest.raises(CheckpointError, match=r'file\.pth has no 0\.weight'):
        load_strictly(model, state, 'file.pth')


def test_care_in_any_model():
    """A CARE's own check says more than PyTorch does, and adapts the channels of images."""
    state = {f'0.{key}': value for key, value in thin_backbone().state_dict().items()}
    load_strictly(nn.Sequential(thin_backbone(in_channels=1)), state, 'file.pth')
    with pytest.raises(CheckpointError, match=r'not in the model: 0\.stages\.3\.blocks\.0\.gamma'):
        wider = {**state, '0.stages.3.blocks.0.gamma': torch.ones(1)}
        load_strictly(nn.Sequential(thin_backbone()), wider, 'file.pth')


@pytest.mark.parametrize('names', [('conv1.weight', 'stages.0.weight'), ('stem.0.weight', 'fc.a')])
def test_backbone_of_a_model_and_alone(names):
    alone = dict.fromkeys(names, 0)
    model = {**{f'backbone.{name}': 0 for name in names}, 'neck.weight': 1, 'stem.weight': 1}
    assert of_backbone(alone) == of_backbone(model) == alone
