"""The paper's complexity model, what is counted, the tool, and the picture."""

import runpy
from fractions import Fraction
from itertools import combinations

import cv2
import numpy as np
import pandas as pd
import pytest
from helpers import ROOT, run
from torch import nn

from mmcare.analysis import (
    build_network,
    compare_mixer,
    compare_with_paper,
    count_complexity,
    delta_limit,
    omega,
    omega_decoupled,
    paper,
    where_proposition_holds,
)
from mmcare.shipped import shipped_config

HW = dict(h=2, w=3)
KERNELS = [(3,), (7,), (3, 7)]
# Parameters and GMACs of each row of the paper's tables, both heads included.
COSTS = {
    ('imagenet/care_s0_in1k', 224): (7_340_000, 0.7206),
    ('imagenet/care_s1_in1k', 224): (9_602_424, 1.0324),
    ('imagenet/care_s2_in1k', 224): (19_481_288, 1.9275),
    ('imagenet/care_s0_in1k', 512): (7_340_000, 3.7563),
    ('imagenet/care_s1_in1k', 512): (9_602_424, 5.3852),
    ('imagenet/care_s2_in1k', 512): (19_481_288, 10.0573),
    ('ablation/care_s2_symmetric_in1k', 224): (19_661_984, 1.9494),
    ('ablation/care_s2_stacked_in1k', 224): (20_885_768, 2.0913),
    ('ablation/care_s2_global_only_in1k', 224): (20_674_088, 2.0438),
    ('ablation/care_s0_no_inter1_in1k', 224): (5_450_864, 0.4907),
    ('ablation/care_s0_no_inter2_in1k', 224): (2_668_448, 0.2740),
    ('ablation/care_s0_no_memory_in1k', 224): (5_400_648, 0.5196),
    ('ablation/care_s0_no_early_conv_in1k', 224): (7_340_544, 0.7211),
    ('ablation/care_s1_no_early_conv_in1k', 224): (9_603_240, 1.0332),
    ('ablation/care_s2_no_early_conv_in1k', 224): (19_482_104, 1.9283),
    ('ablation/care_s0_no_multi_scale_in1k', 224): (7_316_320, 0.7141),
    ('ablation/care_s1_no_multi_scale_in1k', 224): (9_569_464, 1.0231),
    ('ablation/care_s2_no_multi_scale_in1k', 224): (19_434_248, 1.9166),
}


# ---------------------------------------------------------------- the model


@pytest.mark.parametrize(
    ('equation', 'value', 'by_hand'),
    [
        # 2 * 9 * 6 * 5, 4 * 6 * 25 and 2 * 6 * 25
        (4, omega_decoupled(**HW, d1=5, d2=5, kernels=(3,)), 540 + 600 + 300),
        # 2 * 9 * 6 * 4, 4 * 6 * 4 and 2 * 6 * 4
        (8, omega_decoupled(**HW, d1=2, d2=4, kernels=(3,)), 432 + 96 + 48),
        # 9 * 6 * 8 and 3/2 * 6 * 16
        (9, omega(**HW, d=6, delta=2, kernels=(3,)), 432 + 144),
        # 1/2 * 6 * (9 + 49) * 8 and 3/2 * 6 * 16
        (17, omega(**HW, d=6, delta=2, kernels=(3, 7)), 1392 + 144),
        # 2 * 9 * 6 * 8, 4 * 6 * 16 and 2 * 6 * 16 / 2
        (23, omega_decoupled(**HW, d1=4, d2=8, kernels=(3,), heads=2), 864 + 384 + 96),
        # 9 * 6 * 16 and 5/4 * 6 * 64
        (24, omega(**HW, d=12, delta=4, kernels=(3,), heads=2), 864 + 480),
        # 1/2 * 6 * (9 + 49) * 16 and 5/4 * 6 * 64
        (27, omega(**HW, d=12, delta=4, kernels=(3, 7), heads=2), 2784 + 480),
    ],
)
def test_equations_by_hand(equation, value, by_hand):
    assert value == by_hand, f'Eq. {equation}'


@pytest.mark.parametrize('kernels', KERNELS, ids=str)
@pytest.mark.parametrize('heads', [1, 2, 3])
def test_differences_factor_as_in_the_paper(kernels, heads):
    """Eq. 10, 19, 26 and 29. Both sides are polynomials of degree 2 in D1 and D2."""
    c = 1 + Fraction(1, 2 * heads)
    square = Fraction(sum(k**2 for k in kernels), len(kernels))
    for d in (12, 24):
        for first, second in combinations(range(-d, d + 1, 4), 2):
            difference = omega(2, 3, d, first, kernels, heads) - omega(
                2, 3, d, second, kernels, heads
            )
            factors = square / c + first + second - 2 * d
            assert difference == c * 6 * (first - second) * factors


