# Table 3, w/o Local: global learners only, on all channels.
_base_ = '../imagenet/care_s2_in1k.py'

model = dict(backbone=dict(type='mmcare.CAREAblation', decoupling='global_only'))
