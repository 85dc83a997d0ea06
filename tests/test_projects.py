"""Configs of other projects with CARE in them: those of docs/use_in_your_project.md.

Each codebase gets a process of its own, started in a folder outside of the repository, and trains
all its configs there, since importing a codebase takes longer than the steps.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from docs_page import config_files, make_project
from forks import FORKS

TRAIN_BRIEFLY = Path(__file__).with_name('train_briefly.py')
CONFIGS = {
    'mmdet': [
        'retinanet_care.py',
        'cascade_rcnn_care.py',
        'rtmdet_ins_care.py',
        'retinanet_care_decay.py',
    ],
    'mmseg': ['segformer_care.py'],
    'mmpretrain': ['classifier_care.py'],
    'mmpose': ['pose_care.py'],
}
CHECKED = 'retinanet_care_checked.py'

RUN_CHECKED = f"""
from mmengine.config import Config
from mmengine.registry import RUNNERS
from mmcare.sample_data import make_coco

config = Config.fromfile({CHECKED!r})
config.merge_from_dict({{
    'work_dir': 'work_dir',
    'train_cfg.max_epochs': 1,
    'train_dataloader.num_workers': 1,
    'train_dataloader.dataset.pipeline.2.scale': (64, 64),
    'val_dataloader.num_workers': 1,
    'val_dataloader.dataset.pipeline.1.scale': (64, 64),
    'test_dataloader': None,
    'test_evaluator': None,
    'test_cfg': None,
}})
try:
    RUNNERS.build(config).train()
except FileNotFoundError as error:
    print('without data:', error)
make_coco('data/coco', train=2, val=1, size=64)
RUNNERS.build(config).train()
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Run Python in a folder whose files can be imported, and see nothing of the repository's."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, 'PYTHONPATH': str(folder)},
    )


@pytest.fixture(scope='module')
def project(tmp_path_factory) -> Path:
    return make_project(tmp_path_factory.mktemp('project'))


@pytest.fixture(scope='module')
def trained(project):
    """Gives the results of a codebase's configs; trains them when first asked."""
    results = {}

    def give(codebase):
        if codebase not in results:
            file = project / f'{codebase}.json'
            done = run(project, str(TRAIN_BRIEFLY), codebase, str(file), *CONFIGS[codebase])
            results[codebase] = json.loads(file.read_text()) if file.is_file() else done.stderr
        return results[codebase]

    return give


def test_every_config_of_the_page_is_tried():
    tried = {CHECKED, *(name for names in CONFIGS.values() for name in names)}
    assert set(config_files()) == tried


@pytest.mark.parametrize(
    ('codebase', 'config'), [(codebase, name) for codebase in CONFIGS for name in CONFIGS[codebase]]
)
def test_trains_by_custom_imports_alone(codebase, config, trained):
    if importlib.util.find_spec(codebase) is None:
        pytest.skip(f'{codebase} is not installed; the page says how')
    if FORKS and codebase == 'mmseg':
        pytest.xfail('onedl-mmengine looks for mmseg:: in a package mmsegmentation')
    results = trained(codebase)
    assert isinstance(results, dict), results
    result = results[config]
    assert result['backbone'] == 'mmcare.models.backbones.care.CARE'
    assert result['pretrained']
    assert result['untrained'] == []
    assert result['losses'][-1] < result['losses'][0]
    assert result['predictions'] == 2
    if 'decay' in config or codebase == 'mmpretrain':
        assert result['head_rate'] == pytest.approx(2e-4)
        assert result['stem_rate'] == pytest.approx(2e-4 * 0.8**19)  # 18 blocks, and the head


def test_hooks_in_another_project(project):
    """The run stops over missing data before it starts, and stores what resuming needs."""
    done = run(project, '-c', RUN_CHECKED)
    assert done.returncode == 0, done.stderr
    missing = (
        "names the file 'data/coco/annotations/instances_train2017.json', which does not exist"
    )
    assert re.search(f'^without data: .*{missing}', done.stdout, re.MULTILINE)
    checkpoint = torch.load(project / 'work_dir' / 'epoch_1.pth', weights_only=False)
    assert {'python', 'numpy', 'torch'} <= checkpoint['generator_states'][0].keys()
