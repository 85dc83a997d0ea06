"""Safe loading by hook and by opt-in, and what shipped configs write: each task at toy size."""

import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from helpers import run
from mmengine.logging import HistoryBuffer
from mmengine.runner import CheckpointLoader, Runner
from mmengine.runner.checkpoint import load_from_local
from toy_configs import make_data, toy_config

from mmcare.weights.reading import CheckpointError

pytest.importorskip('mmdet')
LAST = dict(detection='epoch_2.pth', segmentation='iter_2.pth')
ONE_STAGE = ('retinanet', 'rtmdet')
# In a process that has not heard of mmcare.
FRESH = dict(
    detection='from mmdet.apis import DetInferencer;'
    'DetInferencer(weights=FILE, device="cpu")(IMAGE)["predictions"][0]["scores"]',
    segmentation='from mmseg.apis import MMSegInferencer;'
    'infer = MMSegInferencer(None, weights=FILE, device="cpu");'
    'assert infer(IMAGE)["predictions"].shape == (64, 64)',
)


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """Give the folder of a task's run: two epochs (iterations), each followed by a validation."""

    @lru_cache(None)
    def train(task):
        folder = tmp_path_factory.mktemp(task)
        make_data(task, folder / 'data')
        Runner.from_cfg(toy_config(task, folder / 'data', folder / 'run')).train()
        return folder

    return train


@pytest.mark.parametrize(
    'task', [*LAST, 'distillation', *(pytest.param(t, marks=pytest.mark.slow) for t in ONE_STAGE)]
)
def test_train_resume_and_test(trained, tmp_path, task):
    """A resumed run ends with the same weights, also across a switch of pipelines.

    Distilled with drop path, recomputation, Mixup and CutMix; then tested without the teacher.
    """
    data, last = trained(task) / 'data', trained(task) / 'run' / LAST.get(task, 'epoch_2.pth')
    first, parts = last.with_stem(last.stem.replace('2', '1')), tmp_path / 'parts'
    parts.mkdir()
    shutil.copy2(first, parts)
    Runner.from_cfg(toy_config(task, data, parts, resume=True)).train()
    before, whole, resumed = (
        torch.load(file, weights_only=True) for file in (first, last, parts / last.name)
    )
    for kind in {'state_dict', 'ema_state_dict'} & whole.keys():
        torch.testing.assert_close(resumed[kind], whole[kind], rtol=0, atol=0)
    stem = 'backbone.stem.conv.weight'
    assert not torch.equal(before['state_dict'][stem], whole['state_dict'][stem])
    changes = {'model.teacher_checkpoint': 'nowhere.pth'} if task == 'distillation' else {}
    config = toy_config(task, data, tmp_path / 'test', load_from=str(last), **changes)
    assert Runner.from_cfg(config).test()


def test_shipped_checkpoints_in_a_fresh_process(trained):
    """Without the repository's configs, and without an import of mmcare by the caller."""

    def use(task):
        code = (
            'import sys, numpy as np; FILE = sys.argv[1];'
            f'IMAGE = np.zeros((64, 64, 3), np.uint8); {FRESH[task]}'
        )
        run(sys.executable, '-c', code, folders[task] / 'run' / LAST[task])

    folders = {task: trained(task) for task in FRESH}
    with ThreadPoolExecutor() as pool:
        list(pool.map(use, FRESH))


def test_loader_is_switched_while_loading(trained, tmp_path, monkeypatch):
    """Also if loading fails; code of a file does not run."""
    monkeypatch.setattr(CheckpointLoader, '_schemes', {'': load_from_local})  # MMEngine's
    canary, data = tmp_path / 'canary', trained('segmentation') / 'data'

    class Code:
        def __reduce__(self):
            return Path.touch, (canary,)

    torch.save(dict(state_dict=Code()), tmp_path / 'hostile.pth')
    # What MMEngine's own hook writes, which MMEngine cannot read on PyTorch 2.6 and later.
    checkpoint = torch.load(trained('segmentation') / 'run/iter_2.pth', weights_only=True)
    checkpoint['message_hub']['log_scalars'] = dict(loss=HistoryBuffer([1.0], [1]))
    torch.save(checkpoint, stock := tmp_path / 'stock.pth')
    for file in (stock, tmp_path / 'hostile.pth'):
        config = toy_config('segmentation', data, tmp_path / 'run', load_from=str(file))
        if file == stock:
            assert Runner.from_cfg(config).test()
        else:
            with pytest.raises(CheckpointError, match=r'hostile\.pth'):
                Runner.from_cfg(config).test()
        assert CheckpointLoader._schemes == {'': load_from_local}
    assert not canary.exists()
