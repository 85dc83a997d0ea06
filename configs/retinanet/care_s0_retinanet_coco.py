_base_ = [
    '../_base_/models/retinanet_care_fpn.py',
    '../_base_/datasets/coco_detection.py',
    '../_base_/schedules/coco_12e_adamw.py',
    '../_base_/mmdet_runtime.py',
]

model = dict(backbone=dict(arch='s0', init_cfg=dict(checkpoint='checkpoints/care_s0_in1k.pth')))
