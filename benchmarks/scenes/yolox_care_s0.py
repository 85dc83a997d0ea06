# YOLOX-tiny's neck and head on CARE-S0, trained as yolox_tiny.py.
_base_ = ['./yolox_tiny.py', '../../configs/_base_/from_scratch.py']

work_dir = 'work_dirs/scenes/yolox_care_s0'
model = dict(
    backbone=dict(
        _delete_=True,
        type='mmcare.CARE',
        arch='s0',
        out_indices=(1, 2, 3),
        **_base_.care_from_scratch,
    ),
    neck=dict(in_channels=[64, 128, 1024]),
)
optim_wrapper = dict(paramwise_cfg=dict(custom_keys=_base_.custom_keys_from_scratch))
