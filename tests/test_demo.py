"""The demos at toy size, where figures mean nothing; `make demo` and `make demo-seg` run them."""

import json
from collections import OrderedDict

import cv2
import pytest
from helpers import run_tool
from mmengine.config import Config
from mmengine.registry import DefaultScope

from mmcare.sample_data import make_ade20k, make_coco
from mmcare.shipped import shipped_config

KINDS = dict(
    coco=(make_coco, 'care_s0_mask_rcnn_scenes', 'epoch_1.pth', 'coco/bbox_mAP_50'),
    ade20k=(make_ade20k, 'care_s0_fpn_scenes', 'iter_4.pth', 'mIoU'),
)
SHORT = dict(
    coco=['train_cfg.max_epochs=1'], ade20k=['train_cfg.max_iters=4', 'train_cfg.val_interval=4']
)


@pytest.mark.parametrize('demo', ['coco', pytest.param('ade20k', marks=pytest.mark.slow)])
def test_trains_tests_and_draws(demo, tmp_path, monkeypatch, capsys):
    make, config, checkpoint, metric = KINDS[demo]
    data_root = Config.fromfile(shipped_config(f'demo/{config}')).data_root
    make(tmp_path / data_root, train=8, val=2, size=64)
    options = ['--work-dir=out', '--cfg-options', 'default_hooks.logger.interval=1', *SHORT[demo]]
    options.append('visualizer.name=demo')  # in this process, others have used the default
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(DefaultScope, '_instance_dict', OrderedDict())  # one toolbox a run
    with pytest.raises(SystemExit) as stop:
        run_tool(monkeypatch, 'demo', demo, *options)
    results = json.loads((tmp_path / 'out/results.json').read_text())
    goal = results['goal']['above']
    assert results['goal']['metric'] == metric and f'goal: above {goal}' in capsys.readouterr().out
    for stage in ('untrained', 'trained'):
        assert all(-1 <= value <= 1 for value in results[stage].values())
        assert metric in results[stage]
    assert stop.value.code == int(results['trained'][metric] <= goal)
    for name in ('curves.png', 'predictions.png'):
        assert cv2.imread(str(tmp_path / 'out' / name)).std() > 10, f'{name} is empty'
    assert (tmp_path / 'out' / checkpoint).is_file()
