"""Shipped configs made small: a thin CARE, narrow heads, images of 64 pixels, a few of them."""

import torch
from helpers import ROOT, THIN
from mmengine.config import Config
from mmengine.registry import MODELS
from mmengine.utils import apply_to

from mmcare.sample_data import make_ade20k, make_coco, make_imagenet

SIZE, CHANNELS = 64, 16  # of images; of necks and heads
MODES = ('train', 'val', 'test')
CONFIGS = dict(
    detection='mask_rcnn/care_s0_coco',
    segmentation='fpn/care_s0_ade20k',
    upernet='upernet/care_s0_upernet_ade20k',
    classification='imagenet/care_s0_in1k',
    distillation='imagenet/care_s0_distill_in1k',
    retinanet='retinanet/care_s0_retinanet_coco',
    rtmdet='rtmdet/care_s0_rtmdet_coco',
)

TEACHER = dict(
    type='ImageClassifier',
    backbone=dict(type='ResNet', depth=18, base_channels=4, stem_channels=4),
    neck=dict(type='GlobalAveragePooling'),
    head=dict(type='LinearClsHead', num_classes=1000, in_channels=32),
)


def make_data(task, directory):
    makers = dict(segmentation=make_ade20k, upernet=make_ade20k)
    makers.update(classification=make_imagenet, distillation=make_imagenet)
    makers.get(task, make_coco)(directory, train=4, val=3, size=SIZE)
    if task == 'distillation':
        teacher = MODELS.build(dict(TEACHER, _scope_='mmpretrain'))
        torch.save(teacher.state_dict(), directory / 'teacher.pth')


def changes_of(task, data):
    """What makes a shipped config small, as --cfg-options take it."""
    changes = {
        **{f'{mode}_dataloader.num_workers': 0 for mode in ('val', 'test')},
        **{f'{mode}_dataloader.persistent_workers': False for mode in ('val', 'test')},
        'train_dataloader.num_workers': 1,
        'train_dataloader.batch_size': 2,
        'model.backbone.init_cfg': None,
        'model.backbone.layer_scale_init_value': 0.5,
        'randomness.seed': 1,
        **{f'{mode}_dataloader.dataset.data_root': f'{data}/' for mode in MODES},
    }
    scales = {}
    if task in ('detection', 'retinanet', 'rtmdet'):
        scales = {} if task == 'rtmdet' else dict(train=2, val=1, test=1)
        file = f'{data}/annotations/instances_val2017.json'
        changes.update({f'{mode}_evaluator.ann_file': file for mode in MODES[1:]})
        changes['train_cfg.max_epochs'] = 2
    if task == 'rtmdet':
        changes.update(
            {
                'train_cfg.val_interval': 1,
                'train_cfg.dynamic_intervals': None,
                'param_scheduler.0.end': 2,
                'default_hooks.checkpoint.interval': 1,
                'custom_hooks.1.switch_epoch': 1,
            }
        )
    elif task == 'retinanet':
        changes['model.test_cfg.score_thr'] = 0.0  # an untrained model also detects something
    elif task == 'detection':
        changes.update(
            {
                'model.train_cfg.rpn_proposal.max_per_img': 50,
                'model.train_cfg.rpn.sampler.num': 32,
                'model.train_cfg.rcnn.sampler.num': 16,
                'model.test_cfg.rpn.max_per_img': 20,
                'model.test_cfg.rcnn.score_thr': 0.0,
            }
        )
    elif task in ('segmentation', 'upernet'):
        scales = dict(train=2, val=1, test=1)
        changes.update(
            {
                'train_dataloader.dataset.pipeline.3.crop_size': (SIZE, SIZE),
                'model.data_preprocessor.size': (SIZE, SIZE),
                'train_cfg.max_iters': 2,
                'train_cfg.val_interval': 1,
                'default_hooks.checkpoint.interval': 1,
            }
        )
    else:
        changes.update(
            {'train_cfg.max_epochs': 2, 'param_scheduler.0.end': 1, 'param_scheduler.1.begin': 2}
        )
    for mode, index in scales.items():
        changes[f'{mode}_dataloader.dataset.pipeline.{index}.scale'] = (SIZE, SIZE)
    return changes


def toy_config(task, data, work_dir, **changes):
    """Read a shipped config and make it small; further changes as --cfg-options take them."""
    config = Config.fromfile(ROOT / 'configs' / f'{CONFIGS[task]}.py')
    config.merge_from_dict(changes_of(task, data))
    if task == 'rtmdet':  # whose pipelines have 640 and 1280 in many places
        small = apply_to(config._cfg_dict, lambda x: x in (640, 1280), lambda x: x * SIZE // 640)
        config = Config(small)
    model = config.model
    model.backbone.arch = THIN
    channels = [16, 16, 32, 128]
    if task == 'detection':
        model.neck.update(in_channels=channels, out_channels=CHANNELS)
        model.rpn_head.update(in_channels=CHANNELS, feat_channels=CHANNELS)
        heads = model.roi_head
        heads.bbox_roi_extractor.out_channels = heads.mask_roi_extractor.out_channels = CHANNELS
        heads.bbox_head.update(in_channels=CHANNELS, fc_out_channels=CHANNELS)
        heads.mask_head.update(in_channels=CHANNELS, conv_out_channels=CHANNELS)
    elif task == 'segmentation':
        model.neck.update(in_channels=channels, out_channels=CHANNELS)
        model.decode_head.update(in_channels=[CHANNELS] * 4, channels=CHANNELS)
    elif task == 'upernet':
        model.decode_head.update(in_channels=channels, channels=CHANNELS)
        model.auxiliary_head.update(in_channels=channels[2], channels=CHANNELS)
    elif task in ('classification', 'distillation'):
        model.head.in_channels = channels[-1]
        if task == 'distillation':
            model.teacher, model.teacher_checkpoint = TEACHER, f'{data}/teacher.pth'
            model.backbone.with_cp = 'activations'
    else:
        levels = channels[-len(model.neck.in_channels) :]
        model.neck.update(in_channels=levels, out_channels=CHANNELS)
        model.bbox_head.update(in_channels=CHANNELS, feat_channels=CHANNELS)
    config.merge_from_dict({'work_dir': str(work_dir), 'experiment_name': work_dir.name, **changes})
    return config


def sure_model(task, folder, part='model', **changes):
    """Load a thin model for exports, as if it were sure of what it sees; also make data."""
    from mmcare.export import load_model

    make_data(task, folder / 'data')
    toy_config(task, folder / 'data', folder / 'run', **changes).dump(folder / f'{task}.py')
    source = load_model(folder / f'{task}.py', part=part)
    for name, weight in source.task.named_parameters():
        if 'head' in name and weight.dim() > 1:
            torch.nn.init.normal_(weight, std=1.5 / weight[0].numel() ** 0.5)
    return source
