"""CARE in other projects on MMEngine, by their configs; `make test-third-party` installs them."""

import importlib
import json
from importlib.util import find_spec
from pathlib import Path

import mmcv
import pytest
import torch
from helpers import THIN, assert_equal, warned
from mmengine.config import Config
from mmengine.runner import Runner
from mmengine.utils import apply_to
from toy_training import StopAt, saved

from mmcare.sample_data import make_coco

mmdet = pytest.importorskip('mmdet')

SIZE = 64
BACKBONE = dict(type='mmcare.CARE', arch=THIN, out_indices=(1, 2, 3), layer_scale_init_value=0.5)
MODEL = f"""
custom_imports = dict(imports=['mmcare'], allow_failed_imports=False)
model = dict(
    data_preprocessor=dict(
        mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375], bgr_to_rgb=True),
    backbone=dict(_delete_=True, **{BACKBONE}),
    neck=dict(in_channels=[16, 32, 128]))
"""
CONFIGS = dict(
    mmpose=f"""
_base_ = 'mmpose::body_2d_keypoint/yoloxpose/coco/yoloxpose_s_8xb32-300e_coco-640.py'
{MODEL}
""",
    mmyolo=f"""
_base_ = 'mmyolo::rtmdet/rtmdet_tiny_syncbn_fast_8xb32-300e_coco.py'
{MODEL}
model['neck'].update(out_channels=96, widen_factor=1.0)  # 96: what the head takes
train_dataloader = dict(collate_fn=dict(_delete_=True, type='yolov5_collate'))
""",
)
HOOKS = 'DataCheckHook', 'ExactResumeHook', 'OptimizerCheckHook', 'SafeLoadingHook'


def add_keypoints(file):
    """Let each object be a person with seventeen keypoints on a diagonal."""
    content = json.loads(file.read_text())
    content['categories'] = [category for category in content['categories'] if category['id'] == 1]
    for annotation in content['annotations']:
        x, y, width, height = annotation['bbox']
        points = [(x + width * part / 16, y + height * part / 16, 2) for part in range(17)]
        annotation.update(
            category_id=1,
            num_keypoints=17,
            keypoints=[value for point in points for value in point],
        )
    file.write_text(json.dumps(content))


def small_config(project, folder):
    (folder / 'config.py').write_text(CONFIGS[project])
    config = Config.fromfile(folder / 'config.py')
    config = Config(
        apply_to(
            config._cfg_dict,
            lambda value: type(value) is int and value in (480, 640, 800, 1280),
            lambda value: value * SIZE // 640 // 32 * 32,
        )
    )
    for mode, split in dict(train='train', val='val', test='val').items():
        loader = config[f'{mode}_dataloader']
        loader.update(num_workers=mode == 'train', persistent_workers=False, batch_size=2)
        loader.dataset.update(
            data_root=f'{folder}/data/',
            ann_file=f'annotations/instances_{split}2017.json',
            data_prefix=dict(img=f'{split}2017/'),
        )
        if mode != 'train':
            file = f'{folder}/data/annotations/instances_val2017.json'
            config[f'{mode}_evaluator'].ann_file = file
    config.train_cfg.update(max_epochs=3, val_interval=1, dynamic_intervals=None)
    config.default_hooks.checkpoint = dict(type='mmcare.AtomicCheckpointHook', interval=1)
    config.custom_hooks += [dict(type=f'mmcare.{name}') for name in HOOKS]
    config.merge_from_dict(dict(randomness=dict(seed=1)))
    return config


@pytest.mark.parametrize('project', [*CONFIGS])
def test_a_config_of_the_registry(tmp_path, monkeypatch, logged, project):
    """Train, resume and test: the weights and their averages are those of an unbroken run."""
    if find_spec(project) is None:
        pytest.skip(f'{project} is not installed')
    with monkeypatch.context() as patch:  # mmyolo knows neither of these versions
        patch.setattr(mmcv, '__version__', '2.0.1')
        patch.setattr(mmdet, '__version__', '3.2.0')
        importlib.import_module(project)
    make_coco(tmp_path / 'data', train=4, val=2, size=SIZE)
    if project == 'mmpose':
        for file in (tmp_path / 'data/annotations').iterdir():
            add_keypoints(file)
    for name, options in dict(
        whole={}, parts=dict(stop=3), resumed=dict(resume=True), tested=dict(test=True)
    ).items():
        config = small_config(project, tmp_path)
        folder = tmp_path / ('whole' if name == 'whole' else 'parts')
        config.merge_from_dict(dict(work_dir=str(folder), experiment_name=f'{project}_{name}'))
        torch.manual_seed(0)
        if 'test' in options:
            config.load_from = (folder / 'last_checkpoint').read_text()
            assert Runner.from_cfg(config).test()
            continue
        config.resume = 'resume' in options
        runner = Runner.from_cfg(config)
        if 'stop' in options:
            runner.register_hook(StopAt(options['stop']))
            with pytest.raises(KeyboardInterrupt):
                runner.train()
        else:
            runner.train()
    assert saved(tmp_path / 'parts') == saved(tmp_path / 'whole')
    averages = [
        torch.load(Path(tmp_path, folder, 'last_checkpoint').read_text(), weights_only=True)
        for folder in ('parts', 'whole')
    ]
    assert_equal(*(part['ema_state_dict'] for part in averages))
    assert not warned(logged, 'not reproduce')
