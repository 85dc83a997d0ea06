# Table 3, w/ Sta: local, global and local again, on all channels.
_base_ = '../imagenet/care_s2_in1k.py'

model = dict(backbone=dict(type='mmcare.CAREAblation', decoupling='stacked'))
