"""The shipped Mask R-CNN configs: sizes, a run at toy size, exact resume, bfloat16."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, RUNNERS, DefaultScope, init_default_scope
from published_reference import published_weights

from mmcare.checkpoint import read_checkpoint
from mmcare.sample_data import make_coco

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / 'configs' / 'mask_rcnn'
BACKBONES = {'s0': 5_285_904, 's1': 7_548_328, 's2': 16_401_144}
# Without the backbone: a Mask R-CNN with FPN whose lateral convolutions take the four outputs.
HEADS = {'s0': 20_224_752, 's1': 20_224_752, 's2': 20_372_208}


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp('coco') / 'data'
    make_coco(folder, train=8, val=2, size=96)
    return folder


def overrides(data, size=96, epochs=2):
    """What a toy run changes in a shipped config, as --cfg-options take it."""
    annotations = f'{data}/annotations/instances_val2017.json'
    return {
        **{f'{mode}_dataloader.dataset.data_root': f'{data}/' for mode in ('train', 'val', 'test')},
        **{f'{mode}_evaluator.ann_file': annotations for mode in ('val', 'test')},
        **{
            f'{mode}_dataloader.dataset.pipeline.{index}.scale': (size, size)
            for mode, index in (('train', 2), ('val', 1), ('test', 1))
        },
        'train_dataloader.batch_size': 2,
        'train_cfg.max_epochs': epochs,
        'model.backbone.init_cfg': None,
        'model.backbone.norm_eval': False,
        'model.train_cfg.rcnn.sampler.num': 16,
        'model.train_cfg.rpn_proposal.max_per_img': 50,
        'model.test_cfg.rpn.max_per_img': 20,
        'model.test_cfg.rcnn.score_thr': 0.0,  # an untrained model detects something, too
        'param_scheduler.0.end': 6,
    }


def build_runner(data, work_dir, **changes):
    config = Config.fromfile(CONFIGS / 'care_s0_coco.py')
    config.merge_from_dict(overrides(data))
    config.merge_from_dict(
        {'work_dir': str(work_dir), 'experiment_name': f'{work_dir.name}_{len(changes)}', **changes}
    )
    return RUNNERS.build(config)


@pytest.mark.parametrize('variant', BACKBONES)
def test_parameters(variant):
    config = Config.fromfile(CONFIGS / f'care_{variant}_coco.py')
    init_default_scope('mmdet')
    model = MODELS.build(config.model)
    assert config.model.neck.in_channels == list(model.backbone.out_channels)
    assert sum(p.numel() for p in model.backbone.parameters()) == BACKBONES[variant]
    heads = [p for name, p in model.named_parameters() if not name.startswith('backbone.')]
    assert sum(p.numel() for p in heads) == HEADS[variant]
    assert config.model.backbone.init_cfg.checkpoint == f'checkpoints/care_{variant}_in1k.pth'


def test_recipe():
    config = Config.fromfile(CONFIGS / 'care_s1_coco.py')
    optimizer = config.optim_wrapper.optimizer
    assert (optimizer.type, optimizer.lr, optimizer.weight_decay) == ('AdamW', 2e-4, 0.05)
    assert config.train_cfg.max_epochs == 12
    assert config.auto_scale_lr == dict(enable=False, base_batch_size=24)
    assert config.model.backbone.drop_path_rate == 0.1 and config.model.backbone.norm_eval
    assert config.randomness == dict(seed=0) and config.sync_bn == 'torch'


def test_no_weight_decay_on_norms_and_layer_scales():
    from mmengine.optim import build_optim_wrapper

    config = Config.fromfile(CONFIGS / 'care_s0_coco.py')
    init_default_scope('mmdet')
    model = MODELS.build(config.model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    wrapper = build_optim_wrapper(model, config.optim_wrapper)
    free = {
        names[id(parameter)]
        for group in wrapper.param_groups
        if group['weight_decay'] == 0
        for parameter in group['params']
    }
    norms = {
        f'{name}.{part}'
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.BatchNorm2d)
        for part in ('weight', 'bias')
    }
    scales = {name for name in names.values() if name.endswith('.gamma')}
    assert len(scales) == 17 and norms and free == norms | scales


def test_train_evaluate_save_and_resume_exactly(data, tmp_path):
    whole, parts = tmp_path / 'whole', tmp_path / 'parts'
    runner = build_runner(data, whole)
    runner.train()
    assert runner.iter == 8
    saved = read_checkpoint(whole / 'epoch_2.pth')
    initial = read_checkpoint(whole / 'epoch_1.pth')
    assert not torch.equal(
        saved['state_dict']['backbone.stem.conv.weight'],
        initial['state_dict']['backbone.stem.conv.weight'],
    )
    parts.mkdir()
    shutil.copy(whole / 'epoch_1.pth', parts)
    (parts / 'last_checkpoint').write_text(str(parts / 'epoch_1.pth'))
    resumed = build_runner(data, parts, resume=True)
    resumed.train()
    again = read_checkpoint(parts / 'epoch_2.pth')
    for key, value in saved['state_dict'].items():
        assert torch.equal(value, again['state_dict'][key]), key

    metrics = build_runner(data, tmp_path / 'test', load_from=str(whole / 'epoch_2.pth')).test()
    assert 0 <= metrics['coco/bbox_mAP'] <= 1 and 0 <= metrics['coco/segm_mAP'] <= 1


def test_a_step_in_bfloat16(data, tmp_path):
    runner = build_runner(data, tmp_path)
    loader = runner.build_dataloader(runner.cfg.train_dataloader, seed=0)
    batch = runner.model.data_preprocessor(next(iter(loader)), training=True)
    runner.model.init_weights()
    runner.call_hook('before_run')
    with torch.autocast('cpu', torch.bfloat16):
        losses = runner.model(**batch, mode='loss')
    total, values = runner.model.parse_losses(losses)
    total.backward()
    assert all(torch.isfinite(value).all() for value in values.values())
    gradients = [p.grad for p in runner.model.parameters() if p.grad is not None]
    assert len(gradients) > 300
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.slow
def test_the_documented_commands(data, tmp_path):
    """mim train, test and resume, as the README has them; a published file for mim test."""
    torch.save(dict(state_dict=published_weights('s1')), tmp_path / 'CARETrans_S1.pth.tar')

    def mim(*arguments, changes):
        options = [f'{key}={value}'.replace(' ', '') for key, value in changes.items()]
        command = ['mim', *arguments, '--work-dir', str(tmp_path), '--cfg-options', *options]
        environment = {**os.environ, 'PATH': f'{Path(sys.executable).parent}:{os.environ["PATH"]}'}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout + done.stderr

    config = 'configs/mask_rcnn/care_s1_coco.py'
    changes = overrides(data)
    pretrained = dict(type='Pretrained', checkpoint=str(tmp_path / 'CARETrans_S1.pth.tar'))
    changes.update(
        {
            'model.backbone.init_cfg.checkpoint': pretrained['checkpoint'],
            'model.backbone.norm_eval': True,
        }
    )
    del changes['model.backbone.init_cfg']
    output = mim('train', 'mmdet', config, '--auto-scale-lr', changes=changes)
    assert 'is a published CARE checkpoint: took state_dict' in output
    assert 'Epoch(val) [2][2/2]' in output
    output = mim(
        'test', 'mmdet', config, '--checkpoint', str(tmp_path / 'epoch_2.pth'), changes=changes
    )
    assert 'coco/bbox_mAP' in output
    output = mim(
        'train', 'mmdet', config, '--resume', changes={**changes, 'train_cfg.max_epochs': 3}
    )
    assert 'resumed epoch: 2, iter: 8' in output
    output = mim('test', 'mmdet', config, '--checkpoint', pretrained['checkpoint'], changes=changes)
    assert 'not in it and keep their initial values' in output


def teardown_module():
    """Leave no default scope behind for other modules."""
    DefaultScope._instance_dict.clear()
