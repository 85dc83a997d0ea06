_base_ = './care_s0_upernet_ade20k.py'

model = dict(
    backbone=dict(arch='s2', init_cfg=dict(checkpoint='checkpoints/care_s2_in1k.pth')),
    decode_head=dict(in_channels=[32, 64, 192, 1536]),
    auxiliary_head=dict(in_channels=192),
)