@pytest.mark.parametrize('kernels', KERNELS, ids=str)
@pytest.mark.parametrize('heads', [1, 2, 8])
def test_the_limit_against_the_definition(kernels, heads):
    for d in range(3, 60, 3):
        symmetric = omega(1, 1, d, 0, kernels, heads)
        for delta in (*range(1, d), d - Fraction(1, 10**6)):
            cheaper = omega(1, 1, d, delta, kernels, heads) < symmetric
            assert cheaper is (delta < delta_limit(d, kernels, heads))


def test_where_the_proposition_fails():
    """With a single 7x7 and d = 24 from D = 46/3 on, where both cost the same."""
    assert delta_limit(24, (7,)) == Fraction(46, 3)
    assert omega(1, 1, 24, Fraction(46, 3), (7,)) == omega(1, 1, 24, 0, (7,))
    assert omega(1, 1, 24, 15, (7,)) < omega(1, 1, 24, 0, (7,)) < omega(1, 1, 24, 16, (7,))
    table = where_proposition_holds()
    assert set(table['d']) == {24, 48, 96, 144, 192, 288}
    failing = table[~table['for all D']]
    assert set(zip(failing['d'], failing['kernels'], failing['heads'], strict=True)) == {
        (24, '7x7', 1),
        (24, '7x7', 8),
        (24, '3x3 and 7x7', 8),
    }
    assert list(table[~table['at own D']]['heads']) == [8]


# ---------------------------------------------------------------- what is counted


@pytest.mark.parametrize(('arch', 'heads'), [('s0', (2, 2)), ('s1', (2, 2)), ('s2', (3, 3))])
@pytest.mark.parametrize('stage', [3, 4])
def test_omega_and_the_counted_mixer(arch, heads, stage):
    """On 100 x 160, padded to 128 x 160: to the last multiply-add."""
    table = compare_mixer(arch, stage, (100, 160))
    positions = 8 * 10 // 4 ** (stage - 3)
    d1 = {'s0': 32, 's1': 32, 's2': 48}[arch] * 2 ** (stage - 3)
    omega_23 = omega_decoupled(1, positions, d1, 2 * d1, (3, 7), heads[stage - 3])
    assert (
        table['omega'].sum()
        == omega_23
        == omega(1, positions, 3 * d1, d1, (3, 7), heads[stage - 3])
    )
    assert table['counted'].sum() == (
        omega_23 - positions * (9 + 49) * d1 - 2 * positions * d1**2 + positions * d1
    )


@pytest.mark.parametrize(
    ('config', 'size'),
    [
        pytest.param(
            *case, marks=[pytest.mark.slow] if case[1] == 512 and 's0' not in case[0] else []
        )
        for case in COSTS
    ],
)
def test_costs_with_both_heads(config, size):
    pytest.importorskip('mmpretrain')
    total = count_complexity(build_network(shipped_config(config)), (size, size)).sum()
    assert (total['parameters'], round(total['macs'] / 1e9, 4)) == COSTS[config, size]


def test_one_figure_of_the_paper_differs(monkeypatch):
    """With the costs above in place of counting."""
    costs = {(shipped_config(name), size): cost for (name, size), cost in COSTS.items()}

    def count(config, shape):
        parameters, gmacs = costs[config, shape[0]]
        return pd.DataFrame(dict(parameters=[parameters], macs=[gmacs * 1e9]))

    monkeypatch.setattr(paper, 'build_network', lambda config: config)
    monkeypatch.setattr(paper, 'count_complexity', count)
    table = compare_with_paper()
    assert set(zip(table['config'], table['size'], strict=True)) == set(COSTS)
    assert list(table[~table['agree']]['config']) == ['ablation/care_s2_symmetric_in1k']


@pytest.mark.parametrize(('arch', 'params'), [('s0', 5_285_904), ('s2', 16_401_144)])
def test_without_heads(arch, params):
    table = count_complexity(build_network(arch, head=False), (32, 32))
    assert table['parameters'].sum() == params
    assert 'head' not in table.index.unique('part')


