"""Counted parameters and multiply-adds: totals, parts, token mixers and the paper's tables."""

from pathlib import Path

import pytest
from mmengine.analysis import get_model_complexity_info

from mmcare.analysis import (
    build_from_config,
    build_model,
    build_network,
    compare_with_paper,
    count_complexity,
    count_mixer,
    mixer_terms,
    omega,
)
from mmcare.analysis.counting import PARTS
from mmcare.analysis.paper import PAPER_ROWS, Comparison
from mmcare.models import CARE

ROOT = Path(__file__).parents[2]
PARAMETERS = {'s0': 7_340_000, 's1': 9_602_424, 's2': 19_481_288}
BACKBONE_PARAMETERS = {'s0': 5_285_904, 's1': 7_548_328, 's2': 16_401_144}
GMACS = {
    ('s0', 224): 0.7206,
    ('s1', 224): 1.0324,
    ('s2', 224): 1.9275,
    ('s0', 512): 3.7563,
    ('s1', 512): 5.3852,
    ('s2', 512): 10.0573,
}
TINY = dict(
    depths=(1, 1, 2, 2),
    widths=(12, 12, 24, 24),
    memory_widths=(4, 4, 8, 8),
    expansions=((2, 2),) * 4,
    head_channels=(1, 1, 4, 8),
)
ABLATIONS = (
    dict(decoupling='symmetric'),
    dict(decoupling='stacked'),
    dict(decoupling='global_only'),
    dict(inter1=False),
    dict(inter2=False),
    dict(memory=False),
    dict(early_conv=False),
    dict(multi_scale=False),
)
CONFIG = """
custom_imports = dict(imports=['mmcare'], allow_failed_imports=False)
default_scope = {scope!r}
model = dict(
    type='Whatever',
    backbone=dict(
        type={kind!r}, arch='s0', init_cfg=dict(type='Pretrained', checkpoint='missing.pth')),
    neck=dict(type='GlobalAveragePooling'),
    head=dict(type='LinearClsHead', num_classes=10, in_channels=1024))
"""


def write_config(folder: Path, scope: str = 'mmpretrain', kind: str = 'mmcare.CARE') -> Path:
    path = folder / 'some_config.py'
    path.write_text(CONFIG.format(scope=scope, kind=kind))
    return path


# ------------------------------------------------------------ totals and parts


@pytest.mark.parametrize(
    ('arch', 'size'),
    [
        pytest.param(*case, marks=[pytest.mark.slow] if case[1] == 512 and case[0] != 's0' else [])
        for case in GMACS
    ],
)
def test_totals(arch, size):
    counted = count_complexity(build_network(arch), (size, size))
    assert counted.params == PARAMETERS[arch]
    assert round(counted.macs / 1e9, 4) == GMACS[arch, size]
    assert counted.total('params', stage='head') == PARAMETERS[arch] - BACKBONE_PARAMETERS[arch]


def test_without_head():
    counted = count_complexity(build_network('s2', head=False), (64, 64))
    assert counted.params == BACKBONE_PARAMETERS['s2']
    assert all(share.part != 'head' for share in counted.shares)


@pytest.mark.parametrize(
    'arguments', [{}, *ABLATIONS, dict(out_norm_cfg=dict(type='LN'), expand_last=False)], ids=str
)
def test_shares_sum_to_what_mmengine_counts(arguments):
    network = build_network(TINY, **arguments).eval()
    counted = count_complexity(network, (64, 96))
    info = get_model_complexity_info(network, (3, 64, 96), show_table=False, show_arch=False)
    assert counted.macs == info['flops']
    assert counted.params == info['params']
    for quantity in ('params', 'macs'):
        total = getattr(counted, quantity)
        assert sum(counted.total(quantity, part=part) for part in PARTS) == total
        stages = ('1', '2', '3', '4', 'head')
        assert sum(counted.total(quantity, stage=stage) for stage in stages) == total
    assert not [share for share in counted.shares if share.part == 'other']


