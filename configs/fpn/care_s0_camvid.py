# Semantic FPN CARE-S0 on CamVid's street scenes, 480x360, from scratch. README.md says more.
_base_ = ['./care_s0_ade20k.py', '../_base_/from_scratch.py']

data_root = 'data/streets/CamVid'
ignored = 11  # void label; set it in five places
crop_size = (256, 320)
metainfo = dict(
    classes=(
        'sky',
        'building',
        'pole',
        'road',
        'pavement',
        'tree',
        'sign',
        'fence',
        'car',
        'pedestrian',
        'bicyclist',
    ),
    palette=[
        (128, 128, 128),
        (128, 0, 0),
        (192, 192, 128),
        (128, 64, 128),
        (60, 40, 222),
        (128, 128, 0),
        (192, 128, 128),
        (64, 64, 128),
        (64, 0, 128),
        (64, 64, 0),
        (0, 128, 192),
    ],
)
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations'),
    dict(type='RandomResize', scale=(480, 360), ratio_range=(0.75, 1.5), keep_ratio=True),
    dict(type='RandomCrop', crop_size=crop_size, cat_max_ratio=0.75, ignore_index=ignored),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PhotoMetricDistortion'),
    dict(type='PackSegInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations'),
    dict(type='PackSegInputs'),
]
dataset = dict(
    _delete_=True,
    type='BaseSegDataset',
    data_root=data_root,
    metainfo=metainfo,
    ignore_index=ignored,
    img_suffix='.png',
    # No ann_file: the lists of the data set hold paths on its authors' machine.
)
train_dataloader = dict(
    batch_size=4,
    num_workers=1,
    dataset=dict(
        **dataset,
        data_prefix=dict(img_path='train', seg_map_path='trainannot'),
        pipeline=train_pipeline,
    ),
)
val_dataloader = dict(
    num_workers=1,
    dataset=dict(
        **dataset,
        data_prefix=dict(img_path='val', seg_map_path='valannot'),
        pipeline=test_pipeline,
    ),
)
test_dataloader = dict(
    num_workers=1,
    dataset=dict(
        **dataset,
        data_prefix=dict(img_path='test', seg_map_path='testannot'),
        pipeline=test_pipeline,
    ),
)
val_evaluator = dict(ignore_index=ignored)
test_evaluator = val_evaluator

model = dict(
    data_preprocessor=dict(
        size=crop_size,
        seg_pad_val=ignored,
        test_cfg=dict(size_divisor=32),  # images keep their size; padding is cut off predictions
    ),
    backbone=_base_.care_from_scratch,
    # Narrow, so that the backbone takes most of the time on a CPU.
    neck=dict(out_channels=64),
    decode_head=dict(in_channels=[64] * 4, channels=64, num_classes=11, ignore_index=ignored),
)

iterations = 1000
train_cfg = dict(max_iters=iterations, val_interval=iterations // 4)
optim_wrapper = dict(
    optimizer=_base_.adamw_from_scratch,
    paramwise_cfg=dict(custom_keys=_base_.custom_keys_from_scratch),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=50),
    dict(type='PolyLR', power=0.9, by_epoch=False, begin=50, end=iterations),
]
auto_scale_lr = dict(base_batch_size=4)
default_hooks = dict(
    logger=dict(interval=25),
    checkpoint=dict(interval=iterations // 4),
    channels_last=dict(type='mmcare.ChannelsLastHook'),  # faster on CPUs: docs/multi_gpu.md
)
