"""What exporters ask of any backbone: its name in a model, its maps, and exact fusing."""

import pytest
import torch
from helpers import thin_backbone
from torch import nn

from mmcare import CARE
from mmcare.deployment import (
    BackboneInfo,
    describe_backbone,
    find_backbone,
    prepare_backbone,
)
from mmcare.models.averaged_attention import AveragedAttention


class Plain(nn.Module):
    """Convolutions and norms; ``order`` is that of computation."""

    def __init__(self, order=('conv', 'norm', 'down', 'last')):
        super().__init__()
        self.order = order
        self.conv, self.norm = nn.Conv2d(3, 4, 3, 2, 1, bias=False), nn.BatchNorm2d(4)
        self.down, self.last = nn.Conv2d(4, 4, 2, 4), nn.BatchNorm2d(4)
        for norm in (self.norm, self.last):
            nn.init.normal_(norm.running_mean)
            nn.init.uniform_(norm.running_var, 0.5, 2)

    def forward(self, x):
        if x.shape[3] < 100:
            raise RuntimeError('too small')
        for name in self.order:
            x = getattr(self, name)(x)
        return [x[:, :, ::2, ::2], x.mean((2, 3))]


def norms_of(network):
    return [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]


def test_what_is_found_by_looking():
    described = describe_backbone(Plain())
    assert described == BackboneInfo('Plain', 3, ('stage1', 'stage2'), stride=16)
    with pytest.raises(ValueError, match=r'the Linear computes no images .*: mat1 and mat2'):
        describe_backbone(nn.Linear(5, 5))
    assert describe_backbone(Plain().double()) == described  # images are as the weights
    unpadded = nn.Sequential(nn.Conv2d(3, 4, 7, 4), nn.Conv2d(4, 4, 3, 2))  # 64 pixels become 7
    assert describe_backbone(unpadded).stride == 8


class Returns(nn.Conv2d):
    """A backbone that returns what a test says."""

    def forward(self, x):
        return self.pack(super().forward(x))


def test_backbones_that_return_more_than_tensors():
    backbone = Returns(3, 4, 2, 2)
    backbone.pack = lambda x: (None, x)
    assert describe_backbone(backbone).output_names == ('stage1',)
    backbone.pack = lambda x: ()
    with pytest.raises(ValueError, match='the Returns returns no tensors'):
        describe_backbone(backbone)


@pytest.mark.parametrize(
    ('order', 'left'),
    [
        (('conv', 'norm', 'down', 'last'), 0),
        (('conv', 'last', 'down', 'norm'), 2),  # not in the order of modules
        (('conv', 'norm', 'norm', 'down', 'last'), 2),  # a norm that is called twice
        (('conv', 'down', 'last', 'norm'), 2),
    ],
)
def test_norms_are_fused_where_that_changes_nothing(order, left):
    torch.manual_seed(0)
    network, image = Plain(order).eval(), torch.randn(1, 3, 128, 160)
    with torch.no_grad():
        expected = network(image)
        prepare_backbone(network, image)
        for before, after in zip(expected, network(image)):
            torch.testing.assert_close(after, before, rtol=0, atol=1e-5)
    assert len(norms_of(network)) == left


class Around(nn.Module):
    """A backbone that holds a CARE."""

    def __init__(self):
        super().__init__()
        self.care = thin_backbone().eval()

    def forward(self, x):
        return self.care(x)[::-1]


def test_parts_that_have_answers_of_their_own():
    network, image = Around().eval(), torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        expected = network(image)
        prepare_backbone(network, image)
        for before, after in zip(expected, network(image)):
            assert (before - after).abs().max() < 1e-5 * before.abs().max()
    assert network.care.deploy
    assert any(isinstance(module, AveragedAttention) for module in network.modules())


def test_the_name_of_the_backbone():
    detector, semi = nn.Module(), nn.Module()
    detector.backbone, detector.neck = Around(), nn.Identity()
    detector.backbone.backbone = nn.Identity()  # a part of it
    assert find_backbone(detector) == 'backbone'
    detector.teacher = nn.Module()
    detector.teacher.backbone = Plain()  # frozen, and not what is trained
    assert find_backbone(detector) == 'backbone'
    del detector.teacher
    assert find_backbone(CARE(thin_backbone().arch)) == ''
    semi.student, semi.teacher = detector, Plain()
    semi.teacher.backbone = Plain()
    assert find_backbone(semi) == 'student.backbone'
    with pytest.raises(ValueError, match='the Plain has no module named backbone; it has: conv, '):
        find_backbone(Plain())
    semi.student = nn.Identity()
    semi.other = detector
    words = 'several modules named backbone; it has: teacher.backbone, other.backbone'
    with pytest.raises(ValueError, match=words):
        find_backbone(semi)
