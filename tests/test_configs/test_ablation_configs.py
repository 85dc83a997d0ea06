"""The configs of the paper's Tables 3 to 5: one a row, its cost, one training step."""

import re
from pathlib import Path

import pytest
import torch
import yaml
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope

from mmcare.analysis import build_model, count_complexity

pytest.importorskip('mmpretrain')

from mmpretrain.structures import DataSample

FOLDER = Path(__file__).parents[2] / 'configs' / 'ablation'
# Parameters (two heads included) and the paper's GMACs and top-1.
ROWS = {
    's2_symmetric': (19_661_984, '2.0', '82.1'),
    's2_stacked': (20_885_768, '2.1', '81.4'),
    's2_global_only': (20_674_088, '2.0', '77.3'),
    's0_no_inter1': (5_450_864, '0.5', '76.2'),
    's0_no_inter2': (2_668_448, '0.3', '70.9'),
    's0_no_memory': (5_400_648, '0.5', '76.5'),
    's0_no_early_conv': (7_340_544, '0.72', '78.3'),
    's1_no_early_conv': (9_603_240, '1.03', '79.9'),
    's2_no_early_conv': (19_482_104, '1.93', '82.0'),
    's0_no_multi_scale': (7_316_320, '0.71', '78.1'),
    's1_no_multi_scale': (9_569_464, '1.02', '79.8'),
    's2_no_multi_scale': (19_434_248, '1.92', '81.8'),
}


def build(row):
    config = Config.fromfile(FOLDER / f'care_{row}_in1k.py')
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        return MODELS.build(config.model)


def test_one_config_a_row():
    assert {path.name for path in FOLDER.glob('*.py')} == {f'care_{row}_in1k.py' for row in ROWS}


@pytest.mark.parametrize(('row', 'figures'), ROWS.items())
def test_cost(row, figures):
    parameters, paper_gmacs, top1 = figures
    model = build(row).eval()
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters

    cells = next(
        [cell.strip() for cell in line.split('|')]
        for line in (FOLDER / 'README.md').read_text().splitlines()
        if f'care_{row}_in1k.py' in line
    )
    assert cells[5] == paper_gmacs and cells[7] == top1
    listed = {
        model['Name']: model['Metadata']
        for model in yaml.safe_load((FOLDER / 'metafile.yml').read_text())['Models']
    }[f'ablation_care_{row}_in1k']
    _, network = build_model(str(FOLDER / f'care_{row}_in1k.py'))
    gmacs = count_complexity(network, (224, 224)).macs / 1e9
    assert cells[4] == f'{gmacs:.4f}' == f'{listed["GMACs at 224"]:.4f}'


@pytest.mark.parametrize('row', ['s2_stacked', 's0_no_inter2', 's0_no_memory'])
def test_training_step(row):
    """Backbone and heads fit together, where the ablation changes the channels or the mixer."""
    torch.manual_seed(0)
    model = build(row).train()
    samples = [DataSample().set_gt_label(label) for label in (1, 2)]
    data = model.data_preprocessor(
        dict(inputs=torch.randint(256, (2, 3, 64, 64), dtype=torch.uint8), data_samples=samples),
        training=True,
    )
    losses = model(**data, mode='loss')
    sum(losses.values()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


def test_arguments_are_named_in_the_docstring():
    """Every argument that a config of the folder sets is described by the backbone."""
    from mmcare.models import CARE

    for row in ROWS:
        arguments = re.findall(
            r'backbone=dict\((\w+)=', (FOLDER / f'care_{row}_in1k.py').read_text()
        )
        assert len(arguments) == 1 and f'{arguments[0]}:' in CARE.__doc__
