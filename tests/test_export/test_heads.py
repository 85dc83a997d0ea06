"""Heads of mmseg: files have what mmseg predicts from; pooling in float16; what is refused.

The heads, and sizes that take longer, are those of benchmarks/heads.py.
"""

import re
import sys

import pytest
import torch
from export_helpers import odd_model
from helpers import ROOT, deviation
from torch import nn

sys.path.insert(0, str(ROOT / 'benchmarks'))  # where scripts find each other

import heads

from mmcare.export import export_model, open_exported
from mmcare.export.check import ExportError
from mmcare.export.images import draw_images
from mmcare.export.reference import Reference
from mmcare.export.request import ExportRequest

pytest.importorskip('mmseg')
from mmseg.structures import SegDataSample

SHAPE = (64, 96)


@torch.no_grad()
def predict(model, images):
    """Return the logits that mmseg resizes to the images."""
    metainfo = dict(img_shape=SHAPE, ori_shape=SHAPE, pad_shape=SHAPE, flip=False)
    (sample,) = model.predict(images, [SegDataSample(metainfo=metainfo)])
    return sample.seg_logits.data[None]


@pytest.mark.parametrize('name', heads.HEADS)
def test_what_mmseg_predicts_from(name):
    """One map of logits, of heads with several outputs and of cascades also."""
    source = heads.build(heads.HEADS[name])
    images = torch.randn(1, 3, *SHAPE)
    (logits,) = source.task(images)
    resized = nn.functional.interpolate(logits, SHAPE, mode='bilinear')
    assert deviation([predict(source.task.model, images)], [resized]) < 1e-5
    reference = Reference(source, draw_images(3, SHAPE, source.normalization))
    reference.outputs('random')
    assert bool(reference.why_float32) is (name == 'cascade with PointHead')
    assert 'predict_by_feat' not in vars(source.task.head)


@pytest.mark.parametrize('name', ['UPer', 'DA', 'LightHam', 'cascade of FCN and OCR'])
def test_in_the_test_of_mmseg(tmp_path, monkeypatch, name):
    """A file in place of the network gives mmseg's own results."""
    source, images = heads.build(heads.HEADS[name]), torch.randn(1, 3, *SHAPE)
    expected = predict(source.task.model, images)
    report = export_model(source, tmp_path, SHAPE, ('onnx',))['onnx']
    program = open_exported(tmp_path / report['file'])

    def run(images):
        return tuple(torch.from_numpy(output) for output in program.run(images.numpy()))

    for owner, method, substitute in source.task.substitutes(run, program.description, images):
        monkeypatch.setattr(owner, method, substitute)
    monkeypatch.delattr(heads.FourConvolutions, 'forward')  # which is not asked
    assert deviation([expected], [predict(source.task.model, images)]) < 1e-5


def test_heads_that_predict_in_their_own_way(tmp_path, monkeypatch):
    source = heads.build(heads.HEADS['FCN'])
    monkeypatch.setattr(source.task.head, 'predict', lambda *_: torch.zeros(1, 5, *SHAPE))
    with pytest.raises(ValueError, match=r"FCNHead does not predict from one map.*part='neck'"):
        export_model(source, tmp_path, SHAPE, ('onnx',))


class Pyramid(nn.Module):
    """Poolings as those of UPerHead and PSPHead."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 1)
        self.pools = nn.ModuleList(nn.AdaptiveAvgPool2d(bins) for bins in (1, 2, 3, 6))
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(4))
        self.requires_grad_(False)

    def forward(self, images):
        maps = self.first(images)
        return tuple(
            conv(pool(maps)).relu() for pool, conv in zip(self.pools, self.convs, strict=True)
        )


@pytest.mark.conversion
@pytest.mark.parametrize('shape', [(4, 4), (10, 15)])
def test_pooling_in_litert(tmp_path, shape):
    """XNNPACK computes it in float16, where no product begins with a constant."""
    pytest.importorskip('litert_torch')
    source = odd_model(Pyramid().eval(), ['one', 'two', 'three', 'six'])
    report = export_model(source, tmp_path, shape, ('litert',))['litert']
    assert report['non_delegated_ops'] == {} and report['max_rel_error']['random'] < 1e-5
    assert report['max_rel_error_float16']['random'] < 5e-3


class Float32(nn.Module):
    """A network that makes a tensor in float32."""

    def forward(self, images):
        return (images.flatten(2) @ torch.ones(images[0, 0].numel(), 2),)


def test_a_network_of_float32_only(tmp_path):
    report = export_model(odd_model(Float32(), ['sums']), tmp_path, (8, 8), ('onnx',))['onnx']
    assert report['reference'].startswith('computed in float32: expected')
    assert report['max_rel_error']['random'] < 1e-5


def test_a_runtime_that_fails(tmp_path, monkeypatch):
    """It is named in one line, whatever it raises; a file is left if it fails in float16 only."""

    def fail(*_, **__):
        raise KeyError('CompiledModel error:\ncode=3')

    source = odd_model(Pyramid().eval(), ['a', 'b', 'c', 'd'])
    with monkeypatch.context() as patched:
        patched.setattr('mmcare.export.backends.onnx.Onnx.open', fail)
        with pytest.raises(
            ExportError, match=r'ONNX Runtime cannot compute odd_4x4.onnx, .*code=3'
        ):
            export_model(source, tmp_path, (4, 4), ('onnx',))
    assert not [*tmp_path.iterdir()]
    monkeypatch.setattr('mmcare.export.backends.onnx.Onnx.open_float16', fail)
    report = export_model(source, tmp_path, (4, 4), ('onnx',))['onnx']
    words = r'too large: ONNX Runtime in float16 cannot compute odd_4x4\.onnx: .*code=3'
    assert re.match(words, report['max_rel_error_float16']) and report['float16'] is False


def test_windows_of_any_size(monkeypatch):
    """mmseg tests on them, as on 769x769; other images have multiples of the stride."""
    task = heads.build(heads.HEADS['PSP']).task
    monkeypatch.setattr(task.model, 'test_cfg', dict(mode='slide', crop_size=(65, 97)))
    task.check_request(ExportRequest((65, 97), ('onnx',)))
    with pytest.raises(ValueError, match='multiples of 32'):
        task.check_request(ExportRequest((97, 65), ('onnx',)))
