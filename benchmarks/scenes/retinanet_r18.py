# RetinaNet with ResNet-18, trained from scratch on generated scenes, on two CPU cores.
_base_ = 'mmdet::retinanet/retinanet_r18_fpn_1x_coco.py'

custom_imports = dict(imports=['mmcare'], allow_failed_imports=False)

work_dir = 'work_dirs/scenes/retinanet_r18'
data_root = 'data/scenes/coco/'
size = (160, 160)
metainfo = dict(classes=('airplane', 'sports ball', 'kite'))
train_pipeline = [
    dict(step, scale=size) if step.type == 'Resize' else step for step in _base_.train_pipeline
]
test_pipeline = [
    dict(step, scale=size) if step.type == 'Resize' else step for step in _base_.test_pipeline
]
train_dataloader = dict(
    batch_size=8,
    num_workers=1,
    dataset=dict(data_root=data_root, metainfo=metainfo, pipeline=train_pipeline),
)
val_dataloader = dict(
    num_workers=1,
    dataset=dict(data_root=data_root, metainfo=metainfo, pipeline=test_pipeline),
)
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + 'annotations/instances_val2017.json')
test_evaluator = val_evaluator

model = dict(
    # Random weights need norms that learn.
    backbone=dict(frozen_stages=-1, norm_eval=False, init_cfg=None),
    bbox_head=dict(num_classes=3),
)

epochs = 5
train_cfg = dict(max_epochs=epochs, val_interval=epochs)
optim_wrapper = dict(optimizer=dict(_delete_=True, type='AdamW', lr=1e-3, weight_decay=0.05))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=50),
    dict(type='CosineAnnealingLR', T_max=epochs, eta_min=1e-5, convert_to_iter_based=True),
]
auto_scale_lr = dict(base_batch_size=8)
default_hooks = dict(checkpoint=dict(max_keep_ckpts=1), logger=dict(interval=10))
randomness = dict(seed=0)
