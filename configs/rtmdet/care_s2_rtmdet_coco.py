_base_ = './care_s0_rtmdet_coco.py'

model = dict(
    backbone=dict(arch='s2', init_cfg=dict(checkpoint='checkpoints/care_s2_in1k.pth')),
    neck=dict(in_channels=[64, 192, 1536]),
)
