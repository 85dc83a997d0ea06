# RetinaNet CARE-S0 on BCCD's blood cells, 640x480 halved, from scratch. README.md says more.
_base_ = ['./care_s0_retinanet_coco.py', '../_base_/from_scratch.py']

data_root = 'data/cells/BCCD/'
size = (320, 240)
metainfo = dict(
    classes=('RBC', 'WBC', 'Platelets'),
    palette=[(220, 20, 60), (0, 82, 255), (0, 125, 92)],
)
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(type='RandomResize', scale=size, ratio_range=(0.8, 1.25), keep_ratio=True),
    # Seen from above, cells have no upright side.
    dict(type='RandomFlip', prob=0.5),
    dict(type='RandomFlip', prob=0.5, direction='vertical'),
    dict(type='PhotoMetricDistortion'),
    dict(type='PackDetInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=size, keep_ratio=True),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(
        type='PackDetInputs',
        # CocoMetric takes the annotated objects from here, since there is no file in COCO's format.
        meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor', 'instances'),
    ),
]
dataset = dict(
    _delete_=True,
    type='VOCDataset',
    data_root=data_root,
    data_prefix=dict(sub_data_root=''),
    metainfo=metainfo,
    # In training and validation one box each has no area.
    filter_cfg=dict(bbox_min_size=1),
)
train_dataloader = dict(
    batch_size=4,
    dataset=dict(**dataset, ann_file='ImageSets/Main/train.txt', pipeline=train_pipeline),
)
val_dataloader = dict(
    dataset=dict(**dataset, ann_file='ImageSets/Main/val.txt', pipeline=test_pipeline),
)
test_dataloader = dict(
    dataset=dict(**dataset, ann_file='ImageSets/Main/test.txt', pipeline=test_pipeline),
)
val_evaluator = [
    dict(type='CocoMetric', metric='bbox', classwise=True),
    dict(type='VOCMetric', metric='mAP', eval_mode='area'),
]
test_evaluator = val_evaluator

model = dict(
    backbone=_base_.care_from_scratch,
    # Narrow, so that the backbone takes most of the time on a CPU. Platelets have 20 pixels here,
    # so anchors are half as large as for COCO.
    neck=dict(out_channels=64, add_extra_convs='on_output'),
    bbox_head=dict(
        num_classes=3,
        in_channels=64,
        feat_channels=64,
        anchor_generator=dict(octave_base_scale=2),
        # RetinaNet's own weights have a standard deviation of 0.01, and let hardly any signal
        # through four layers of 64 channels without norms: the rate of 3e-3 then destroys the head.
        # The two last layers keep theirs: with larger ones, training begins with large errors.
        init_cfg=dict(
            type='Kaiming',
            layer='Conv2d',
            mode='fan_in',
            distribution='normal',
            override=[
                dict(type='Normal', name='retina_cls', std=0.01, bias_prob=0.01),
                dict(type='Normal', name='retina_reg', std=0.01),
            ],
        ),
    ),
)

epochs = 20
train_cfg = dict(max_epochs=epochs, val_interval=4)
optim_wrapper = dict(
    optimizer=_base_.adamw_from_scratch,
    clip_grad=dict(max_norm=10, norm_type=2),
    paramwise_cfg=dict(custom_keys=_base_.custom_keys_from_scratch),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=200),
    dict(type='CosineAnnealingLR', T_max=epochs, eta_min=1e-5, convert_to_iter_based=True),
]
auto_scale_lr = dict(base_batch_size=4)
default_hooks = dict(
    logger=dict(interval=25, log_metric_by_epoch=False),
    channels_last=dict(type='mmcare.ChannelsLastHook'),  # faster on CPUs: docs/multi_gpu.md
)
