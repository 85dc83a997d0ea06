"""Whole one-stage detectors: named maps, and descriptions of how they are decoded."""

import pytest
import torch
from helpers import THIN
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope

from mmcare.export import load_source
from mmcare.export.decoding import describe_decoding, name_outputs
from mmcare.export.source import Network

SHAPE = (64, 96)
STRIDES = [8, 16, 32]
ANCHORS = "anchor_generator=dict(type='AnchorGenerator', octave_base_scale=4, scales_per_octave=2,"
ANCHORS += f' ratios=[0.5, 2.0], strides={STRIDES})'
HEADS = dict(
    RetinaNet=f"type='RetinaHead', {ANCHORS}, bbox_coder=dict(type='DeltaXYWHBBoxCoder', "
    'target_means=[0.1] * 4, target_stds=[0.5] * 4)',
    FCOS=f"type='FCOSHead', norm_cfg=None, norm_on_bbox=True, strides={STRIDES}",
    RTMDet="type='RTMDetSepBNHead', with_objectness=False, exp_on_reg=True, anchor_generator="
    f"dict(type='MlvlPointGenerator', offset=0, strides={STRIDES}), "
    "bbox_coder=dict(type='DistancePointBBoxCoder')",
    ATSS="type='ATSSHead', norm_cfg=dict(type='GN', num_groups=2), "
    f"loss_cls=dict(type='CrossEntropyLoss'), {ANCHORS}",
    YOLOX=f"type='YOLOXHead', strides={STRIDES}",
)
THIRD = dict(FCOS=['centerness'], ATSS=['centerness'], YOLOX=['objectness'])


def load(folder, name, classes=2):
    path = folder / f'{name.lower()}.py'
    path.write_text(f"""
default_scope = 'mmdet'
model = dict(
    type='{name}',
    backbone=dict(type='mmcare.CARE', arch={THIN}, out_indices=(1, 2, 3)),
    neck=dict(type='FPN', in_channels=[16, 32, 128], out_channels=8, num_outs=3),
    bbox_head=dict(num_classes={classes}, in_channels=8, feat_channels=8, stacked_convs=1,
        {HEADS[name]}),
    test_cfg=dict(nms_pre=100_000, min_bbox_size=-1, score_thr=-1.0))
""")
    source = load_source(path, part='model')
    torch.manual_seed(0)
    for value in source.network.model.bbox_head.state_dict().values():
        if value.is_floating_point():
            value.uniform_(0.0, 0.5).sub_(0.1 * (value.dim() > 1))
    return source


def names_of(name):
    kinds = ['cls_score', 'bbox_pred', *THIRD.get(name, [])]
    return [f'{backend}{level}' for backend in kinds for level in (1, 2, 3)]


@pytest.mark.parametrize('name', HEADS)
def test_names(tmp_path, name):
    """A description only if mmdet's base head decodes."""
    network = load(tmp_path, name).network
    assert name_outputs(network, network(torch.zeros(1, 3, *SHAPE))) == names_of(name)
    decode = describe_decoding(network.model).get('decode', {})
    activation = dict(ATSS='softmax', YOLOX=None).get(name, 'sigmoid')
    assert decode.get('score_activation') == activation
    assert name == 'YOLOX' or decode['strides'] == STRIDES


def test_detectors_that_are_refused(tmp_path):
    network = load(tmp_path, 'FCOS').network
    outputs = network(torch.zeros(1, 3, *SHAPE))
    with pytest.raises(ValueError, match=r'FCOSHead are not .*--part neck'):
        name_outputs(network, [*outputs, outputs[0]])  # as VFNet has several boxes for each level
    del network.model.bbox_head  # as a classifier with several tasks
    with pytest.raises(ValueError, match='9 outputs, not one: use --part backbone'):
        name_outputs(network, outputs)
    care = dict(type='mmcare.CARE', arch=THIN, _delete_=True)
    for name in ('mask_rcnn/mask-rcnn_r50_fpn_1x_coco', 'detr/detr_r50_8xb2-150e_coco'):
        text = f"_base_ = 'mmdet::{name}.py'\nmodel = dict(backbone={care})"
        config = Config.fromstring(text, '.py')
        with DefaultScope.overwrite_default_scope('mmdet'), torch.device('meta'):
            model = MODELS.build(config.model)
        with pytest.raises(ValueError, match=r'one-stage detectors .*--part neck'):
            Network(model, 'model')
