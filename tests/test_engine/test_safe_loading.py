"""Safe loading by hook and by opt-in, and what shipped configs write: each task at toy size."""

import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import pytest
import torch
from helpers import run
from mmengine.runner import Runner
from toy_configs import make_data, toy_config

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
