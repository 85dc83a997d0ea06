"""Exports of a thin network: files, names, numbers, options and bad input."""

import json
import sys
from unittest.mock import Mock

import mmcv
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from export_helpers import SHAPE, STAGES, run_file, thin_model
from helpers import ROOT, THIN, deviation, run, run_tool, thin_backbone

from mmcare.export import export_model, load_model
from mmcare.export.check import Checker, ExportError
from mmcare.export.loading import Normalization
from mmcare.export.tasks.base import max_rel_error
from mmcare.weights.reading import CheckpointError


@pytest.fixture(scope='module')
def exported(tmp_path_factory):
    out_dir = tmp_path_factory.mktemp('exported')
    (out_dir / 'thin_64x96.mlpackage').mkdir()
    (out_dir / 'thin_64x96.mlpackage' / 'older').touch()
    formats = 'coreml', 'onnx', 'executorch'
    return out_dir, export_model(thin_model(), out_dir, SHAPE, formats)


@pytest.mark.conversion
def test_files_and_reports(exported):
    out_dir, reports = exported
    files = {f'thin_64x96.{end}' for end in ('mlpackage', 'onnx', 'pte')}
    assert {path.name for path in out_dir.iterdir()} == files | {f'{file}.json' for file in files}
    assert not (out_dir / 'thin_64x96.mlpackage' / 'older').exists()
    for report in reports.values():
        assert json.loads((out_dir / f'{report["file"]}.json').read_text()) == report
        assert report['outputs'][3] == dict(name='stage4', shape=[1, 128, 2, 3], layout='NCHW')
    assert reports['coreml']['runtime'].endswith('not Core ML')
    assert (
        reports['executorch']['delegates'] == 1 and reports['executorch']['non_delegated_ops'] == {}
    )
    kinds = {node.op_type for node in onnx.load(out_dir / 'thin_64x96.onnx').graph.node}
    assert 'Conv' in kinds and 'BatchNormalization' not in kinds


@pytest.mark.conversion
def test_gelu_in_onnx_runtime(exported, tmp_path):
    """Opset 18 has no operator for it; ONNX Runtime fuses what is in its place."""
    out_dir, reports = exported
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / 'optimized.onnx')
    options.log_severity_level = 3
    onnxruntime.InferenceSession(out_dir / 'thin_64x96.onnx', options)
    kinds = {node.op_type for node in onnx.load(tmp_path / 'optimized.onnx').graph.node}
    assert reports['onnx']['opset'] == 18 and 'Gelu' in kinds and 'Erf' not in kinds


@pytest.mark.conversion
def test_coreml(exported):
    import coremltools as ct

    out_dir, _ = exported
    spec = ct.utils.load_spec(str(out_dir / 'thin_64x96.mlpackage'))
    assert spec.WhichOneof('Type') == 'mlProgram' and spec.specificationVersion == 7  # iOS 16
    (image,) = spec.description.input
    kind = image.type.imageType
    assert image.name == 'image' and (kind.height, kind.width) == SHAPE
    assert kind.colorSpace == ct.proto.FeatureTypes_pb2.ImageFeatureType.RGB
    outputs = {out.name: out.type.multiArrayType.dataType for out in spec.description.output}
    assert outputs == dict.fromkeys(STAGES, ct.proto.FeatureTypes_pb2.ArrayFeatureType.FLOAT16)
    about = spec.description.metadata
    assert about.versionString and not about.license + about.author  # of the weights: unknown


def test_free_sizes_by_torch(tmp_path):
    """As docs/deploy.md says: the plain network exports with free sizes."""
    task = thin_model(out_indices=(1, 2, 3)).task
    sides = {2: torch.export.Dim('height', min=33), 3: torch.export.Dim('width', min=33)}
    torch.onnx.export(
        task,
        (torch.zeros(1, 3, 64, 96),),
        tmp_path / 'free.onnx',
        input_names=['image'],
        dynamic_shapes=(sides,),
        external_data=False,
    )
    for shape in ((64, 96), (33, 70), (224, 161)):
        image = torch.randn(1, 3, *shape)
        _, outputs = run_file(tmp_path / 'free.onnx', image)
        assert deviation(task(image), outputs) < 1e-4


