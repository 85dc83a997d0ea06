"""model-index.yml, the metafiles and the tables in configs/*/README.md against the configs."""

import re
from functools import cache
from pathlib import Path

import pytest
import yaml
from mmengine.analysis import get_model_complexity_info
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from modelindex.load_model_index import load
from torch import nn

from mmcare.models import CARE
from mmcare.shipped import shipped_configs

ROOT = Path(__file__).parents[2]
INDEX = ROOT / 'model-index.yml'
METAFILES = yaml.safe_load(INDEX.read_text())['Import']
MODELS_LISTED = {
    model['Config']: model
    for metafile in METAFILES
    for model in yaml.safe_load((ROOT / metafile).read_text())['Models']
}
CONFIGS = [f'configs/{name}.py' for name in shipped_configs()]
SIZE = 512


@cache
def table(folder: str) -> dict[str, dict[str, str]]:
    """The table of a folder's README.md: for each path of a config, its cells by their heads."""
    rows = re.findall(r'^\|(.*)\|$', (ROOT / folder / 'README.md').read_text(), re.MULTILINE)
    heads, _, *rows = [[cell.strip() for cell in row.split('|')] for row in rows]
    cells = [dict(zip(heads, row, strict=True)) for row in rows]
    links = [re.fullmatch(r'\[(\w+)\]\((\w+)\.py\)', row['Config']) for row in cells]
    assert all(link[1] == link[2] for link in links)
    return {f'{folder}/{link[1]}.py': row for link, row in zip(links, cells, strict=True)}


def row(config: str) -> dict[str, str]:
    return table(config.rpartition('/')[0])[config]


def build(config: str) -> nn.Module:
    loaded = Config.fromfile(ROOT / config)
    with DefaultScope.overwrite_default_scope(loaded.default_scope):
        return MODELS.build(loaded.model)


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def count_gmacs(model: nn.Module) -> float:
    """Count on two small images: the cost is a constant and a share a pixel."""
    small, large = (
        get_model_complexity_info(model.eval(), (3, size, size), show_table=False, show_arch=False)[
            'flops'
        ]
        for size in (64, 128)
    )
    share = (large - small) / (128**2 - 64**2)
    return (small + share * (SIZE**2 - 64**2)) / 1e9


def test_index_is_valid():
    index = load(str(INDEX))
    assert index.check(silent=True) == []
    assert [model.name for model in index.models] == [
        model['Name'] for model in MODELS_LISTED.values()
    ]


def test_every_config_is_listed_once_under_its_name():
    assert sorted(MODELS_LISTED) == CONFIGS
    for config, model in MODELS_LISTED.items():
        folder, name = config.removeprefix('configs/').removesuffix('.py').split('/')
        assert model['Name'] == f'{folder}_{name}'
    assert sorted(f'configs/{Path(metafile).parent.name}' for metafile in METAFILES) == sorted(
        {config.rpartition('/')[0] for config in CONFIGS}
    )


def test_no_results_are_claimed():
    """mim cannot tell the paper's results from ours, and there are none of ours."""
    assert not [name for name, model in MODELS_LISTED.items() if 'Results' in model]
    for config in CONFIGS:
        for head, cell in row(config).items():
            assert cell == '' or not head.endswith('(ours)')


@pytest.mark.parametrize('config', CONFIGS)
def test_parameters(config):
    pytest.importorskip(Config.fromfile(ROOT / config).default_scope)
    model, metadata = build(config), MODELS_LISTED[config]['Metadata']
    assert metadata['Parameters'] == count_parameters(model)
    assert metadata['Backbone Parameters'] == count_parameters(model.backbone)
    assert row(config)['Parameters'] == f'{metadata["Parameters"]:,}'
    assert row(config)['Backbone parameters'] == f'{metadata["Backbone Parameters"]:,}'


@pytest.mark.parametrize('arch', ['s0', 's1', 's2'])
def test_gmacs_of_backbones(arch):
    counted = f'{count_gmacs(CARE(arch)):.2f}'
    configs = [
        config
        for config in CONFIGS
        if f'care_{arch}_' in config and 'Backbone GMACs' in row(config)
    ]
    assert configs
    for config in configs:
        assert f'{MODELS_LISTED[config]["Metadata"]["Backbone GMACs"]:.2f}' == counted
        assert row(config)['Backbone GMACs'] == counted


@pytest.mark.parametrize(
    'config',
    [
        pytest.param(config, marks=[] if 'fpn/care_s0' in config else [pytest.mark.slow])
        for config in CONFIGS
        if 'GMACs' in row(config)
    ],
)
def test_gmacs_of_segmentors(config):
    pytest.importorskip('mmseg')
    model = build(config)
    model.forward = model._forward  # network and head, without what turns maps into predictions
    assert row(config)['GMACs'] == f'{count_gmacs(model):.2f}'


def test_figures_of_the_paper():
    """Table 2 of the paper: box AP, mask AP and mIoU of the three sizes."""
    reported = {'s0': ('40.3', '36.8', '38.5'), 's1': ('41.5', '37.8', '41.0')}
    reported['s2'] = ('43.1', '39.0', '43.5')
    for arch, (box, mask, miou) in reported.items():
        detector = row(f'configs/mask_rcnn/care_{arch}_coco.py')
        assert (detector['Box AP (paper)'], detector['Mask AP (paper)']) == (box, mask)
        assert row(f'configs/fpn/care_{arch}_ade20k.py')['mIoU (paper)'] == miou
        assert 'mIoU (paper)' not in row(f'configs/upernet/care_{arch}_ade20k.py')