def test_parts_by_hand():
    """CARE-S0 on 64 x 64: maps of 16 x 16, 8 x 8, 4 x 4 and 2 x 2."""
    table = count_complexity(build_network('s0', head=False), (64, 64))
    parts = {place: (row.parameters, row.macs) for place, row in table.iterrows()}
    # A 4x4 convolution of 3 channels, and batch norm at 2 an element.
    assert parts['stage 1', 'stem'] == (32 * (48 + 1) + 2 * 32, 256 * 32 * (48 + 2))
    # Batch norm, and a 2x2 convolution from 32 to 64 channels.
    assert parts['stage 2', 'downsampling'] == (
        2 * 32 + 64 * (4 * 32 + 1),
        256 * 2 * 32 + 64 * 64 * 4 * 32,
    )
    # Two blocks of 8 global and 16 local channels.
    assert parts['stage 1', 'local'] == (2 * 8 * (9 + 1 + 49 + 1), 2 * 256 * 8 * (9 + 49))
    assert parts['stage 1', 'global'] == (2 * 8 * (11 + 1) * 2, 2 * 256 * 8 * 22)
    # Two blocks: batch norm, 24 to 48 channels, 3x3 on these, and back.
    assert parts['stage 1', 'Inter1'] == (
        2 * (2 * 24 + 48 * 25 + 48 * 10 + 24 * 49),
        2 * 256 * (2 * 24 + 2 * 24 * 48 + 48 * 9),
    )
    assert parts['stage 4', 'layer scale'] == (3 * 256, 0)
    assert 'other' not in table.index.unique('part')


def test_of_a_detector_the_backbone_is_counted(tmp_path):
    network = build_network(ROOT / 'configs/mask_rcnn/care_s0_coco.py')
    assert [name for name, _ in network.named_children()] == ['backbone']
    assert sum(parameter.numel() for parameter in network.parameters()) == 5_285_904
    (tmp_path / 'other.py').write_text("model = dict(backbone=dict(type='ReLU'))")
    with pytest.raises(ValueError, match='has no CARE backbone'):
        build_network(tmp_path / 'other.py')


def test_the_network_is_left_as_it_was():
    network = build_network('s0', head=False).train()
    count_complexity(network, (32, 32))
    assert network.training and all(module.training for module in network.modules())
    norm = network.get_submodule('backbone.stem.norm')
    assert isinstance(norm, nn.BatchNorm2d) and norm.num_batches_tracked == 0


# ---------------------------------------------------------------- the tool and the picture


def test_the_tool(tmp_path):
    tool = [ROOT / 'tools/complexity.py', 's0', '--no-head', '--omega', '--shape', 64, 96]
    printed = run('python', *tool, '--out-dir', tmp_path).stdout
    table = count_complexity(build_network('s0', head=False), (64, 96))
    for quantity in table:
        assert f'{table[quantity].sum():,}' in printed
        assert f'{table[quantity]["stage 3"].sum():,}' in printed
        assert f'{table[quantity].xs("Inter2", level="part").sum():,}' in printed
    written = pd.read_csv(tmp_path / 's0_64x96.csv', index_col=['stage', 'part'])
    pd.testing.assert_frame_equal(written, table)
    assert set(pd.read_csv(tmp_path / 'proposition.csv')['D below']) >= {'46/3'}
    assert {path.name for path in tmp_path.iterdir()} == {
        's0_64x96.csv',
        'omega_s0_stage3.csv',
        'omega_s0_stage4.csv',
        'proposition.csv',
    }


def test_the_picture(tmp_path, monkeypatch):
    """It says what the module tree says, and the one in the docs is up to date."""
    tool = runpy.run_path(str(ROOT / 'docs/draw_architecture.py'))
    words = []
    write = tool['Canvas'].write

    def keep(canvas, x, y, text, *arguments, **style):
        words.append(text)
        write(canvas, x, y, text, *arguments, **style)

    monkeypatch.setattr(tool['Canvas'], 'write', keep)
    tool['draw']('s2', 1, tmp_path / 's2.png')
    assert {'1536 x 7 x 7', '10 blocks', 'depth-wise conv 11x1 +\ndepth-wise conv 1x11'} <= {*words}
    tool['draw']('s0', 3, tmp_path / 's0.png')
    assert {'1024 x 7 x 7', '1,788,928 parameters', 'linear attention,\n2 heads of 16'} <= {*words}
    assert 'The first block of stage 3, opened: 219,488 parameters' in words
    assert {'stages.2.blocks.0', 'mixer.local_learner.conv7x7', 'conv\n1x1\n96\n→ 384'} <= {*words}
    drawn = cv2.imread(str(tmp_path / 's0.png'))
    shipped = cv2.imread(str(ROOT / 'docs/images/architecture.png'))
    # Versions of matplotlib differ in some pixels.
    assert np.mean(cv2.absdiff(drawn, shipped).max(axis=2) > 64) < 0.005
