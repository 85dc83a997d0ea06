"""What is counted, and the tool."""

import pandas as pd
import pytest
import yaml
from helpers import ROOT, run_tool
from mmengine.analysis import get_model_complexity_info

from mmcare.analysis import build_network, compare_with_paper, count_complexity

# Parameters and GMACs of classifiers, both heads included.
LISTED = {
    model['Config']: model['Metadata']
    for folder in ('imagenet', 'ablation')
    for model in yaml.safe_load((ROOT / f'configs/{folder}/metafile.yml').read_text())['Models']
    if 'distill' not in model['Name']
}


@pytest.mark.parametrize(
    'config', [pytest.param(c, marks=[pytest.mark.slow] * ('s0_in1k' not in c)) for c in LISTED]
)
def test_costs(config):
    """In README.md with both heads, in metafile.yml as mmpretrain's get_flops.py counts."""
    pytest.importorskip('mmpretrain')
    network = build_network(ROOT / config)
    total = count_complexity(network).sum()
    assert total['parameters'] == LISTED[config]['Parameters']
    path = ROOT / config
    (row,) = (x for x in (path.parent / 'README.md').open() if x.startswith(f'| [{path.stem}]'))
    assert f'| {total["macs"] / 1e9:.4f} |' in row
    counted = get_model_complexity_info(network[:2].eval(), (3, 224, 224), show_table=False)
    assert counted['flops'] == LISTED[config]['FLOPs']


@pytest.mark.slow
def test_one_figure_of_the_paper_differs():
    pytest.importorskip('mmpretrain')
    table = compare_with_paper()
    assert list(table[~table['agree']]['config']) == ['ablation/care_s2_symmetric_in1k']


def test_of_a_detector_the_backbone_is_counted(tmp_path):
    network = build_network(ROOT / 'configs/mask_rcnn/care_s0_coco.py')
    assert [name for name, _ in network.named_children()] == ['backbone']
    assert sum(parameter.numel() for parameter in network.parameters()) == 5_285_904
    (tmp_path / 'other.py').write_text("model = dict(backbone=dict(type='ReLU'))")
    with pytest.raises(ValueError, match='has no CARE backbone'):
        build_network(tmp_path / 'other.py')


def test_the_tool(tmp_path, monkeypatch, capsys):
    options = '--no-head', '--shape', 64, 96, '--out-dir', tmp_path
    run_tool(monkeypatch, 'complexity', 's0', *options)
    printed = capsys.readouterr().out
    table = count_complexity(build_network('s0', head=False), (64, 96))
    for quantity in table:
        assert f'{table[quantity].sum():,}' in printed
        assert f'{table[quantity]["stage 3"].sum():,}' in printed
        assert f'{table[quantity].xs("Inter2", level="part").sum():,}' in printed
    written = pd.read_csv(tmp_path / 's0_64x96.csv', index_col=['stage', 'part'])
    pd.testing.assert_frame_equal(written, table)
