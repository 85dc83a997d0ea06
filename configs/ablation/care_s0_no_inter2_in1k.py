# Table 4: no interaction of memory and features; the heads pool the state.
_base_ = '../imagenet/care_s0_in1k.py'

model = dict(backbone=dict(type='mmcare.CAREAblation', inter2=False), head=dict(in_channels=256))
