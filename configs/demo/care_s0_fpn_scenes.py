# Semantic FPN CARE-S0, trained from scratch on generated scenes, on two CPU cores.
_base_ = ['../fpn/care_s0_ade20k.py', '../_base_/from_scratch.py']

work_dir = 'work_dirs/demo_seg'
data_root = 'data/scenes/ade20k'
# What occurs: mmseg's mean IoU counts each class that is predicted but never occurs as zero.
metainfo = dict(
    classes=('sky', 'floor', 'grass', 'curtain', 'rug', 'flower', 'airplane', 'ball'),
    palette=[
        (6, 230, 230),
        (80, 50, 50),
        (4, 250, 7),
        (255, 51, 7),
        (255, 9, 92),
        (255, 0, 0),
        (0, 255, 194),
        (255, 184, 0),
    ],
)
sizes = dict(
    # Textures have a narrow range of sizes.
    RandomResize=dict(scale=(640, 160), ratio_range=(0.75, 1.5)),
    RandomCrop=dict(crop_size=(128, 128)),
    Resize=dict(scale=(640, 160)),
)
train_pipeline = [dict(step, **sizes.get(step.type, {})) for step in _base_.train_pipeline]
test_pipeline = [dict(step, **sizes.get(step.type, {})) for step in _base_.test_pipeline]
train_dataloader = dict(
    batch_size=4,
    num_workers=1,
    dataset=dict(data_root=data_root, metainfo=metainfo, pipeline=train_pipeline),
)
val_dataloader = dict(
    num_workers=1,
    dataset=dict(data_root=data_root, metainfo=metainfo, pipeline=test_pipeline),
)
test_dataloader = val_dataloader

model = dict(
    data_preprocessor=dict(size=(128, 128)),
    backbone=_base_.care_from_scratch,
    # Narrow, so that on a CPU the backbone is what costs.
    neck=dict(out_channels=64),
    decode_head=dict(in_channels=[64] * 4, channels=64, num_classes=8),
)

iterations = 1200
train_cfg = dict(max_iters=iterations, val_interval=iterations // 3)
optim_wrapper = dict(
    optimizer=_base_.adamw_from_scratch,
    paramwise_cfg=dict(custom_keys=_base_.custom_keys_from_scratch),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=30),
    dict(type='PolyLR', power=0.9, by_epoch=False, begin=30, end=iterations),
]
auto_scale_lr = dict(base_batch_size=4)
default_hooks = dict(
    logger=dict(interval=10),
    checkpoint=dict(interval=iterations),
    channels_last=dict(type='mmcare.ChannelsLastHook'),  # faster on CPUs: docs/multi_gpu.md
)
