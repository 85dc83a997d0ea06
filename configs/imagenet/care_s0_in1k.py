_base_ = [
    '../_base_/models/care_classifier.py',
    '../_base_/datasets/imagenet.py',
    '../_base_/schedules/imagenet_300e_adamw.py',
    '../_base_/mmpretrain_runtime.py',
]

model = dict(backbone=dict(arch='s0'))
