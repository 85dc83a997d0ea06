# Table 5: local learners of 3x3 alone, instead of 3x3 and 7x7.
_base_ = '../imagenet/care_s1_in1k.py'

model = dict(backbone=dict(type='mmcare.CAREAblation', multi_scale=False))