def test_a_nan_differs():
    """It is an error on an image that is enforced, and text in the report elsewhere."""
    inputs = dict(random=torch.ones(1, 3, 2, 2), hundredfold=torch.full((1, 3, 2, 2), 100.0))
    checker = Checker(
        'nan.onnx', inputs, ['random'], [], lambda name: [inputs[name]], max_rel_error, ['maps']
    )
    with pytest.raises(ExportError, match=r'differ from PyTorch.* by nan.*nan.onnx'):
        checker.max_rel_errors(lambda x: [x.numpy() * np.nan], 1e-4, 'ONNX Runtime')
    large = lambda x: [x.numpy() * (np.nan if x.max() > 99 else 1)]  # noqa: E731
    errors = checker.max_rel_errors(large, 1e-4, 'ONNX Runtime')
    assert errors == dict(random=0, hundredfold='nan')

    def refuse(x):
        raise ExportError("All 'rois' values must be finite")  # ONNX Runtime, of large values

    with pytest.raises(ExportError, match='must be finite'):
        checker.max_rel_errors(refuse, 1e-4, 'ONNX Runtime')
    errors = checker.max_rel_errors(
        lambda x: refuse(x) if x.max() > 99 else [x.numpy()], 1e-4, 'ONNX Runtime'
    )
    assert errors == dict(random=0, hundredfold='inf')


def test_float16_may_be_better():
    """Of a quantized file, a cross-check may be neither; float16 may be better, by chance."""
    wanted = torch.ones(1, 1, 10, 10)
    checker = Checker(
        'a.tflite', dict(picture=wanted), [], ['picture'], lambda name: [wanted], max, ['maps']
    )

    def off(by):
        return lambda x: [x.numpy() * (1 + by)]

    rough, fine, similar = off(0.2), off(0.05), off(0.07)
    assert checker.sqnr_db(fine, rough, 'float32', may_be_better=True) == dict(maps=26.0)
    assert checker.sqnr_db(similar, fine, 'float32') == dict(maps=23.1)  # a matter of rounding
    for file, other, options in ((fine, rough, {}), (rough, fine, dict(may_be_better=True))):
        with pytest.raises(ExportError, match='compute different things'):
            checker.sqnr_db(file, other, 'float32', **options)


def test_weights(tmp_path):
    """Of a whole model, folded or not; never those of another variant."""
    config, weights = tmp_path / 'config.py', tmp_path / 'weights.pth'
    config.write_text(
        'model = dict(data_preprocessor=dict(mean=[1], std=[2]), type="NoSuchModel", '
        f'backbone=dict(type="CARE", arch={THIN}))'
    )
    backbone = thin_backbone()
    image = torch.randn(1, 3, *SHAPE)
    expected = backbone(image)
    for is_folded in (False, True):
        if is_folded:
            backbone.switch_to_deploy()
        state = {f'backbone.{key}': value for key, value in backbone.state_dict().items()}
        torch.save(dict(state_dict=state), weights)
        found = load_model(config, weights)
        assert found.task.backbone.deploy is is_folded and found.checkpoint == 'weights.pth'
        assert found.normalization == Normalization((1,) * 3, (2,) * 3, 'BGR')
        assert deviation(expected, found.task(image)) < 1e-5
    with pytest.raises(CheckpointError):
        load_model('s0', weights)


def test_what_is_unknown_is_an_error_of_python(tmp_path):
    with pytest.raises(TypeError, match="unexpected keyword argument 'foo'"):
        export_model(thin_model(), tmp_path, SHAPE, foo=1)
    with pytest.raises(ValueError, match="delegate='mps' is none of xnnpack, coreml"):
        export_model(thin_model(), tmp_path, SHAPE, ('executorch',), delegate='mps')
    with pytest.raises(ValueError, match='opset=17 is none of 18, 19, 20'):
        export_model(thin_model(), tmp_path, SHAPE, ('onnx',), opset=17)


def test_one_format_that_fails_leaves_the_others(tmp_path, monkeypatch, capsys):
    """Files that were checked stay, and the status is 1."""
    write = Mock(side_effect=RuntimeError('no such operator'))
    monkeypatch.setattr('mmcare.export.backends.executorch.ExecuTorch.write', write)
    config, out_dir = tmp_path / 'thin.py', tmp_path / 'out'
    config.write_text(f'model = dict(backbone=dict(type="CARE", arch={THIN}))')
    options = '--shape', 32, 32, '--format', 'executorch', 'onnx', '--out-dir', out_dir
    with pytest.raises(SystemExit, match='1'):
        run_tool(monkeypatch, 'export', config, *options)
    files = {path.name for path in out_dir.iterdir()}
    assert files == {'thin_32x32.onnx', 'thin_32x32.onnx.json'}
    printed = capsys.readouterr()
    assert 'file: thin_32x32.onnx' in printed.out and 'mmcare-export-' in printed.err
    assert 'executorch cannot convert thin_32x32.pte: no such operator' in printed.err


