# Table 4: no interaction of local and global features.
_base_ = '../imagenet/care_s0_in1k.py'

model = dict(backbone=dict(type='mmcare.CAREAblation', inter1=False))
