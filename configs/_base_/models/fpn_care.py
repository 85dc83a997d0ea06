# Semantic FPN (Kirillov et al., 2019) on a CARE backbone; 150 classes of ADE20K.
model = dict(
    type='EncoderDecoder',
    data_preprocessor=dict(
        type='SegDataPreProcessor',
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375],
        bgr_to_rgb=True,
        pad_val=0,
        seg_pad_val=255,
        size=(512, 512),
    ),
    backbone=dict(
        type='mmcare.CARE',
        drop_path_rate=0.1,
        norm_eval=True,  # as in RepViT, MobileViGv2 and EfficientFormerV2
        init_cfg=dict(type='Pretrained'),
    ),
    neck=dict(type='FPN', in_channels=[32, 64, 128, 1024], out_channels=256, num_outs=4),
    decode_head=dict(
        type='FPNHead',
        in_channels=[256, 256, 256, 256],
        in_index=[0, 1, 2, 3],
        feature_strides=[4, 8, 16, 32],
        channels=128,
        dropout_ratio=0.1,
        num_classes=150,
        norm_cfg=dict(type='BN'),
        align_corners=False,
        # The mean over labelled pixels; mmseg's default also divides by the ignored ones.
        loss_decode=dict(type='CrossEntropyLoss', avg_non_ignore=True, loss_weight=1.0),
    ),
    train_cfg=dict(),
    test_cfg=dict(mode='whole'),
)
