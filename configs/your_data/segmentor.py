# Semantic FPN with CARE-S0, which gives each pixel a class, on your pictures.
# Copy this file and edit these five lines. Values computed from them ignore `--cfg-options`.
data_root = 'data/mine'
classes = ['background', 'person']  # of the values 0, 1, ... in the masks; 255 is ignored
size = (640, 480)  # width and height into which pictures are scaled, or of crops
epochs = 50
pretrained = None  # or the ImageNet weights, such as 'CARETrans_S0.pth.tar'

# In data_root: folders of pictures and masks, and lists of their names without these endings.
files = dict(
    data_prefix=dict(img_path='images/', seg_map_path='masks/'),
    img_suffix='.jpg',
    seg_map_suffix='.png',
)
train = dict(ann_file='train.txt', **files)
val = dict(ann_file='val.txt', **files)
test = val
batch_size = 4
channels = 64  # of neck and head; more cost more, and learn more from many pictures

colours = [
    (220, 20, 60), (0, 130, 200), (60, 180, 75), (255, 165, 0), (145, 30, 180),
    (0, 190, 190), (240, 50, 230), (170, 110, 40), (128, 128, 0), (0, 0, 128),
]  # fmt: skip
metainfo = dict(classes=classes, palette=(colours * len(classes))[: len(classes)])
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations'),
    dict(type='RandomResize', scale=size, ratio_range=(0.75, 1.5), keep_ratio=True),
    dict(type='RandomCrop', crop_size=size[::-1], cat_max_ratio=0.9),
    # dict(type='Pad', size=size, pad_val=dict(img=(104, 116, 124), seg=0)),  # for a rare class
    dict(type='RandomFlip', prob=0.5),
    dict(type='PhotoMetricDistortion'),
    dict(type='PackSegInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=size, keep_ratio=True),
    dict(type='LoadAnnotations'),  # after Resize: predictions are compared in the picture's size
    dict(type='PackSegInputs'),
]
dataset = dict(type='BaseSegDataset', data_root=data_root, metainfo=metainfo)
train_dataloader = dict(
    batch_size=batch_size,
    num_workers=2,
    persistent_workers=False,  # exact resume: see mmcare.ExactResumeHook
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(**dataset, **train, pipeline=train_pipeline),
)
val_dataloader = dict(
    batch_size=1,
    num_workers=2,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(**dataset, **val, pipeline=test_pipeline, test_mode=True),
)
test_dataloader = dict(val_dataloader, dataset=dict(val_dataloader['dataset'], **test))
val_evaluator = dict(type='IoUMetric')
test_evaluator = val_evaluator

if pretrained is None:
    weights = dict(from_scratch=True)  # what that is: see mmcare.CARE
    lr, betas = 3e-3, (0.9, 0.98)
    gamma_rate = 3.0  # layer scales change by the learning rate in each step, and have far to go
else:
    weights = dict(
        init_cfg=dict(type='Pretrained', checkpoint=pretrained), norm_eval=True, drop_path_rate=0.1
    )
    lr, betas = 2e-4, (0.9, 0.999)  # the paper's rate; not tried with the published weights
    gamma_rate = 1.0

model = dict(
    type='EncoderDecoder',
    data_preprocessor=dict(
        type='SegDataPreProcessor',
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375],
        bgr_to_rgb=True,
        size=size[::-1],
        test_cfg=dict(size_divisor=32),  # the head resizes maps to each other's sizes
    ),
    backbone=dict(type='mmcare.CARE', arch='s0', **weights),
    neck=dict(type='FPN', in_channels=[32, 64, 128, 1024], out_channels=channels, num_outs=4),
    decode_head=dict(
        type='FPNHead',
        in_channels=[channels] * 4,
        in_index=[0, 1, 2, 3],
        feature_strides=[4, 8, 16, 32],
        channels=channels,
        num_classes=len(classes),
        norm_cfg=dict(type='BN'),
        # For a class with 1% of the pixels, add class_weight=[1.0, 10.0] here, set
        # cat_max_ratio=0.99 in RandomCrop, and add the line after it: mmseg's class weights fail
        # where pixels are ignored. On 120 drawn pictures that needed no padding, the IoU after 12
        # epochs was 20% with the first two settings, and 0 without (one seed).
        loss_decode=dict(type='CrossEntropyLoss', avg_non_ignore=True),
    ),
    test_cfg=dict(mode='whole'),
)

train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=epochs, val_interval=max(epochs // 10, 1))
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')
optim_wrapper = dict(
    type='OptimWrapper',
    constructor='mmcare.MergedGroupsConstructor',
    optimizer=dict(type='AdamW', lr=lr, betas=betas, weight_decay=0.05),
    paramwise_cfg=dict(
        norm_decay_mult=0.0, custom_keys=dict(gamma=dict(lr_mult=gamma_rate, decay_mult=0.0))
    ),
    clip_grad=dict(max_norm=10, norm_type=2),
)
auto_scale_lr = dict(enable=False, base_batch_size=batch_size)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=50),
    dict(type='CosineAnnealingLR', T_max=epochs, eta_min=1e-5, convert_to_iter_based=True),
]

custom_imports = dict(imports=['mmcare'], allow_failed_imports=False)
default_scope = 'mmseg'
default_hooks = dict(
    logger=dict(type='LoggerHook', interval=10, log_metric_by_epoch=False),
    checkpoint=dict(
        type='mmcare.AtomicCheckpointHook',
        interval=1,
        max_keep_ckpts=3,
        save_best='mIoU',  # weights alone: a third of the size
    ),
    visualization=dict(type='SegVisualizationHook', interval=1),
    safe_loading=dict(type='mmcare.SafeLoadingHook'),
    exact_resume=dict(type='mmcare.ExactResumeHook'),
    data_check=dict(type='mmcare.DataCheckHook'),
    run_record=dict(type='mmcare.RunRecordHook'),
    optimizer_check=dict(type='mmcare.OptimizerCheckHook'),
    plots=dict(type='mmcare.PlotHook'),
    summary=dict(type='mmcare.RunSummaryHook'),
    channels_last=dict(type='mmcare.ChannelsLastHook'),
)
visualizer = dict(
    type='SegLocalVisualizer', vis_backends=[dict(type='LocalVisBackend')], name='visualizer'
)
env_cfg = dict(cudnn_benchmark=False)  # tools of the toolboxes read this line and the next
log_level = 'INFO'
randomness = dict(seed=0)
sync_bn = 'torch'  # on several GPUs
