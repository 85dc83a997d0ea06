"""Tasks: which part of a model is which, and how outputs are named and described."""

from unittest import mock

import pytest
import torch
from helpers import ROOT, THIN
from mmengine.config import Config
from mmengine.dataset import BaseDataset
from mmengine.registry import MODELS, DefaultScope
from torch import nn

from mmcare.deployment import BackboneInfo
from mmcare.export import load_model
from mmcare.export.pipelines import choose_shape
from mmcare.export.tasks import make_task
from mmcare.export.tasks.base import describe_classes
from mmcare.export.tasks.classifier import Classifier
from mmcare.export.tasks.one_stage_detector import describe_decoding
from mmcare.export.tasks.segmentor import Segmentor

pytest.importorskip('mmdet')
from mmdet.models.dense_heads.base_dense_head import BaseDenseHead

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
    test_cfg=dict(nms_pre=100_000, min_bbox_size=-1, score_thr=-1.0,
        nms=dict(type='nms', iou_threshold=0.5)))
""")
    source = load_model(path, part='model')
    torch.manual_seed(0)
    for value in source.task.head.state_dict().values():
        if value.is_floating_point():
            value.uniform_(0.0, 0.5).sub_(0.1 * (value.dim() > 1))
    return source


def names_of(name):
    kinds = ['cls_score', 'bbox_pred', *THIRD.get(name, [])]
    return [f'{backend}{level}' for backend in kinds for level in (1, 2, 3)]


@pytest.mark.parametrize('name', HEADS)
def test_names(tmp_path, name):
    """A description only if mmdet's base head decodes."""
    task = load(tmp_path, name).task
    assert task.name_outputs(task(torch.zeros(1, 3, *SHAPE))) == names_of(name)
    decode = describe_decoding(task.head).get('decode', {})
    activation = dict(ATSS='softmax', YOLOX=None).get(name, 'sigmoid')
    assert decode.get('score_activation') == activation
    assert name == 'YOLOX' or decode['strides'] == STRIDES


def test_detectors_that_are_refused(tmp_path):
    task = load(tmp_path, 'FCOS').task
    outputs = task(torch.zeros(1, 3, *SHAPE))
    with pytest.raises(ValueError, match=r"FCOSHead are not .*part='neck'"):
        task.name_outputs([*outputs, outputs[0]])  # as VFNet has several boxes for each level
    with pytest.raises(ValueError, match='FCOSHead does not predict from one map'):
        Classifier.name_outputs(task, outputs)  # as a classifier with several tasks
    task.model.bbox_head.__class__ = type('OwnHead', (BaseDenseHead,), {})
    with pytest.raises(ValueError, match='OwnHead are not known by name'):
        task.name_outputs(outputs)
    care = dict(type='mmcare.CARE', arch=THIN, _delete_=True)
    for name, words in (
        ('htc/htc_r50_fpn_1x_coco', r"HybridTaskCascadeRoIHead computes .*: use part='neck'"),
        ('solo/solo_r50_fpn_1x_coco', r"detectors with queries are .* not a SOLO: use part='neck'"),
    ):
        text = f"_base_ = 'mmdet::{name}.py'\nmodel = dict(backbone={care})"
        config = Config.fromstring(text, '.py')
        with DefaultScope.overwrite_default_scope('mmdet'), torch.device('meta'):
            model = MODELS.build(config.model)
        with pytest.raises(ValueError, match=words):
            make_task(model, 'model')


