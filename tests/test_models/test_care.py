"""The backbone: agreement with the released network, sizes, precision, training, arguments."""

import math
from copy import deepcopy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import (
    DATA,
    THIN,
    craft_heads,
    deviation,
    load_published,
    newer,
    reference_image,
    thin_backbone,
)
from torch.nn.modules.batchnorm import _BatchNorm

from mmcare.models import CARE
from mmcare.models.backbones.care import LinearAttention, phi

PARAMETERS = {'s0': 5_285_904, 's1': 7_548_328, 's2': 16_401_144}


@pytest.fixture(scope='module')
def s0():
    return load_published(CARE('s0'), 's0')


@pytest.mark.parametrize(
    ('arch', 'size'), [('s0', (224, 224)), ('s1', (96, 160)), ('s2', (96, 160))]
)
def test_reference_outputs(arch, size):
    reference = np.load(DATA / f'reference_{arch}_{size[0]}x{size[1]}.npz')
    with torch.no_grad():
        outputs = load_published(CARE(arch), arch)(reference_image(*size))
    for number, output in enumerate(outputs, 1):
        values = output.flatten()[reference[f'stage{number}_at'].astype(np.int64)].numpy()
        largest = reference[f'stage{number}_largest']
        assert np.abs(values - reference[f'stage{number}']).max() <= 1e-4 * largest
        assert output.abs().max() == pytest.approx(largest, rel=1e-4)


@pytest.mark.parametrize('variant', ['s0', 's1', 's2'])
def test_parameters_and_channels(variant):
    with torch.device('meta'):  # shapes only, as tools that count parameters ask for them
        model = CARE(variant)
        outputs = model(torch.empty(1, 3, 64, 96))
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[variant]
    wide, last = (192, 1536) if variant == 's2' else (128, 1024)
    assert model.out_channels == (32, 64, wide, last)
    assert tuple(output.shape[1] for output in outputs) == model.out_channels
    assert CARE(variant, expand_last=False).out_channels == (32, 64, wide, wide * 2)


@pytest.mark.parametrize('size', [(1, 1), (31, 33), (100, 224), (64, 96)])
def test_any_size_equals_padding_by_hand(size):
    model = thin_backbone()
    height, width = size
    image = torch.randn(2, 3, height, width)
    padded = F.pad(image, (0, -width % 32, 0, -height % 32))
    with torch.no_grad():
        outputs, expected = model(image), model(padded)
    assert len(outputs) == len(expected)
    for index, (output, other) in enumerate(zip(outputs, expected)):
        stride = 4 * 2**index
        shape = math.ceil(height / stride), math.ceil(width / stride)
        assert output.shape[2:] == shape
        torch.testing.assert_close(output, other[..., : shape[0], : shape[1]])


@pytest.mark.parametrize(
    ('dtype', 'share', 'size'),
    [
        pytest.param(torch.float16, 0.01, (800, 1344), marks=newer),
        (torch.bfloat16, 0.06, (224, 224)),  # 0.05 with PyTorch 2.0
        pytest.param(torch.bfloat16, 0.06, (800, 1344), marks=pytest.mark.slow),
    ],
)
def test_low_precision_stays_in_range(s0, dtype, share, size):
    """The released order of the attention's products overflows float16 on the large image."""
    image, low = reference_image(*size), deepcopy(s0)
    low.switch_to_deploy()
    with torch.no_grad():
        exact = s0(image)
        with torch.autocast('cpu', dtype):
            mixed = s0(image)
        low = low.to(dtype)(image.to(dtype))
    for outputs in (mixed, low):  # a value that is not finite would not be less either
        assert deviation(exact, [output.float() for output in outputs]) <= share


def test_initialisation():
    model = CARE('s0', drop_path_rate=0.5)
    model.init_weights()
    weight = model.stages[3].blocks[0].inter2.expand.weight
    assert weight.std().item() == pytest.approx(0.02, rel=0.02)
    for name, parameter in model.named_parameters():
        if name.endswith('bias'):
            assert not parameter.any(), name
        elif name.endswith('gamma'):
            assert (parameter == 1e-6).all(), name
        elif 'norm' in name:
            assert (parameter == 1).all(), name
    blocks = [block for stage in model.stages for block in stage.blocks]
    rates = [block.drop_path_rate for block in blocks[:-1]]
    assert rates == pytest.approx([0.5 * index / 17 for index in range(17)])
    assert [block.gamma is None for block in blocks] == [False] * 17 + [True]


