# Table 5: linear attention also in stages 1 and 2, instead of strip convolutions.
_base_ = '../imagenet/care_s2_in1k.py'

model = dict(backbone=dict(type='mmcare.CAREAblation', early_conv=False))