def test_parts_by_hand():
    """CARE-S0 on 64 x 64: maps of 16 x 16, 8 x 8, 4 x 4 and 2 x 2."""
    counted = count_complexity(build_network('s0'), (64, 64))
    shares = {(one.stage, one.part): (one.params, one.macs) for one in counted.shares}
    # A 4x4 convolution of 3 channels, and batch norm at 2 an element.
    assert shares['1', 'stem'] == (32 * (48 + 1) + 2 * 32, 256 * 32 * (48 + 2))
    assert shares['2', 'downsampling'] == (
        2 * 32 + 64 * (4 * 32 + 1),
        256 * 2 * 32 + 64 * 64 * 4 * 32,
    )
    # Two blocks of 8 global and 16 local channels.
    assert shares['1', 'local'] == (2 * 8 * (9 + 1 + 49 + 1), 2 * 256 * 8 * (9 + 49))
    assert shares['1', 'global'] == (2 * 8 * (11 + 1) * 2, 2 * 256 * 8 * 22)
    # Two blocks: batch norm, 24 to 48 channels, 3x3 on these, and back.
    assert shares['1', 'Inter1'] == (
        2 * (2 * 24 + 48 * 25 + 48 * 10 + 24 * 49),
        2 * 256 * (2 * 24 + 2 * 24 * 48 + 48 * 9),
    )
    assert shares['4', 'layer scale'] == (3 * 256, 0)
    # Layer norm and linear, twice.
    assert shares['head', 'head'] == (2 * (2048 + 1_025_000), 2 * (5 * 1024 + 1_024_000))


def test_ablations_lose_their_part_alone():
    def parts(**arguments):
        counted = count_complexity(build_network(TINY, **arguments), (32, 32))
        return {(one.stage, one.part): one for one in counted.shares}

    whole = parts()
    without_inter1, one_scale = parts(inter1=False), parts(multi_scale=False)
    assert {key for key in whole if key not in without_inter1} == {
        (stage, 'Inter1') for stage in '1234'
    }
    assert all(without_inter1[key] == whole[key] for key in without_inter1)
    assert {key for key in whole if one_scale[key] != whole[key]} == {
        (stage, 'local') for stage in '1234'
    }


def test_the_network_is_left_as_it_was():
    network = build_network(TINY, frozen_stages=2).train()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    modes = [module.training for module in network.modules()]
    count_complexity(network, (32, 32))
    assert [module.training for module in network.modules()] == modes
    assert set(modes) == {True, False}
    assert all(value.equal(before[name]) for name, value in network.state_dict().items())


def test_padding_counts():
    network = build_network(TINY, head=False)
    assert count_complexity(network, (33, 64)).shares == count_complexity(network, (64, 64)).shares


# ------------------------------------------------------------ configs


def test_config_of_a_classifier_has_its_head(tmp_path):
    network = build_from_config(write_config(tmp_path))
    counted = count_complexity(network, (64, 64))
    head = [share for share in counted.shares if share.part == 'head']
    # Pooling is not counted, though mmengine has a rule for mmpretrain's way of writing it.
    assert [(share.params, share.macs) for share in head] == [(10_250, 10_240)]
    assert counted.params == BACKBONE_PARAMETERS['s0'] + 10_250
    alone = count_complexity(build_from_config(write_config(tmp_path), head=False), (64, 64))
    assert alone.shares == tuple(share for share in counted.shares if share.part != 'head')


def test_config_of_a_detector_has_the_backbone_alone(tmp_path):
    name, network = build_model(str(write_config(tmp_path, scope='mmdet')))
    assert name == 'some_config'
    assert count_complexity(network, (32, 32)).params == BACKBONE_PARAMETERS['s0']


@pytest.mark.parametrize(
    ('config', 'arch', 'head'),
    [('imagenet/care_s0_in1k', 's0', True), ('mask_rcnn/care_s1_coco', 's1', False)],
)
def test_shipped_configs_cost_what_their_archs_do(config, arch, head):
    name, network = build_model(str(ROOT / 'configs' / f'{config}.py'))
    by_config = count_complexity(network, (64, 64), name)
    assert by_config.shares == count_complexity(build_network(arch, head), (64, 64)).shares
    assert by_config.name == config.rpartition('/')[2]


@pytest.mark.parametrize(
    ('text', 'words'),
    [
        (CONFIG.format(scope='mmdet', kind='ResNet'), 'no CARE backbone.* and is ResNet'),
        ('model = dict(backbone=None)', 'no CARE backbone.* there is none'),
        ('value = 1', 'no CARE backbone.* there is none'),
        ('model = dict(', 'cannot be read as a config'),
        ('raise RuntimeError("broken")', 'cannot be read as a config .*broken'),
    ],
)
def test_bad_configs(text, words, tmp_path):
    (tmp_path / 'bad.py').write_text(text)
    with pytest.raises(ValueError, match=words):
        build_from_config(tmp_path / 'bad.py')


