"""Safe loading by hook and by opt-in, and what shipped configs write: each task at toy size."""

import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from helpers import run
from mmengine.logging import HistoryBuffer
from mmengine.registry import DefaultScope
from mmengine.runner import CheckpointLoader, Runner
from mmengine.runner.checkpoint import load_from_local
from toy_configs import make_data, toy_config

from mmcare.weights.whole import CheckpointError

NAMES = dict(detection='epoch_{}.pth', segmentation='iter_{}.pth', classification='epoch_{}.pth')
# In a process that has not heard of mmcare: CONFIG and FILE are the arguments, `zoo` the toolbox.
FRESH = dict(
    detection='from mmdet.apis import DetInferencer;'
    'DetInferencer(weights=FILE, device="cpu")(IMAGE)["predictions"][0]["scores"]',
    segmentation='from mmseg.apis import MMSegInferencer;'
    'infer = MMSegInferencer(None, weights=FILE, device="cpu");'
    'assert infer(IMAGE)["predictions"].shape == (64, 64)',
    classification='import mmpretrain, torch;'
    'model = mmpretrain.get_model(CONFIG, pretrained=FILE);'
    'weights = torch.load(FILE)["state_dict"];'
    'assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())',
)


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """Folders of runs by task: two epochs (iterations), each followed by a validation."""
    folder = tmp_path_factory.mktemp('shipped')
    for task in NAMES:
        make_data(task, folder / task / 'data')
        config = toy_config(task, folder / task / 'data', folder / task / 'run')
        config.dump(folder / task / 'config.py')
        Runner.from_cfg(config).train()
    yield folder
    DefaultScope._instance_dict.clear()


@pytest.mark.parametrize('task', ['detection', 'segmentation'])  # test_classification has the third
def test_train_resume_and_test(trained, tmp_path, task):
    """A resumed run ends with the same weights, and its file is evaluated."""
    first, last = (trained / task / 'run' / NAMES[task].format(step) for step in (1, 2))
    (tmp_path / 'parts').mkdir()
    shutil.copy2(first, tmp_path / 'parts')
    data = trained / task / 'data'
    runner = Runner.from_cfg(toy_config(task, data, tmp_path / 'parts', resume=True))
    runner.train()
    whole = torch.load(last, weights_only=True)['state_dict']
    before = torch.load(first, weights_only=True)['state_dict']
    assert not torch.equal(before['backbone.stem.conv.weight'], whole['backbone.stem.conv.weight'])
    assert [k for k, v in runner.model.state_dict().items() if not torch.equal(v, whole[k])] == []
    config = toy_config(task, data, tmp_path / 'test', load_from=str(last))
    assert Runner.from_cfg(config).test()


def test_what_shipped_configs_write_works_in_a_fresh_process(trained):
    """Without the repository's configs, and without an import of mmcare by the caller."""

    def use(task):
        file = trained / task / 'run' / NAMES[task].format(2)
        code = (
            'import sys, numpy as np; CONFIG, FILE = sys.argv[1:];'
            f'IMAGE = np.zeros((64, 64, 3), np.uint8); {FRESH[task]}'
        )
        run(sys.executable, '-c', code, trained / task / 'config.py', file)

    with ThreadPoolExecutor() as pool:
        list(pool.map(use, FRESH))


@pytest.mark.slow
@pytest.mark.parametrize(('task', 'toolbox'), [('detection', 'mmdet'), ('segmentation', 'mmseg')])
def test_mim_test(trained, tmp_path, task, toolbox):
    """With the config that the run has used."""
    file = trained / task / 'run' / NAMES[task].format(2)
    command = ['mim', 'test', toolbox, trained / task / 'config.py', '--checkpoint', file]
    done = run(*command, '--work-dir', tmp_path, cwd=tmp_path)
    assert {'mmdet': 'bbox_mAP', 'mmseg': 'mIoU'}[toolbox] in done.stdout + done.stderr


@pytest.fixture
def stock(trained, tmp_path):
    """What MMEngine's own hook writes, which MMEngine cannot read on PyTorch 2.6 and later."""
    checkpoint = torch.load(trained / 'segmentation/run/iter_2.pth', weights_only=True)
    checkpoint['message_hub']['log_scalars'] = dict(loss=HistoryBuffer([1.0], [1]))
    torch.save(checkpoint, tmp_path / 'stock.pth')
    return tmp_path / 'stock.pth'


def test_the_hook_switches_the_loader_while_a_run_loads(trained, tmp_path, stock, monkeypatch):
    """Also if loading fails; code of a file does not run."""
    monkeypatch.setattr(CheckpointLoader, '_schemes', {'': load_from_local})  # MMEngine's
    canary, data = tmp_path / 'canary', trained / 'segmentation/data'

    class Code:
        def __reduce__(self):
            return Path.touch, (canary,)

    torch.save(dict(state_dict=Code()), tmp_path / 'hostile.pth')
    for file in (stock, tmp_path / 'hostile.pth'):
        config = toy_config('segmentation', data, tmp_path / 'run', load_from=str(file))
        if file == stock:
            assert Runner.from_cfg(config).test()
        else:
            with pytest.raises(CheckpointError, match=r'hostile\.pth'):
                Runner.from_cfg(config).test()
        assert CheckpointLoader._schemes == {'': load_from_local}
    assert not canary.exists()


def test_the_opt_in_for_programs_without_a_runner(trained, stock):
    code = (
        'import sys, mmcare.engine.safe_loading; from mmseg.apis import init_model;'
        'init_model(sys.argv[1], sys.argv[2], device="cpu")'
    )
    run(sys.executable, '-c', code, trained / 'segmentation' / 'config.py', stock)
