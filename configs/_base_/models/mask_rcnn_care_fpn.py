# mmdet's Mask R-CNN with FPN (He et al., 2017) on a CARE backbone; 80 classes of COCO.
_base_ = 'mmdet::_base_/models/mask-rcnn_r50_fpn.py'

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
