"""Exports of a thin network: structure, names, shapes, precision, metadata, and the numbers."""

import json
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from thin import THIN, thin_source

from mmcare.checkpoint import CheckpointError
from mmcare.deploy import export as export_module
from mmcare.deploy import export_backbone, load_source, to_onnx
from mmcare.deploy.requirements import require
from mmcare.deploy.source import IMAGENET, Normalization
from mmcare.deploy.stage_maps import StageMaps
from mmcare.output import moved_into_place

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / 'tools' / 'export_backbone.py'
SHAPE = (64, 96)


# ------------------------------------------------------------ what is exported


def test_sources():
    published = load_source('s1')
    assert published.name == 'care_s1' and published.normalization == IMAGENET
    assert not published.backbone.training and not published.backbone.deploy
    for folder, indices in (('mask_rcnn/care_s0_coco', 4), ('imagenet/care_s2_in1k', 1)):
        source = load_source(ROOT / 'configs' / f'{folder}.py')
        assert source.name == folder.split('/')[1] and source.weights == 'random'
        assert len(source.backbone.out_indices) == indices
        assert source.normalization == IMAGENET


@pytest.mark.parametrize(
    ('text', 'words'),
    [
        ("model = dict(backbone=dict(type='ResNet'))", 'it has 0'),
        ("model = dict(a=dict(type='CARE'), b=[dict(type='mmcare.CARE')])", 'it has 2'),
    ],
)
def test_configs_without_one_backbone(tmp_path, text, words):
    (tmp_path / 'config.py').write_text(text)
    with pytest.raises(ValueError, match=words):
        load_source(tmp_path / 'config.py')


def test_weights(tmp_path):
    """Of a whole model, folded or not; never those of another variant."""
    source = thin_source()
    text = (
        f"model = dict(data_preprocessor=dict(mean=[1], std=[2]), x=dict(type='CARE', arch={THIN}))"
    )
    (tmp_path / 'config.py').write_text(text)
    for folded in (False, True):
        if folded:
            source.backbone.switch_to_deploy()
        state = {f'backbone.{key}': value for key, value in source.backbone.state_dict().items()}
        torch.save(dict(state_dict=state), tmp_path / 'weights.pth')
        found = load_source(tmp_path / 'config.py', tmp_path / 'weights.pth')
        assert found.backbone.deploy is folded and found.weights == 'weights.pth'
        assert found.normalization == Normalization((1,), (2,), 'BGR')
        assert all(
            torch.equal(v, state[f'backbone.{k}']) for k, v in found.backbone.state_dict().items()
        )
    with pytest.raises(CheckpointError, match='arch: the file has'):
        load_source('s0', tmp_path / 'weights.pth')
    with pytest.raises(FileNotFoundError):
        load_source('s0', tmp_path / 'gone.pth')


@torch.no_grad()
@pytest.mark.parametrize('shape', [(64, 96), (50, 70), None])
@pytest.mark.parametrize('folded', [True, False])
def test_stage_maps(shape, folded):
    """The graph that is exported is the backbone behind the normalisation."""
    backbone = thin_source(out_indices=(0, 2, 3), out_norm_cfg=dict(type='BN')).backbone
    if folded:
        backbone.switch_to_deploy()
    pixels = torch.rand(1, 3, *(shape or SHAPE)) * 255
    mean, std = torch.tensor([IMAGENET.mean, IMAGENET.std])[:, :, None, None]
    expected = backbone((pixels - mean) / std)
    maps = StageMaps(backbone, shape, IMAGENET)
    assert maps.names == ('stage1', 'stage3', 'stage4')
    for a, b in zip(expected, maps(pixels), strict=True):
        assert a.shape == b.shape
        assert (a - b).abs().max() < 1e-4 * a.abs().max()
    assert backbone.stem is not maps.backbone.stem


# ------------------------------------------------------------ Core ML and ONNX


@pytest.fixture(scope='module')
def exported(tmp_path_factory):
    out_dir = tmp_path_factory.mktemp('exported')
    (out_dir / 'thin_64x96.mlpackage').mkdir()
    (out_dir / 'thin_64x96.mlpackage' / 'older').touch()
    return out_dir, export_backbone(thin_source(), out_dir, SHAPE)


def test_files_and_report(exported):
    out_dir, report = exported
    names = {path.name for path in out_dir.iterdir()}
    assert names == {f'thin_64x96.{end}' for end in ('mlpackage', 'onnx', 'json', 'txt')}
    assert not (out_dir / 'thin_64x96.mlpackage' / 'older').exists()
    assert json.loads((out_dir / 'thin_64x96.json').read_text()) == report
    text = (out_dir / 'thin_64x96.txt').read_text()
    assert 'opset 20' in text and 'ML Program, float16, iOS16 or later, input: image (RGB)' in text
    assert report['onnx']['bytes'] == (out_dir / 'thin_64x96.onnx').stat().st_size
    if platform.system() != 'Darwin':
        assert report['coreml']['deviations'] == export_module.NOT_RUN and 'not run' in text


