# Mask R-CNN CARE-S0, trained from scratch on generated scenes, on two CPU cores.
_base_ = ['../mask_rcnn/care_s0_coco.py', '../_base_/from_scratch.py']

work_dir = 'work_dirs/demo'
data_root = 'data/scenes/coco/'
size = (160, 160)  # twice the largest object
metainfo = dict(
    classes=('airplane', 'sports ball', 'kite'),
    palette=[(220, 20, 60), (0, 125, 92), (0, 82, 255)],
)
train_pipeline = [
    dict(step, scale=size) if step.type == 'Resize' else step for step in _base_.train_pipeline
]
test_pipeline = [
    dict(step, scale=size) if step.type == 'Resize' else step for step in _base_.test_pipeline
]
train_dataloader = dict(
    batch_size=3,
    dataset=dict(data_root=data_root, metainfo=metainfo, pipeline=train_pipeline),
)
val_dataloader = dict(
    dataset=dict(data_root=data_root, metainfo=metainfo, pipeline=test_pipeline),
)
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + 'annotations/instances_val2017.json')
test_evaluator = val_evaluator

model = dict(
    backbone=_base_.care_from_scratch,
    # Narrow, so that on a CPU the backbone is what costs.
    neck=dict(out_channels=64),
    # The objects have 12 to 80 pixels: anchors are half as large as for COCO.
    rpn_head=dict(in_channels=64, feat_channels=64, anchor_generator=dict(scales=[4])),
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels=64),
        # Masks of 14 x 14: at 28 x 28 their head alone is more than half the arithmetic of a step.
        mask_roi_extractor=dict(out_channels=64, roi_layer=dict(output_size=7)),
        bbox_head=dict(in_channels=64, fc_out_channels=256, num_classes=3),
        mask_head=dict(in_channels=64, conv_out_channels=64, num_classes=3),
    ),
    # Scenes are small and hold six objects at most.
    train_cfg=dict(
        rpn_proposal=dict(nms_pre=500, max_per_img=200),
        rcnn=dict(sampler=dict(num=40), mask_size=14),
    ),
    test_cfg=dict(rpn=dict(max_per_img=100)),
)

epochs = 5
train_cfg = dict(max_epochs=epochs)
optim_wrapper = dict(
    optimizer=_base_.adamw_from_scratch,
    # A step of Adam moves a layer's output in proportion to its inputs: 3136 of the first fully
    # connected layer, 576 of the 3x3 convolutions, a few hundred in the backbone.
    paramwise_cfg=dict(
        custom_keys=dict(_base_.custom_keys_from_scratch, shared_fcs=dict(lr_mult=0.15))
    ),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=50),
    dict(type='CosineAnnealingLR', T_max=epochs, eta_min=1e-5, convert_to_iter_based=True),
]
auto_scale_lr = dict(base_batch_size=3)
default_hooks = dict(logger=dict(interval=10))
