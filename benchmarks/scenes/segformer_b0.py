# SegFormer-B0, trained from scratch on generated scenes, on two CPU cores.
_base_ = 'mmseg::segformer/segformer_mit-b0_8xb2-160k_ade20k-512x512.py'

custom_imports = dict(imports=['mmcare'], allow_failed_imports=False)

work_dir = 'work_dirs/scenes/segformer_b0'
data_root = 'data/scenes/ade20k'
# What occurs: mmseg's mean IoU counts each class that is predicted but never occurs as zero.
metainfo = dict(
    classes=('sky', 'floor', 'grass', 'curtain', 'rug', 'flower', 'airplane', 'ball'),
)
sizes = dict(
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
    backbone=dict(init_cfg=None),
    decode_head=dict(num_classes=8, norm_cfg=dict(type='BN')),
)

iterations = 300
train_cfg = dict(max_iters=iterations, val_interval=iterations)
optim_wrapper = dict(optimizer=dict(lr=1e-3))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=30),
    dict(type='PolyLR', power=0.9, by_epoch=False, begin=30, end=iterations),
]
auto_scale_lr = dict(base_batch_size=4)
default_hooks = dict(checkpoint=dict(interval=iterations), logger=dict(interval=10))
randomness = dict(seed=0)
