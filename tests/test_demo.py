"""The demos at toy size, where figures mean nothing; `make demo` and `make demo-seg` run them."""

import json
import sys

import cv2
import pytest
from helpers import ROOT, run
from mmengine.config import Config

from mmcare.sample_data import make_ade20k, make_coco
from mmcare.shipped import shipped_config

KINDS = dict(
    coco=(make_coco, 'care_s0_mask_rcnn_scenes', 'mmdet', 'epoch_1.pth', 'coco/bbox_mAP_50'),
    ade20k=(make_ade20k, 'care_s0_fpn_scenes', 'mmseg', 'iter_4.pth', 'mIoU'),
)
SHORT = dict(
    coco=['train_cfg.max_epochs=1'], ade20k=['train_cfg.max_iters=4', 'train_cfg.val_interval=4']
)


@pytest.fixture(params=['coco', pytest.param('ade20k', marks=pytest.mark.slow)])
def demo(request, tmp_path):
    """A kind, with a few scenes where its config looks for them, seen from ``tmp_path``."""
    make, config, *_ = KINDS[request.param]
    data_root = Config.fromfile(shipped_config(f'demo/{config}')).data_root
    make(tmp_path / data_root, train=8, val=2, size=64)
    return request.param


def test_trains_tests_and_draws(demo, tmp_path):
    *_, checkpoint, metric = KINDS[demo]
    options = ['--work-dir=out', '--cfg-options', 'default_hooks.logger.interval=1', *SHORT[demo]]
    done = run(sys.executable, ROOT / 'tools/demo.py', demo, *options, cwd=tmp_path, check=False)
    results = json.loads((tmp_path / 'out/results.json').read_text())
    assert results['goal'] == dict(metric=metric, above=0.5)
    assert 'goal: above 0.5' in done.stdout
    for stage in ('untrained', 'trained'):
        assert all(-1 <= value <= 1 for value in results[stage].values())
        assert metric in results[stage]
    assert done.returncode == int(results['trained'][metric] <= 0.5), done.stderr
    for name in ('curves.png', 'predictions.png'):
        assert cv2.imread(str(tmp_path / 'out' / name)).std() > 10, f'{name} is empty'
    assert (tmp_path / 'out' / checkpoint).is_file()


@pytest.mark.slow
def test_mim_trains_and_tests(demo, tmp_path):
    _, name, package, checkpoint, metric = KINDS[demo]
    config, options = shipped_config(f'demo/{name}'), ['--work-dir=out', '--cfg-options']
    run('mim', 'train', package, config, *options, *SHORT[demo], cwd=tmp_path)
    done = run('mim', 'test', package, config, '--checkpoint', f'out/{checkpoint}', cwd=tmp_path)
    assert metric in done.stdout + done.stderr
