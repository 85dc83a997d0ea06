_base_ = [
    '../_base_/models/mask_rcnn_care_fpn.py',
    '../_base_/datasets/coco_instance.py',
    '../_base_/schedules/coco_12e_adamw.py',
    '../_base_/mmdet_runtime.py',
]

model = dict(backbone=dict(arch='s0', init_cfg=dict(checkpoint='checkpoints/care_s0_in1k.pth')))
