# mmdet's RetinaNet with FPN (Lin et al., 2017) on a CARE backbone; 80 classes of COCO.
_base_ = 'mmdet::_base_/models/retinanet_r50_fpn.py'

model = dict(
    backbone=dict(
        _delete_=True,
        type='mmcare.CARE',
        drop_path_rate=0.1,
        norm_eval=True,
        init_cfg=dict(type='Pretrained'),
    ),
    neck=dict(in_channels=[32, 64, 128, 1024]),
)