@pytest.fixture
def failing(tmp_path, monkeypatch, capsys):
    """Run the tool, which must fail with one line and leave nothing; return the line."""

    def run(*arguments):
        options = '--out-dir', tmp_path / 'out', '--shape', 32, 32
        with pytest.raises(SystemExit, match='2'):
            run_tool(monkeypatch, 'export', *options, *arguments)
        assert not (tmp_path / 'out').exists()
        return capsys.readouterr().err.strip().splitlines()[-1]

    return run


@pytest.mark.parametrize(
    ('arguments', 'words'),
    [
        ('s0 --shape 0 512', 'height and width must be 1 to 4096'),
        ('s0 --shape 16 512', 'height and width must be 32 to 4096'),
        ('s0 --compress int8 --format onnx litert', '--compress int8 is for --format coreml'),
        ('s0 --precision int8', '--precision int8 is only for --format onnx, executorch, litert'),
        (
            's0 --format executorch executorch-coreml --delegate coreml',
            '--format executorch, executorch-coreml are the same file with --delegate coreml',
        ),
        ('s0 --calibration 8', '--calibration is for --precision int8'),
        ('s0 --calibration 0 --precision int8 --format litert', 'int8, and at least 1'),
        ('s0 --images gone', 'gone'),
        ('s0 --precision int8 --format executorch', 'care_s0 has no train_dataloader; give a'),
        ('four.py --input image --format onnx', 'the config has no mean and std of images'),
        ('s7', "'s7' is neither one of s0, s1, s2 nor a config"),
        ('gone.py', 'gone.py'),
        ('s0 gone.pth', 'gone.pth'),
        ('s0 resnet.pth', 'resnet.pth does not fit the CARE'),
        ('s0 --part neck', 'is a backbone without neck or head: give a config'),
        ('none.py', 'the Embedding computes no images'),
        ('s9.py', "'s9'"),
        ('four.py', 'use --input tensor'),
        ('s0 --out-dir none.py/folder', 'Not a directory'),
        ('s0 --precision int8 --format executorch --images empty', 'empty holds no pictures'),
        ('s0 --precision int8 --format executorch --images cut', 'cut.png is not a picture'),
        (
            's0 --precision int8 --format executorch --images few',
            '1 are too few, 2 are held out; give a config with training data, or a folder of '
            'pictures with --images',
        ),
        ('means.py --format onnx', "the config's mean has 3 values, the network 4 channels"),
    ],
)
def test_bad_arguments(failing, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    for name, backbone in (
        ('none', "type='torch.nn.Embedding', num_embeddings=1, embedding_dim=1"),
        ('s9', "type='CARE', arch='s9'"),
        ('four', "type='CARE', in_channels=4"),
        ('means', "type='CARE', in_channels=4), data_preprocessor=dict(mean=[0] * 3, std=[1] * 3"),
    ):
        (tmp_path / f'{name}.py').write_text(f'model = dict(backbone=dict({backbone}))')
    torch.save({'backbone.conv1.weight': torch.zeros(1)}, tmp_path / 'resnet.pth')
    for folder in ('empty', 'cut', 'few'):
        (tmp_path / folder).mkdir()
    (tmp_path / 'cut/cut.png').write_bytes(b'no picture')
    mmcv.imwrite(np.zeros((8, 8, 3)), str(tmp_path / 'few/one.png'))
    assert words in failing(*arguments.split())


@pytest.mark.parametrize(
    ('package', 'arguments'),
    [
        ('pnnx', 's0 --format ncnn'),
        ('coremltools', 's0'),
        ('coremltools.libmilstoragepython', 's0'),  # as pip builds it on other systems
        ('onnxruntime', 's0'),
        ('executorch', 's0 --format executorch'),
        ('litert_torch', 's0 --format litert'),
        ('ai_edge_quantizer', 's0 --format litert'),
        ('sklearn', 's0'),
    ],
)
def test_missing_packages(failing, monkeypatch, package, arguments):
    monkeypatch.setitem(sys.modules, package, None)
    line = failing(*arguments.split())
    extra = dict(pnnx='ncnn').get(package, 'export')
    extra = 'litert' if 'litert' in arguments else extra
    assert f'needs {package}' in line and f'mmcare[{extra}]' in line


def test_no_toolbox_is_needed():
    code = "import sys; names = 'mmdet', 'mmseg', 'mmpretrain', 'mmcv.ops', 'mmcv._ext';"
    code += 'sys.modules.update(dict.fromkeys(names)); from mmcare.export import load_model;'
    configs = ROOT / 'configs/imagenet/care_s0_in1k.py', ROOT / 'configs/fpn/care_s0_ade20k.py'
    run(sys.executable, '-c', f'{code} [*map(load_model, sys.argv[1:])]', *configs)
