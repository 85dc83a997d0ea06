_base_ = './care_s0_upernet_ade20k.py'

model = dict(backbone=dict(arch='s1', init_cfg=dict(checkpoint='checkpoints/care_s1_in1k.pth')))
