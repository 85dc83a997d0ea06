_base_ = './care_s0_distill_in1k.py'

model = dict(backbone=dict(arch='s1'))
