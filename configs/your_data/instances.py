# Mask R-CNN with CARE-S0, which finds boxes and masks of objects, on your pictures.
# Copy this file and edit these five lines. Values computed from them ignore `--cfg-options`.
data_root = 'data/mine'
classes = ['person']  # as the annotations name them, in the order of their categories
size = (640, 640)  # width and height into which pictures are scaled; a GPU takes larger ones
epochs = 50
pretrained = None  # or the ImageNet weights, such as 'CARETrans_S0.pth.tar'

_base_ = 'mmdet::_base_/models/mask-rcnn_r50_fpn.py'

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
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='RandomResize', scale=size, ratio_range=(0.8, 1.25), keep_ratio=True),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PhotoMetricDistortion'),
    dict(type='PackDetInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=size, keep_ratio=True),
    # As in batches of training, and in exported files: box AP 49 for 47, and 47 for 42 (two seeds).
    # Only the pixels change, not `img_shape`, so that boxes end at the picture's border.
    dict(
        type='KeyMapper',
        mapping=dict(img='img'),
        auto_remap=True,
        transforms=[dict(type='Pad', size=size, pad_val=dict(img=(104, 116, 124)))],  # mean, BGR
    ),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
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
    type='CocoMetric',
    ann_file=f'{data_root}/{val["ann_file"]}',
    metric=['bbox', 'segm'],
    classwise=True,
)
test_evaluator = dict(val_evaluator, ann_file=f'{data_root}/{test["ann_file"]}')

if pretrained is None:
    weights = dict(from_scratch=True)  # what that is: see mmcare.CARE
    lr, betas = 3e-3, (0.9, 0.98)
    gamma_rate = 3.0  # layer scales change by the learning rate in each step, and have far to go
    # Adam moves a layer's output in proportion to its inputs, of which shared_fcs have most.
    fc_rate = 0.15
else:
    weights = dict(
        init_cfg=dict(type='Pretrained', checkpoint=pretrained), norm_eval=True, drop_path_rate=0.1
    )
    lr, betas = 2e-4, (0.9, 0.999)  # the paper's rate; not tried with the published weights
    gamma_rate = fc_rate = 1.0

# What is not set here is as in mmdet's Mask R-CNN. -1: no proposal is too small.
proposals = dict(nms_pre=1000, max_per_img=500, min_bbox_size=-1)
model = dict(
    data_preprocessor=dict(
        mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375], bgr_to_rgb=True
    ),
    backbone=dict(_delete_=True, type='mmcare.CARE', arch='s0', **weights),
    neck=dict(in_channels=[32, 64, 128, 1024], out_channels=channels),
    rpn_head=dict(in_channels=channels, feat_channels=channels),
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels=channels),
        bbox_head=dict(
            in_channels=channels, fc_out_channels=4 * channels, num_classes=len(classes)
        ),
        mask_roi_extractor=dict(out_channels=channels),
        mask_head=dict(in_channels=channels, conv_out_channels=channels, num_classes=len(classes)),
    ),
    train_cfg=dict(rpn_proposal=proposals, rcnn=dict(sampler=dict(num=128))),
    test_cfg=dict(rpn=proposals),
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
        custom_keys=dict(
            gamma=dict(lr_mult=gamma_rate, decay_mult=0.0), shared_fcs=dict(lr_mult=fc_rate)
        ),
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
        save_best='coco/segm_mAP',  # weights alone: a third of the size
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