def test_bad_models(tmp_path):
    with pytest.raises(ValueError, match=r"'s3' is neither an arch \(s0, s1, s2\) nor the path"):
        build_model('s3')
    with pytest.raises(FileNotFoundError, match='there is no config'):
        build_model(str(tmp_path / 'missing.py'))


@pytest.mark.parametrize(
    ('shape', 'error'),
    [
        ((31, 64), ValueError),
        ((64, -64), ValueError),
        ((64.0, 64), TypeError),
        ((64,), TypeError),
        (64, TypeError),
        ((True, 64), TypeError),
    ],
)
def test_bad_shapes(shape, error):
    with pytest.raises(error, match='height and width'):
        count_complexity(build_network('s0'), shape)
    with pytest.raises(error, match='height and width'):
        mixer_terms('s0', 3, shape)


# ------------------------------------------------------------ omega and the network


@pytest.mark.parametrize('arch', ['s0', 's1', 's2'])
@pytest.mark.parametrize('stage', [3, 4])
def test_omega_and_the_network_term_by_term(arch, stage):
    shape = (64, 96)
    terms = mixer_terms(arch, stage, shape)
    zoo = CARE.arch_zoo[arch]
    d, depth = zoo['widths'][stage - 1], zoo['depths'][stage - 1]
    assert terms.heads == (3 if arch == 's2' else 2)
    assert (terms.height, terms.width) == {3: (4, 6), 4: (2, 3)}[stage]
    assert terms.omega == omega(terms.height, terms.width, d, d // 3, (3, 7), terms.heads)

    network = {term.name: term.network for term in terms.terms}
    counted = count_mixer(arch, stage, shape)
    plain = count_mixer(arch, stage, shape, feature_map='identity')
    assert counted['local'] == network['local, one pass']
    assert counted['projections'] == network['projections of q and k']
    assert plain['products'] == network['keys with values'] + network['queries with the result']
    assert counted['products'] - plain['products'] == network['normaliser'] == terms.normalizer
    assert counted['all'] == terms.network

    # The identity, with and without the normaliser.
    assert terms.network_by_omega == plain['all'] == counted['all'] - terms.normalizer

    # All blocks of the whole network cost the same.
    whole = count_complexity(build_network(arch, head=False), shape)
    mixers = [whole.total('macs', str(stage), part) for part in ('local', 'global')]
    assert sum(mixers) == depth * counted['all']


@pytest.mark.parametrize('stage', [0, 1, 2, 5, '3'])
def test_stages_without_attention(stage):
    with pytest.raises(ValueError, match=r'stage must be one of \(3, 4\)'):
        mixer_terms('s0', stage)
    with pytest.raises(ValueError, match=r'stage must be one of \(3, 4\)'):
        count_mixer('s0', stage)


# ------------------------------------------------------------ the paper


@pytest.mark.slow
def test_only_the_symmetric_row_differs_by_more_than_rounding():
    comparisons = compare_with_paper()
    assert len(comparisons) == 2 * len(PAPER_ROWS)
    differing = [one for one in comparisons if not one.explained_by_rounding]
    assert [(one.row.name, one.unit) for one in differing] == [('w/ Sym', 'GMACs')]
    (symmetric,) = differing
    assert symmetric.printed == '2.0'
    # Less than 0.051 apart, and yet beyond half of the last digit.
    assert 0.05 < -float(symmetric.difference) < 0.051
    assert 'we count 1.9494 GMACs, which rounds to 1.9; the paper prints 2.0' in (
        symmetric.in_words()
    )


@pytest.mark.parametrize(
    ('printed', 'counted', 'explained'),
    [
        ('2.0', 1_950_000_000, True),
        ('2.0', 1_949_999_999, False),
        ('2.0', 2_050_000_001, False),
        ('0.72', 724_999_999, True),
        ('0.72', 726_000_000, False),
        ('9.60', 9_594_000_000, False),
    ],
)
def test_rounding_goes_by_the_printed_digits(printed, counted, explained):
    comparison = Comparison(PAPER_ROWS[0], 'GMACs', printed, counted)
    assert comparison.explained_by_rounding is explained


def test_rounding_twice_is_said_only_where_it_would_do():
    once = Comparison(PAPER_ROWS[0], 'GMACs', '2.0', 1_900_000_000)
    twice = Comparison(PAPER_ROWS[0], 'GMACs', '2.0', 1_949_000_000)
    assert 'Rounded twice' not in once.in_words()
    assert 'Rounded twice, by way of 1.95' in twice.in_words()
