# Table 4: no memory; Inter2 expands the features alone.
_base_ = '../imagenet/care_s0_in1k.py'

model = dict(backbone=dict(type='mmcare.CAREAblation', memory=False), head=dict(in_channels=768))
