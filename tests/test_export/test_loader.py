"""Pictures of more than 8 bits, and windows, as configs describe them."""

from dataclasses import replace
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch
from export_helpers import thin_model
from helpers import newer
from mmengine.config import Config
from torch import nn

from mmcare.export.images import draw_images, load_images
from mmcare.export.in_toolbox import pad_images
from mmcare.export.loading import Normalization
from mmcare.export.pipelines import (
    describe_loader,
    describe_resizing,
    describe_sliding,
    fit_config,
    inner_datasets,
)
from mmcare.export.plan import plan_export
from mmcare.export.request import ExportRequest

pytestmark = newer
SHAPE = (64, 96)
DEEP = dict(type='LoadImageFromFile', color_type='unchanged')
RESIZE = dict(type='Resize', scale=(300, 200), keep_ratio=True)


def make_config(*steps, **model):
    return Config(dict(model=model, test_dataloader=dict(dataset=dict(pipeline=[*steps]))))


def test_pictures_of_twelve_bits(tmp_path):
    """They keep their values, and drawn images have such values as well."""
    for index in range(3):
        pixels = np.random.default_rng(index).integers(7, 4096, (50, 90, 3)).astype(np.uint16)
        cv2.imwrite(str(tmp_path / f'{index}.tiff'), pixels)
    normalization = Normalization((1500.0,) * 3, (400.0,) * 3, 'RGB')
    config = make_config(DEEP, RESIZE)
    model = replace(thin_model(), config=config, normalization=normalization)
    images = load_images(model, SHAPE, 0, tmp_path, 'top-left')
    about = dict(images.loader)
    low, high = about.pop('range')
    assert low < 10 and 4090 < high < 4096
    names = dict(color_type='unchanged', imdecode_backend='cv2', to_float32=False)
    assert about == dict(names, bits=16)
    for name in ('random', 'smooth', 'picture1', 'picture2'):
        assert 300 < images.checked[name].pixels.std() < 2000 or name == 'smooth'
        assert images.checked[name].pixels.max() > 1000
    with pytest.raises(ValueError, match=r"pictures have 16 bits: use input_kind='tensor'"):
        plan_export(model, ExportRequest(SHAPE, ('onnx',), 'image', images=tmp_path))
    with pytest.raises(ValueError, match='pictures have an unknown number of bits'):
        plan_export(model, ExportRequest(SHAPE, ('coreml',)))  # there are none


@pytest.mark.parametrize('mean', [(0.0,) * 3, (103.53, 116.28, 123.675)], ids=['none', 'caffe'])
def test_pictures_that_are_not_divided(mean):
    """Drawn images are as bright as pictures, where a config takes pixels as they are, also."""
    images = draw_images(3, SHAPE, Normalization(mean, (1.0,) * 3, 'BGR'))
    for name in ('random', 'smooth', 'black_and_white'):
        pixels = images[name].pixels
        assert pixels.min() < 10 and pixels.max() > 225 and 40 < pixels.std() < 130


def test_loaders():
    def bits(**step):
        return describe_loader(make_config(dict(type='LoadImageFromFile', **step)))['bits']

    assert bits() == bits(color_type='grayscale', imdecode_backend='pillow') == 8
    assert bits(color_type='unchanged') is bits(imdecode_backend='tifffile') is None
    other = describe_loader(make_config(dict(type='LoadArrays')))
    assert other['bits'] is other['color_type'] is None
    assert describe_loader(None)['bits'] == 8


def test_windows_of_configs():
    """Where windows are tested, the resizing stays; elsewhere pictures keep their sizes."""
    slide = dict(mode='slide', crop_size=(128, 128), stride=(85, 85))
    pads = dict(test_cfg=dict(size_divisor=32))
    steps = DEEP, RESIZE, dict(type='ResizeToMultiple', size_divisor=32), dict(type='Pad')
    config = make_config(*steps, test_cfg=slide, data_preprocessor=pads)
    about = describe_sliding(config)
    scale = dict(scale=[300, 200], keep_ratio=True, interpolation='bilinear', backend='cv2')
    assert about == dict(
        stride=[85, 85],
        resize=scale,
        multiple=32,
        size_divisor=32,
        size=None,
        other_steps=['Pad'],
    )
    fit_config(config, SHAPE, 'slide')
    assert config.model.test_cfg == dict(mode='slide', crop_size=SHAPE, stride=[64, 85])
    assert len(config.test_dataloader.dataset.pipeline) == 4
    config = make_config(*steps, test_cfg=dict(mode='whole'))
    fit_config(config, SHAPE, 'slide')
    assert config.test_dataloader.dataset.pipeline == [DEEP]
    assert config.model.test_cfg.stride == [51, 76]


def test_data_sets_within_others(tmp_path):
    """Files resize, and are calibrated, as the parts of wrapped and concatenated data say."""
    pytest.importorskip('mmpretrain')
    for index in range(3):
        cv2.imwrite(str(tmp_path / f'{index}.png'), np.full((50, 90, 3), index, np.uint8))
    pipeline = [dict(type='LoadImageFromFile'), RESIZE, dict(type='PackInputs')]
    part = dict(type='mmpretrain.CustomDataset', data_root=str(tmp_path), with_label=False)
    part = dict(part, pipeline=pipeline)
    plain = Normalization((0.0,) * 3, (1.0,) * 3, 'RGB')
    fold = dict(type='mmpretrain.KFoldDataset', dataset=part, num_splits=3)
    for dataset in (fold, dict(type='ConcatDataset', datasets=[part, fold])):
        loader = dict(dataset=dataset)
        config = Config(dict(model={}, test_dataloader=loader, train_dataloader=loader))
        config.default_scope = 'mmpretrain'
        assert describe_resizing(config, SHAPE)['interpolation'] == 'bilinear'
        model = replace(thin_model(), config=config, normalization=plain)
        load_images(model, SHAPE, 1, None, 'top-left')
        fit_config(config, SHAPE)
        for inner in inner_datasets(config.test_dataloader.dataset):
            assert inner.pipeline[1].type == 'mmcare.ResizeToFit'
    config.test_dataloader.dataset.datasets[0].pipeline = pipeline
    with pytest.raises(ValueError, match='different pipelines'):
        fit_config(config, SHAPE)


def test_padding_of_windows():
    """Pictures are padded to a window at least, and what was padded before is not forgotten."""

    class Preprocessor(nn.Module):
        def forward(self, data):
            return data

    sample = SimpleNamespace(metainfo=dict(img_padding_size=(0, 3, 0, 0)))
    sample.set_metainfo = sample.metainfo.update
    model = nn.Module()
    model.data_preprocessor = Preprocessor()
    pad_images(model, SHAPE, None, 'center', 'slide')
    data = model.data_preprocessor(dict(inputs=torch.ones(1, 3, 30, 200), data_samples=[sample]))
    assert data['inputs'].shape == (1, 3, 64, 200)
    assert sample.metainfo['img_padding_size'] == (0, 3, 0, 34)
