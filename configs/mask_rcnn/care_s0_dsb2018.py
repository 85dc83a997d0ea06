# Mask R-CNN CARE-S0 on nuclei of the Data Science Bowl 2018, from scratch. README.md says more.
_base_ = ['./care_s0_coco.py', '../_base_/from_scratch.py']

data_root = 'data/nuclei/'
metainfo = dict(classes=('nucleus',), palette=[(220, 20, 60)])
# Images have 256x256 to 1388x1040 pixels, and nuclei are 5 to 100 pixels wide. Training scales
# images by a random factor only, and takes crops. Fluorescence is light on dark, and stained tissue
# is dark on light and coloured, so training distorts brightness, contrast and colours.
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(
        type='RandomChoice',
        transforms=[[dict(type='Resize', scale_factor=factor)] for factor in (0.75, 1.0, 1.5)],
    ),
    dict(type='RandomCrop', crop_size=(256, 256), recompute_bbox=True),
    dict(type='FilterAnnotations', min_gt_bbox_wh=(3, 3), keep_empty=True),
    # Seen from above, nuclei have no upright side.
    dict(type='RandomFlip', prob=0.5),
    dict(type='RandomFlip', prob=0.5, direction='vertical'),
    dict(type='PhotoMetricDistortion'),
    dict(type='PackDetInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    # No Pad, unlike your_data/instances.py: see docs/results.md.
    dict(type='Resize', scale_factor=1.0),  # tells the model a factor, which it expects
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(
        type='PackDetInputs',
        meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor'),
    ),
]
dataset = dict(data_root=data_root, metainfo=metainfo, data_prefix=dict(img='stage1_train/'))
train_dataloader = dict(
    batch_size=4,
    dataset=dict(**dataset, ann_file='annotations/train.json', pipeline=train_pipeline),
)
val_dataloader = dict(
    dataset=dict(**dataset, ann_file='annotations/val.json', pipeline=test_pipeline),
)
test_dataloader = dict(
    dataset=dict(**dataset, ann_file='annotations/test.json', pipeline=test_pipeline),
)
# An image has up to 375 nuclei. pycocotools computes "mAP" from at most 100 objects an image, and
# mmdet's own evaluator from as many as the last of proposal_nums.
counted = dict(proposal_nums=(100, 400, 1000), use_mp_eval=True)
val_evaluator = dict(**counted, ann_file=data_root + 'annotations/val.json')
test_evaluator = dict(**counted, ann_file=data_root + 'annotations/test.json')

model = dict(
    backbone=_base_.care_from_scratch,
    # Narrow, so that the backbone takes most of the time on a CPU.
    neck=dict(out_channels=64),
    rpn_head=dict(in_channels=64, feat_channels=64, anchor_generator=dict(scales=[4])),
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels=64),
        mask_roi_extractor=dict(out_channels=64, roi_layer=dict(output_size=7)),
        bbox_head=dict(in_channels=64, fc_out_channels=256, num_classes=1),
        mask_head=dict(in_channels=64, conv_out_channels=64, num_classes=1),
    ),
    train_cfg=dict(
        rpn_proposal=dict(nms_pre=1000, max_per_img=500),
        rcnn=dict(sampler=dict(num=128), mask_size=14),
    ),
    test_cfg=dict(rcnn=dict(max_per_img=400)),
)

epochs = 6
train_cfg = dict(max_epochs=epochs, val_interval=2)
optim_wrapper = dict(
    optimizer=_base_.adamw_from_scratch,
    clip_grad=dict(max_norm=10, norm_type=2),
    # A step of Adam moves a layer's output in proportion to its number of inputs: 3136 here.
    paramwise_cfg=dict(
        custom_keys=dict(_base_.custom_keys_from_scratch, shared_fcs=dict(lr_mult=0.15))
    ),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=50),
    dict(type='CosineAnnealingLR', T_max=epochs, eta_min=1e-5, convert_to_iter_based=True),
]
auto_scale_lr = dict(base_batch_size=4)
default_hooks = dict(logger=dict(interval=25, log_metric_by_epoch=False))
