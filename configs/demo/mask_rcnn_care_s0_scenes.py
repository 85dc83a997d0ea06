# Mask R-CNN CARE-S0, trained from scratch on generated scenes: ten minutes on two CPU cores.
_base_ = '../mask_rcnn/care_s0_coco.py'

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
    # No file of weights, and the norms learn. The published initialisation (std 0.02), layer scale
    # (1e-6) and drop path are meant for hundreds of epochs: with them the blocks would pass hardly
    # any signal for as long as this run takes.
    backbone=dict(
        init_cfg=[
            dict(type='Kaiming', layer=['Conv2d'], mode='fan_in', distribution='normal'),
            dict(type='Constant', layer=['_BatchNorm'], val=1.0, bias=0.0),
        ],
        norm_eval=False,
        layer_scale_init_value=0.1,
        drop_path_rate=0.0,
    ),
    roi_head=dict(
        bbox_head=dict(num_classes=3),
        mask_head=dict(num_classes=3),
        # Masks of 14 x 14: at 28 x 28 their head alone is more than half the arithmetic of a step.
        mask_roi_extractor=dict(roi_layer=dict(output_size=7)),
    ),
    # Scenes are small and hold six objects at most.
    train_cfg=dict(
        rpn_proposal=dict(nms_pre=500, max_per_img=200),
        rcnn=dict(sampler=dict(num=40), mask_size=14),
    ),
    test_cfg=dict(rpn=dict(max_per_img=100)),
)

train_cfg = dict(max_epochs=2)
optim_wrapper = dict(
    # The second moment forgets the first steps within this short run.
    optimizer=dict(lr=1e-3, betas=(0.9, 0.98), fused=True),
    # A step of Adam moves a layer's output in proportion to its inputs: 12544 of the first fully
    # connected layer, 2304 of the 3x3 convolutions, a few hundred in the backbone.
    paramwise_cfg=dict(
        custom_keys=dict(
            neck=dict(lr_mult=0.2),
            rpn_head=dict(lr_mult=0.2),
            mask_head=dict(lr_mult=0.2),
            bbox_head=dict(lr_mult=0.3),
            shared_fcs=dict(lr_mult=0.04),
        )
    ),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=50),
    dict(
        type='CosineAnnealingLR',
        by_epoch=True,
        begin=1,
        end=2,
        T_max=1,
        eta_min=1e-5,
        convert_to_iter_based=True,
    ),
]
default_hooks = dict(logger=dict(interval=10))
