_base_ = './care_s0_in1k.py'

model = _base_.distillation
