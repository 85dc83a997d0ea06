# YOLOX-tiny with mmdet's backbone, trained from scratch on generated scenes, on two CPU cores.
_base_ = 'mmdet::yolox/yolox_tiny_8xb8-300e_coco.py'

custom_imports = dict(imports=['mmcare'], allow_failed_imports=False)

work_dir = 'work_dirs/scenes/yolox_tiny'
data_root = 'data/scenes/coco/'
size = (160, 160)
metainfo = dict(
    classes=('airplane', 'sports ball', 'kite'),
    palette=[(220, 20, 60), (0, 125, 92), (0, 82, 255)],
)
gray = dict(img=(114.0, 114.0, 114.0))
# No mosaic and no mixup: they need many epochs.
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(type='Resize', scale=size, keep_ratio=True),
    dict(type='RandomFlip', prob=0.5),
    dict(type='Pad', pad_to_square=True, pad_val=gray),
    dict(type='PackDetInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=size, keep_ratio=True),
    dict(type='Pad', pad_to_square=True, pad_val=gray),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(
        type='PackDetInputs',
        meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor'),
    ),
]
train_dataloader = dict(
    num_workers=1,
    dataset=dict(
        _delete_=True,
        type='CocoDataset',
        data_root=data_root,
        metainfo=metainfo,
        ann_file='annotations/instances_train2017.json',
        data_prefix=dict(img='train2017/'),
        pipeline=train_pipeline,
    ),
)
val_dataloader = dict(
    num_workers=1,
    dataset=dict(data_root=data_root, metainfo=metainfo, pipeline=test_pipeline),
)
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + 'annotations/instances_val2017.json')
test_evaluator = val_evaluator

model = dict(
    data_preprocessor=dict(batch_augments=None),  # no other sizes
    bbox_head=dict(num_classes=3),
)

auto_scale_lr = dict(base_batch_size=8)
epochs = 20
train_cfg = dict(max_epochs=epochs, val_interval=epochs)
optim_wrapper = dict(
    optimizer=dict(_delete_=True, type='AdamW', lr=1e-3, betas=(0.9, 0.98), weight_decay=0.05),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=50),
    dict(type='CosineAnnealingLR', T_max=epochs, eta_min=1e-5, convert_to_iter_based=True),
]
custom_hooks = []
default_hooks = dict(checkpoint=dict(interval=1, max_keep_ckpts=1), logger=dict(interval=10))
randomness = dict(seed=0)
