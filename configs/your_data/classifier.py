# CARE-S0, which gives each picture a class, on your pictures.
# Copy this file and edit these five lines. Values computed from them ignore `--cfg-options`.
data_root = 'data/mine'
classes = ['cat', 'dog']  # names of the folders, in alphabetical order
size = (224, 224)  # width and height of what is cut out of the middle of the resized pictures
epochs = 50
pretrained = None  # or the ImageNet weights, such as 'CARETrans_S0.pth.tar'

# In data_root: a folder for each part, with a folder of pictures for each class.
train = dict(data_prefix='train/')
val = dict(data_prefix='val/')
test = val
batch_size = 32

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='RandomResizedCrop', scale=size[::-1], crop_ratio_range=(0.35, 1.0)),
    dict(type='RandomFlip', prob=0.5),
    dict(type='ColorJitter', brightness=0.4, contrast=0.4, saturation=0.4),
    dict(type='PackInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='ResizeEdge', scale=max(size), edge='short'),
    dict(type='CenterCrop', crop_size=size),
    dict(type='PackInputs'),
]
extensions = ['.jpg', '.jpeg', '.jfif', '.png', '.bmp', '.webp', '.tif', '.tiff', '.ppm', '.pgm']
dataset = dict(
    type='CustomDataset',
    data_root=data_root,
    metainfo=dict(classes=classes),
    extensions=extensions,  # mmpretrain skips other files silently
)
train_dataloader = dict(
    batch_size=batch_size,
    num_workers=2,
    persistent_workers=False,  # exact resume: see mmcare.ExactResumeHook
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(**dataset, **train, pipeline=train_pipeline),
)
val_dataloader = dict(
    batch_size=batch_size,
    num_workers=2,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(**dataset, **val, pipeline=test_pipeline, test_mode=True),
)
test_dataloader = dict(val_dataloader, dataset=dict(val_dataloader['dataset'], **test))
# Accuracy alone is high also where all pictures get the most frequent class.
val_evaluator = [
    dict(type='Accuracy', topk=1),
    dict(type='SingleLabelMetric', items=['precision', 'recall', 'f1-score']),
]
test_evaluator = val_evaluator

if pretrained is None:
    weights = dict(from_scratch=True)  # what that is: see mmcare.CARE
    lr, betas = 3e-3, (0.9, 0.98)
    gamma_rate = 3.0  # layer scales change by the learning rate in each step, and have far to go
else:
    weights = dict(init_cfg=dict(type='Pretrained', checkpoint=pretrained), drop_path_rate=0.1)
    lr, betas = 2e-4, (0.9, 0.999)  # the paper's rate; not tried with the published weights
    gamma_rate = 1.0

model = dict(
    type='ImageClassifier',
    data_preprocessor=dict(
        type='ClsDataPreprocessor',
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375],
        to_rgb=True,
        num_classes=len(classes),
    ),
    backbone=dict(type='mmcare.CARE', arch='s0', out_indices=(3,), **weights),
    neck=dict(type='GlobalAveragePooling'),
    head=dict(
        type='mmcare.CAREClsHead',
        num_classes=len(classes),
        in_channels=1024,
        loss=dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original'),
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
        flat_decay_mult=0.0,
        custom_keys=dict(gamma=dict(lr_mult=gamma_rate, decay_mult=0.0)),
    ),
    clip_grad=dict(max_norm=10, norm_type=2),
)
auto_scale_lr = dict(enable=False, base_batch_size=batch_size)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=50),
    dict(type='CosineAnnealingLR', T_max=epochs, eta_min=1e-5, convert_to_iter_based=True),
]

custom_imports = dict(imports=['mmcare', 'mmcare.classification'], allow_failed_imports=False)
default_scope = 'mmpretrain'
default_hooks = dict(
    logger=dict(type='LoggerHook', interval=10, log_metric_by_epoch=False),
    checkpoint=dict(
        type='mmcare.AtomicCheckpointHook',
        interval=1,
        max_keep_ckpts=3,
        save_best='single-label/f1-score',  # weights alone: a third of the size
        rule='greater',
    ),
    visualization=dict(type='VisualizationHook'),
    safe_loading=dict(type='mmcare.SafeLoadingHook'),
    exact_resume=dict(type='mmcare.ExactResumeHook'),
    data_check=dict(type='mmcare.DataCheckHook'),
    run_record=dict(type='mmcare.RunRecordHook'),
    optimizer_check=dict(type='mmcare.OptimizerCheckHook'),
    plots=dict(type='mmcare.PlotHook'),
    summary=dict(type='mmcare.RunSummaryHook'),
    channels_last=dict(type='mmcare.ChannelsLastHook'),
)
visualizer = dict(type='UniversalVisualizer', vis_backends=[dict(type='LocalVisBackend')])
env_cfg = dict(cudnn_benchmark=False)  # tools of the toolboxes read this line and the next
log_level = 'INFO'
randomness = dict(seed=0)
sync_bn = 'torch'  # on several GPUs