def test_scores():
    """Classes are the test data's, named or a class, if they are as many as the head's."""
    metainfo = dict(classes=['a', 'b'], palette=[[1, 2, 3], [4, 5, 6]])
    two = type('Two', (BaseDataset,), dict(METAINFO=metainfo))
    many = type('MultiLabelClsHead', (nn.Module,), {})
    for kind, number, expected in (two, 2, metainfo), (two, 3, {}), ('ConcatDataset', 2, {}):
        for task, head, channels, activation in (
            (Classifier, nn.Module(), number, 'softmax'),
            (Classifier, many(), number, 'sigmoid'),
            (Segmentor, nn.Module(), number, 'softmax'),
            (Segmentor, nn.Module(), 1, 'sigmoid'),
        ):
            head.num_classes = number
            head.align_corners = task is Segmentor
            if channels == 1:
                head.threshold = 0.4
            model = nn.Module()
            setattr(model, 'decode_head' if task is Segmentor else task.head_name, head)
            config = Config(dict(test_dataloader=dict(dataset=dict(type=kind))))
            described = task(model, '', BackboneInfo()).describe(config, [torch.ones(1, channels)])
            assert described.pop('threshold', None) == getattr(head, 'threshold', None)
            assert described.pop('align_corners', False) == head.align_corners
            assert described.pop('reduce_zero_label', False) is False  # of segmentors
            assert described == dict(expected, activation=activation)


def test_classes_that_are_numbers():
    two = type('Two', (BaseDataset,), dict(METAINFO=dict(classes=(0, 1), palette=[(1, 2, 3)] * 2)))
    described = describe_classes(Config(dict(test_dataloader=dict(dataset=dict(type=two)))), 2)
    assert described == dict(classes=['0', '1'], palette=[[1, 2, 3]] * 2)


def test_classes_of_a_file_of_names(tmp_path):
    (tmp_path / 'classes.txt').write_text('ant\nbee')
    config = Config.fromfile(ROOT / 'configs/your_data/classifier.py')
    dataset = config.test_dataloader.dataset
    dataset.classes = str(tmp_path / 'classes.txt')
    dataset.pop('metainfo')
    assert describe_classes(config, 2)['classes'] == ['ant', 'bee']


@pytest.mark.parametrize(
    ('name', 'shape'),
    [
        ('your_data/detector', (640, 640)),
        ('your_data/segmentor', (480, 640)),
        ('your_data/classifier', (224, 224)),
        ('mask_rcnn/care_s0_coco', (800, 1344)),
        ('mask_rcnn/care_s0_dsb2018', (512, 512)),  # whose pictures keep their sizes
    ],
)
def test_default_shape(name, shape):
    assert choose_shape(Config.fromfile(ROOT / f'configs/{name}.py'))[0] == shape


def test_default_shape_of_segmentors():
    """The test pipeline's, not the training crop's, unless tests are on windows."""
    config = Config.fromfile(ROOT / 'configs/your_data/segmentor.py')
    config.model.data_preprocessor.size = (256, 256)
    config.test_dataloader.dataset.pipeline[1].scale = (1490, 1000)
    assert choose_shape(config) == ((1024, 1504), mock.ANY)
    config.model.test_cfg = dict(mode='slide', crop_size=(250, 300), stride=(1, 1))
    (height, width), reason = choose_shape(config)
    assert (height, width) == (250, 300) and 'slide' in reason
    config.model.test_cfg = dict(mode='whole')
    config.test_dataloader.dataset.pipeline.pop(1)
    assert choose_shape(config) == ((256, 256), mock.ANY)


def test_activation_of_several_classes():
    """Losses say whether classes exclude each other."""
    for losses, activation in (
        ([dict(type='CrossEntropyLoss')], 'softmax'),
        ([dict(type='CrossEntropyLoss', use_sigmoid=True)], 'sigmoid'),
        ([dict(type='CrossEntropyLoss'), dict(type='DiceLoss')], 'softmax'),
        ([dict(type='FocalLoss'), dict(type='DiceLoss')], 'sigmoid'),
    ):
        head = dict(type='FCNHead', in_channels=8, channels=8, num_classes=3, loss_decode=losses)
        model = nn.Module()
        with DefaultScope.overwrite_default_scope('mmseg'):
            model.decode_head = MODELS.build(head)
        assert Segmentor(model, '', BackboneInfo()).choose_activation(3) == activation
