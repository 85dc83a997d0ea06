"""The ablations of the paper's Tables 3 to 5: structure, parameters, combinations."""

from itertools import product

import pytest
import torch
from torch import nn

from mmcare.checkpoint import ABLATION_DEFAULTS, convert_checkpoint, describe_backbone
from mmcare.models import CARE
from mmcare.models.layers import GlobalMixer, LinearAttention, SingleScaleLearner, StackedMixer

CLASSES = 1000
# Each row of Tables 3 to 5: parameters, the two heads included, and the channels they pool.
ROWS = {
    ('s2', 'decoupling', 'symmetric'): (19_661_984, 1536),
    ('s2', 'decoupling', 'stacked'): (20_885_768, 1536),
    ('s2', 'decoupling', 'global_only'): (20_674_088, 1536),
    ('s0', 'inter1', False): (5_450_864, 1024),
    ('s0', 'inter2', False): (2_668_448, 256),
    ('s0', 'memory', False): (5_400_648, 768),
    ('s0', 'early_conv', False): (7_340_544, 1024),
    ('s1', 'early_conv', False): (9_603_240, 1024),
    ('s2', 'early_conv', False): (19_482_104, 1536),
    ('s0', 'multi_scale', False): (7_316_320, 1024),
    ('s1', 'multi_scale', False): (9_569_464, 1024),
    ('s2', 'multi_scale', False): (19_434_248, 1536),
}
# Every combination can be built from it: widths divide by 12, and attention has one head.
SMALL = dict(
    depths=(1, 1, 1, 2),
    widths=(12, 12, 24, 24),
    memory_widths=(4, 4, 8, 8),
    expansions=((2, 2), (2, 3), (3, 2), (2, 4)),
    head_channels=(4, 4, 8, 8),
)
ONE = dict(head_channels=(1, 1, 1, 1))
VALUES = dict(
    decoupling=['asymmetric', 'symmetric', 'stacked', 'global_only'],
    **{name: [True, False] for name in ('inter1', 'inter2', 'memory', 'early_conv', 'multi_scale')},
)
COMBINATIONS = [
    dict(zip(VALUES, values, strict=True))
    for values in product(*VALUES.values())
    if not (values[0] == 'global_only' and values[-1] is False)
]


def count_parameters(module):
    return sum(parameter.numel() for parameter in module.parameters())


def count_heads(channels):
    """Parameters of two heads, each a layer norm and a linear layer."""
    return 2 * (2 * channels + (channels + 1) * CLASSES)


@pytest.mark.parametrize(('row', 'expected'), ROWS.items(), ids=lambda value: str(value))
def test_rows_of_the_paper(row, expected):
    arch, name, value = row
    parameters, channels = expected
    torch.manual_seed(0)
    model = CARE(arch, **{name: value}, layer_scale_init_value=0.1)
    model.init_weights()
    assert model.out_channels[-1] == channels
    assert count_parameters(model) + count_heads(channels) == parameters

    outputs = model(torch.randn(2, 3, 64, 96))
    assert tuple(output.shape[1] for output in outputs) == model.out_channels
    assert [tuple(output.shape[2:]) for output in outputs] == [
        (16, 24),
        (8, 12),
        (4, 6),
        (2, 3),
    ]
    sum(output.square().mean() for output in outputs).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), key


def test_every_combination(tmp_path):
    """Builds, trains, and its weights say what it is."""
    assert len(COMBINATIONS) == 7 * 16
    for arguments in COMBINATIONS:
        torch.manual_seed(1)
        model = CARE(SMALL, layer_scale_init_value=0.1, **arguments).train()
        outputs = model(torch.randn(2, 3, 64, 64))
        assert tuple(output.shape[1] for output in outputs) == model.out_channels, arguments
        sum((output * torch.randn_like(output)).sum() for output in outputs).backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        looks = describe_backbone(model.state_dict(), dict(small=SMALL))
        assert looks == dict(
            arch='small', in_channels=3, num_stages=4, expand_last=True, **arguments
        )


@pytest.mark.parametrize(
    'arguments',
    [dict(decoupling='symmetric'), dict(decoupling='stacked'), dict(inter2=False, memory=False)],
)
def test_conversion_of_an_ablation(arguments, tmp_path):
    model = CARE(SMALL, **arguments)
    torch.save(dict(state_dict=model.state_dict()), tmp_path / 'ours.pth')
    said = convert_checkpoint(tmp_path / 'ours.pth', tmp_path / 'published.pth')
    assert all(f'{name}={value!r}' in said for name, value in arguments.items())
    convert_checkpoint(tmp_path / 'published.pth', tmp_path / 'back.pth')
    other = CARE(
        SMALL,
        **arguments,
        init_cfg=dict(type='Pretrained', checkpoint=str(tmp_path / 'back.pth')),
    )
    other.init_weights()
    assert all(
        torch.equal(other.state_dict()[key], value) for key, value in model.state_dict().items()
    )