def test_onnx_computes_the_backbone(exported):
    out_dir, report = exported
    session = onnxruntime.InferenceSession(str(out_dir / 'thin_64x96.onnx'))
    image = torch.randn(1, 3, *SHAPE)
    with torch.no_grad():
        expected = thin_source().backbone(image)
    assert [output.name for output in session.get_outputs()] == [
        'stage1',
        'stage2',
        'stage3',
        'stage4',
    ]
    for a, b in zip(expected, session.run(None, {'image': image.numpy()}), strict=True):
        assert a.shape == b.shape
        assert np.abs(a.numpy() - b).max() < 1e-4 * a.abs().max()
    deviations = report['onnx']['deviations']
    assert set(deviations) == {'random', 'zeros', 'black_and_white', 'hundredfold'}
    assert max(deviations.values()) < 1e-3
    assert 'BatchNormalization' not in report['onnx']['operators']


def test_coreml_structure(exported):
    import coremltools as ct

    out_dir, report = exported
    spec = ct.utils.load_spec(str(out_dir / 'thin_64x96.mlpackage'))
    assert spec.WhichOneof('Type') == 'mlProgram' and spec.specificationVersion == 7  # iOS 16
    (image,) = spec.description.input
    assert (
        image.name == 'image' and (image.type.imageType.height, image.type.imageType.width) == SHAPE
    )
    assert image.type.imageType.colorSpace == ct.proto.FeatureTypes_pb2.ImageFeatureType.RGB
    outputs = {out.name: out.type.multiArrayType for out in spec.description.output}
    half = ct.proto.FeatureTypes_pb2.ArrayFeatureType.FLOAT16
    assert list(outputs) == ['stage1', 'stage2', 'stage3', 'stage4']
    assert all(output.dataType == half for output in outputs.values())
    metadata = spec.description.metadata
    assert metadata.userDefined['mmcare.arch'] == 'thin'
    assert metadata.userDefined['mmcare.shape'] == '64x96'
    assert metadata.versionString and 'MIT' in metadata.license
    operators = report['coreml']['operators']
    assert not {'batch_norm', 'transpose'} & set(operators)
    assert operators['cast'] == 1  # of the image, which arrives in float32
    assert operators['linear_activation'] == 2  # q and k of both attentions, scaled
    assert operators['matmul'] == 4 and operators['elu'] == 2


def test_nothing_is_written_that_computes_something_else(tmp_path, monkeypatch):
    source = thin_source(out_indices=(0,))
    monkeypatch.setattr(
        to_onnx, 'onnx_runner', lambda path: lambda image: [np.zeros((1, 16, 16, 24))]
    )
    with pytest.raises(to_onnx.ExportError, match='nothing is written'):
        export_backbone(source, tmp_path / 'out', SHAPE, ('onnx',))
    assert not list((tmp_path / 'out').iterdir())


def test_interruption_leaves_the_older_file(tmp_path):
    path = tmp_path / 'file'
    path.write_text('older')
    with pytest.raises(KeyboardInterrupt), moved_into_place(path) as temporary:
        temporary.write_text('hal')
        raise KeyboardInterrupt
    assert path.read_text() == 'older' and list(tmp_path.iterdir()) == [path]


# ------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ('arguments', 'words'),
    [
        (dict(shape=(0, 64)), 'shape must be'),
        (dict(shape=(512, 100000)), 'shape must be'),
        (dict(formats=('tflite',)), "formats must be of .*'tflite'"),
        (dict(formats=()), 'at least one'),
        (dict(precision='int4'), 'precision must be'),
        (dict(dynamic=True, shape=(50, 64)), 'multiples of 32'),
        (dict(dynamic=True, formats=('coreml',)), 'dynamic sizes are for onnx'),
    ],
)
def test_bad_arguments(tmp_path, arguments, words):
    with pytest.raises(ValueError, match=words):
        export_backbone(thin_source(), tmp_path / 'out', **arguments)
    assert not (tmp_path / 'out').exists()


def test_images_of_other_channels(tmp_path):
    with pytest.raises(ValueError, match='use --input tensor'):
        export_backbone(thin_source(in_channels=4), tmp_path)


def test_missing_packages(tmp_path, monkeypatch):
    with pytest.raises(ImportError, match=r'the test needs no_such_package.*mmcare\[export\]'):
        require('no_such_package', 'the test')
    monkeypatch.setitem(sys.modules, 'coremltools', None)
    with pytest.raises(ImportError, match=r'Core ML needs coremltools.*mmcare\[export\]'):
        export_backbone(thin_source(), tmp_path / 'out')
    assert not (tmp_path / 'out').exists()


def test_tool_says_in_one_line_what_is_wrong(tmp_path):
    (tmp_path / 'file').touch()
    command = [sys.executable, TOOL, 's0', '--out-dir', tmp_path / 'file' / 'out']
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith('error: ')
    assert 'is not a directory' in done.stderr


def test_no_toolbox_is_imported():
    code = (
        'import sys, mmcare.deploy\n'
        "names = ('mmdet', 'mmseg', 'mmpretrain', 'mmcv._ext')\n"
        'sys.exit(any(name in sys.modules for name in names))'
    )
    assert subprocess.run([sys.executable, '-c', code]).returncode == 0
