# RTMDet with CARE-S0, which finds boxes of objects, on your pictures.
# Copy this file and edit these five lines. Values computed from them ignore `--cfg-options`.
data_root = 'data/mine'
classes = ['person']  # as the annotations name them, in the order of their categories
size = (640, 640)  # width and height into which pictures are scaled; a GPU takes larger ones
epochs = 50
pretrained = None  # or the ImageNet weights, such as 'CARETrans_S0.pth.tar'

# In data_root: annotations, and the folders of their pictures.
train = dict(ann_file='train.json', data_prefix=dict(img='images/'))
val = dict(ann_file='val.json', data_prefix=dict(img='images/'))
test = val
batch_size = 4
channels = 64  # of neck and heads; more cost more, and learn more from many pictures

colours = [
    (220, 20, 60), (0, 130, 200), (60, 180, 75), (255, 165, 0), (145, 30, 180),
    (0, 190, 190), (240, 50, 230), (170, 110, 40), (128, 128, 0), (0, 0, 128),
]  # fmt: skip
metainfo = dict(classes=classes, palette=(colours * len(classes))[: len(classes)])
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(type='RandomResize', scale=size, ratio_range=(0.8, 1.25), keep_ratio=True),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PhotoMetricDistortion'),
    dict(type='PackDetInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=size, keep_ratio=True),
    # As in batches of training, and in exported files: 39 for 33 AP with photographs of all shapes.
    # Only the pixels change, not `img_shape`, so that boxes end at the picture's border.
    dict(
        type='KeyMapper',
        mapping=dict(img='img'),
        auto_remap=True,
        transforms=[dict(type='Pad', size=size, pad_val=dict(img=(104, 116, 124)))],  # mean, BGR
    ),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(
        type='PackDetInputs',
        meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor'),
    ),
]
dataset = dict(type='CocoDataset', data_root=data_root, metainfo=metainfo)
train_dataloader = dict(
    batch_size=batch_size,
    num_workers=2,
    persistent_workers=False,  # exact resume: see mmcare.ExactResumeHook
    sampler=dict(type='DefaultSampler', shuffle=True),
    batch_sampler=dict(type='AspectRatioBatchSampler'),
    dataset=dict(**dataset, **train, pipeline=train_pipeline),
)
val_dataloader = dict(
    batch_size=1,
    num_workers=2,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(**dataset, **val, pipeline=test_pipeline, test_mode=True),
)
test_dataloader = dict(val_dataloader, dataset=dict(val_dataloader['dataset'], **test))
val_evaluator = dict(
    type='CocoMetric', ann_file=f'{data_root}/{val["ann_file"]}', metric='bbox', classwise=True
)
test_evaluator = dict(val_evaluator, ann_file=f'{data_root}/{test["ann_file"]}')

if pretrained is None:
    weights = dict(from_scratch=True)  # what that is: see mmcare.CARE
    # A rate of 3e-3 was level after 15 epochs, and behind after 30: see docs/results.md.
    lr, betas = 1e-3, (0.9, 0.98)
    gamma_rate = 3.0  # layer scales change by the learning rate in each step, and have far to go
else:
    weights = dict(
        init_cfg=dict(type='Pretrained', checkpoint=pretrained), norm_eval=True, drop_path_rate=0.1
    )
    lr, betas = 2e-4, (0.9, 0.999)  # the paper's rate; not tried with the published weights
    gamma_rate = 1.0

model = dict(
    type='RTMDet',
    data_preprocessor=dict(
        type='DetDataPreprocessor',
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375],
        bgr_to_rgb=True,
        pad_size_divisor=32,
    ),
    backbone=dict(type='mmcare.CARE', arch='s0', out_indices=(1, 2, 3), **weights),
    neck=dict(
        type='CSPNeXtPAFPN',
        in_channels=[64, 128, 1024],
        out_channels=channels,
        num_csp_blocks=1,
        expand_ratio=0.5,
        norm_cfg=dict(type='BN'),
        act_cfg=dict(type='SiLU', inplace=True),
    ),
    bbox_head=dict(
        type='RTMDetSepBNHead',
        num_classes=len(classes),
        in_channels=channels,
        feat_channels=channels,
        stacked_convs=2,
        anchor_generator=dict(type='MlvlPointGenerator', offset=0, strides=[8, 16, 32]),
        bbox_coder=dict(type='DistancePointBBoxCoder'),
        loss_cls=dict(type='QualityFocalLoss', use_sigmoid=True, beta=2.0, loss_weight=1.0),
        loss_bbox=dict(type='GIoULoss', loss_weight=2.0),
        with_objectness=False,
        exp_on_reg=False,
        share_conv=True,
        pred_kernel_size=1,
        norm_cfg=dict(type='BN'),
        act_cfg=dict(type='SiLU', inplace=True),
    ),
    train_cfg=dict(
        assigner=dict(type='DynamicSoftLabelAssigner', topk=13),
        allowed_border=-1,
        pos_weight=-1,
    ),
    test_cfg=dict(
        nms_pre=1000,
        min_bbox_size=0,
        score_thr=0.001,
        nms=dict(type='nms', iou_threshold=0.6),
        max_per_img=100,
    ),
)

train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=epochs, val_interval=max(epochs // 10, 1))
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')
optim_wrapper = dict(
    type='OptimWrapper',
    constructor='mmcare.MergedGroupsConstructor',
    optimizer=dict(type='AdamW', lr=lr, betas=betas, weight_decay=0.05),
    paramwise_cfg=dict(
        norm_decay_mult=0.0,
        bypass_duplicate=True,
        custom_keys=dict(gamma=dict(lr_mult=gamma_rate, decay_mult=0.0)),
    ),
    clip_grad=dict(max_norm=10, norm_type=2),
)
auto_scale_lr = dict(enable=False, base_batch_size=batch_size)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=50),
    dict(type='CosineAnnealingLR', T_max=epochs, eta_min=1e-5, convert_to_iter_based=True),
]

custom_imports = dict(imports=['mmcare'], allow_failed_imports=False)
default_scope = 'mmdet'
default_hooks = dict(
    logger=dict(type='LoggerHook', interval=10, log_metric_by_epoch=False),
    checkpoint=dict(
        type='mmcare.AtomicCheckpointHook',
        interval=1,
        max_keep_ckpts=3,
        save_best='coco/bbox_mAP',  # weights alone: a third of the size
    ),
    visualization=dict(type='DetVisualizationHook'),
    safe_loading=dict(type='mmcare.SafeLoadingHook'),
    exact_resume=dict(type='mmcare.ExactResumeHook'),
    data_check=dict(type='mmcare.DataCheckHook'),
    run_record=dict(type='mmcare.RunRecordHook'),
    optimizer_check=dict(type='mmcare.OptimizerCheckHook'),
    plots=dict(type='mmcare.PlotHook'),
    summary=dict(type='mmcare.RunSummaryHook'),
    bfloat16_ops=dict(type='mmcare.BFloat16OpsHook'),
    channels_last=dict(type='mmcare.ChannelsLastHook'),
)
visualizer = dict(
    type='DetLocalVisualizer', vis_backends=[dict(type='LocalVisBackend')], name='visualizer'
)
env_cfg = dict(cudnn_benchmark=False)  # tools of the toolboxes read this line and the next
log_level = 'INFO'
randomness = dict(seed=0)
sync_bn = 'torch'  # on several GPUs