def test_old_checkpoints_unaffected():
    """Defaults and the arguments written out are the same network."""
    for arch in ('s0', 's1', 's2'):
        plain, explicit = CARE(arch).state_dict(), CARE(arch, **ABLATION_DEFAULTS).state_dict()
        assert {key: value.shape for key, value in plain.items()} == {
            key: value.shape for key, value in explicit.items()
        }


# ------------------------------------------------------------ structures


def test_symmetric_keeps_the_number_of_heads():
    asymmetric, symmetric = CARE('s2'), CARE('s2', decoupling='symmetric')
    for stage in (2, 3):
        heads = []
        for model in (asymmetric, symmetric):
            mixer = model.stages[stage].blocks[0].mixer
            channels = mixer.split_widths[0]
            heads.append(channels // mixer.global_learner.head_channels)
        assert heads == [3, 3]
        assert mixer.split_widths == (model.arch['widths'][stage] // 2,) * 2


def test_heads_keep_their_width_on_all_channels():
    for decoupling in ('stacked', 'global_only'):
        model = CARE('s2', decoupling=decoupling)
        for stage, width in ((2, 16), (3, 32)):
            learner = model.stages[stage].blocks[0].mixer.global_learner
            assert learner.head_channels == width
            assert learner.query_key.in_channels == model.arch['widths'][stage]


def test_stacked_mixer_is_local_global_local():
    learners = [nn.Conv2d(2, 2, 1) for _ in range(3)]
    x = torch.randn(1, 2, 3, 3)
    first, middle, last = learners
    assert torch.equal(StackedMixer(*learners)(x), last(middle(first(x))))
    assert torch.equal(GlobalMixer(middle)(x), middle(x))


def test_attention_instead_of_strips():
    model = CARE('s0', early_conv=False)
    for stage in (0, 1):
        for block in model.stages[stage].blocks:
            assert isinstance(block.mixer.global_learner, LinearAttention)
            assert block.mixer.global_learner.head_channels == 1


def test_single_scale():
    model = CARE('s0', multi_scale=False)
    learner = model.stages[3].blocks[0].mixer.local_learner
    assert isinstance(learner, SingleScaleLearner)
    assert learner.conv3x3.weight.shape == (128, 1, 3, 3)


def test_without_inter2_the_last_block_puts_out_the_concatenation():
    torch.manual_seed(2)
    model = CARE(SMALL, inter2=False).eval()
    block = model.stages[3].blocks[-1]
    assert not hasattr(block, 'gamma')
    state = torch.randn(1, 32, 4, 4)
    with torch.no_grad():
        output = block(state)
        expected = block.inter1(block.mixer(state[:, 8:]))
    assert torch.equal(output, torch.cat([state[:, :8], expected], dim=1))


def test_without_memory_the_state_is_the_features():
    torch.manual_seed(3)
    model = CARE(SMALL, memory=False).eval()
    block = model.stages[2].blocks[0]
    state = torch.randn(1, 24, 4, 4)
    with torch.no_grad():
        expected = state + block.gamma[:, None, None] * block.inter2(
            block.inter1(block.mixer(state))
        )
        assert torch.equal(block(state), expected)


# ------------------------------------------------------------ what is not well defined


@pytest.mark.parametrize(
    ('arguments', 'words'),
    [
        (dict(decoupling='both'), "decoupling must be one of .*'global_only'.*got 'both'"),
        (
            dict(decoupling='global_only', multi_scale=False),
            'multi_scale=False could change; leave multi_scale out',
        ),
        (dict(arch='s0', decoupling='symmetric', early_conv=False), '8 heads of stage 1 .* 12'),
        (
            dict(arch={**SMALL, 'widths': (12, 18, 24, 24), **ONE}, decoupling='symmetric'),
            r"divisible by 4, got arch\['widths'\] \(12, 18",
        ),
        (
            dict(arch={**SMALL, 'widths': (12, 9, 24, 24), **ONE}, decoupling='stacked'),
            'divisible by 2',
        ),
        (
            dict(arch={**SMALL, 'head_channels': (4, 4, 1, 8)}, decoupling='symmetric'),
            '8 heads of stage 3 .*choose other',
        ),
    ],
)
def test_not_well_defined(arguments, words):
    arch = arguments.get('arch', SMALL)
    with pytest.raises(ValueError, match=words):
        CARE(**{'arch': arch, **arguments})


def test_symmetric_without_multi_scale_takes_even_widths():
    arch = {
        **SMALL,
        'widths': (18, 18, 24, 24),
        'head_channels': (6, 6, 8, 8),
    }
    model = CARE(arch, decoupling='symmetric', multi_scale=False)
    assert model.stages[0].blocks[0].mixer.split_widths == (9, 9)
