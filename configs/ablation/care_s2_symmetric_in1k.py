# Table 3, w/ Sym: half of the channels global, half local.
_base_ = '../imagenet/care_s2_in1k.py'

model = dict(backbone=dict(type='mmcare.CAREAblation', decoupling='symmetric'))