@pytest.mark.parametrize('variant', ['s0', 's1', 's2'])
def test_start_from_scratch(variant):
    """No stage begins with maps that are much larger or smaller than an image's values."""
    model = CARE(variant, from_scratch=True)
    model.init_weights()
    for block in [block for stage in model.stages for block in stage.blocks][:-1]:
        assert (block.gamma == 0.1).all()
    with torch.no_grad():
        maps = model.train()(torch.randn(2, 3, 128, 160))
    assert all(0.1 < stage_map.std() < 10 for stage_map in maps)


@pytest.mark.parametrize('frozen_stages', [-1, 0, 2, 4])
def test_freezing(frozen_stages):
    model = CARE(THIN, frozen_stages=frozen_stages)
    # Also before train() is called: distributed wrappers ask once which parameters train.
    assert model.stem.conv.weight.requires_grad is (frozen_stages < 0)
    assert model.train() is model
    for index, part in enumerate([model.stem, *model.stages]):
        frozen = index <= frozen_stages
        assert part.training is not frozen
        assert all(parameter.requires_grad is not frozen for parameter in part.parameters())


@pytest.mark.parametrize('norm_eval', [True, False])
def test_norm_eval(norm_eval):
    model = CARE(THIN, norm_eval=norm_eval).train()
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    assert norms and all(norm.training is not norm_eval for norm in norms)
    assert model.stages[0].training and all(norm.weight.requires_grad for norm in norms)


def test_output_norms():
    model = thin_backbone(out_indices=(1, 3), out_norm_cfg=dict(type='LN', eps=1e-6))
    raw = thin_backbone(out_indices=(1, 3))
    raw.load_state_dict(model.state_dict(), strict=False)
    image = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        outputs, states = model(image), raw(image)
    expected = F.layer_norm(states[0].movedim(1, -1), (16,), eps=1e-6).movedim(-1, 1)
    torch.testing.assert_close(outputs[0], expected)


def test_layer_depth():
    model = CARE({**THIN, 'depths': (1, 1, 2, 2)})
    names = [name for name, _ in model.named_parameters()]
    depths = {name: model.get_layer_depth(f'backbone.{name}', 'backbone.') for name in names}
    assert depths['stem.conv.weight'] == (0, 8)
    assert depths['stages.2.downsample.conv.weight'] == (3, 8)
    assert depths['stages.2.blocks.1.gamma'] == (4, 8)
    assert depths['stages.3.blocks.1.inter2.expand.bias'] == (6, 8)
    assert model.get_layer_depth('head.fc.weight', 'backbone.') == (7, 8)
    assert {depth for depth, _ in depths.values()} == set(range(7))


@pytest.mark.parametrize('bias', [-5, -14, -16])
def test_attention_keeps_its_digits(bias):
    """Keys, or queries and keys, that training has moved far below zero, where ELU + 1 cancels."""
    x = torch.randn(2, 32, 16, 16)
    for parts in (('keys',), ('queries', 'keys')):
        attention = craft_heads(LinearAttention(32, 16), bias, parts, heads=None)
        expected = deepcopy(attention).double()(x.double())
        torch.testing.assert_close(attention(x).double(), expected, rtol=1e-4, atol=1e-5)


def test_gradients_of_phi():
    """Those of ELU + 1: 1 from 0 on, and exp(x) below, also far below."""
    x = torch.tensor([-100.0, -20.0, -1.0, -0.0, 0.0, 1.0, 100.0], requires_grad=True)
    phi(x).sum().backward()
    torch.testing.assert_close(x.grad, x.detach().clamp(max=0).exp(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ('arguments', 'words'),
    [
        (dict(arch='s3'), r"arch must be one of \['s0', 's1', 's2'\] or a dict, got 's3'"),
        (dict(arch={**THIN, 'depths': (1, 1, 1)}), 'arch must be a dict of .* 4 values each'),
        (dict(arch={**THIN, 'widths': (12, 12, 25, 24)}), r"arch\['widths'\].*multiples of 3"),
        (dict(arch={**THIN, 'head_channels': (1, 1, 3, 8)}), 'heads of 3 channels do not divide 8'),
        (dict(out_indices=(0, 4)), 'out_indices must be some of -4 to 3'),
        (dict(out_indices=(2, 1)), 'out_indices must be .*ascending'),
        (dict(drop_path_rate=1.0), r'drop_path_rate must be in \[0, 1\), got 1.0'),
        (
            dict(from_scratch=True, init_cfg=dict(type='Pretrained', checkpoint='care.pth')),
            'from_scratch must be False where init_cfg names a file, got True',
        ),
        (dict(frozen_stages=5), 'frozen_stages must be -1 to 4, got 5'),
        (dict(with_cp='some'), r"with_cp must be .*'activations'.*, got 'some'"),
    ],
)
def test_bad_arguments(arguments, words):
    with pytest.raises((ValueError, TypeError), match=words):
        CARE(**arguments)
