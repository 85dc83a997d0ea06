# CARE with its two heads for the 1000 classes of ImageNet-1K.

# Hard distillation as in the released script; `model = _base_.distillation` adds it to a config.
# The teacher is timm's: pip install 'timm>=1.0'. The repository facebookresearch/deit links to its
# weights. See configs/imagenet/README.md for other teachers.
distillation = dict(
    type='mmcare.DistillationClassifier',
    teacher=dict(type='TimmClassifier', model_name='regnety_160', pretrained=False),
    teacher_checkpoint='checkpoints/regnety_160-a5fe301d.pth',
    alpha=0.5,
)
model = dict(
    type='ImageClassifier',
    data_preprocessor=dict(
        type='ClsDataPreprocessor',
        num_classes=1000,
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375],
        to_rgb=True,
    ),
    backbone=dict(type='mmcare.CARE', out_indices=(3,), drop_path_rate=0.1),
    neck=dict(type='GlobalAveragePooling'),
    head=dict(
        type='mmcare.CAREClsHead',
        num_classes=1000,
        in_channels=1024,
        loss=dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original'),
    ),
    # Each batch gets one of the two.
    train_cfg=dict(augments=[dict(type='Mixup', alpha=0.8), dict(type='CutMix', alpha=1.0)]),
)
