"""Options of the export on a thin network, its arithmetic, interruptions and bad input."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import coremltools as ct
import onnxruntime
import pytest
import torch
from coremltools.optimize.coreml import decompress_weights
from mil_interpreter import run_program
from published_reference import published_weights, reference_image
from thin import thin_source
from torch import nn

from mmcare.checkpoint import from_published
from mmcare.deploy import export_backbone
from mmcare.deploy import to_onnx as to_onnx_module
from mmcare.deploy.source import IMAGENET, Normalization
from mmcare.deploy.to_coreml import (
    check_coreml,
    compress_coreml,
    convert_coreml,
    count_operators,
    prepare_coreml,
    save_coreml,
)
from mmcare.models import CARE
from mmcare.models.layers import FoldedLinearAttention, LinearAttention
from mmcare.output import check_writable

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / 'tools' / 'export_backbone.py'
SHAPE = (64, 96)


def deviation(expected, found):
    """Largest difference of outputs, as a share of each one's largest magnitude."""
    pairs = list(zip(expected, found, strict=True))
    assert all(a.shape == b.shape for a, b in pairs)
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)


# ------------------------------------------------------------ ONNX of free sizes


def test_dynamic_sizes(tmp_path):
    """Also tried with a side of one block, which must stay free."""
    source = thin_source(out_indices=(1, 2, 3))
    report = export_backbone(source, tmp_path, (64, 32), ('onnx',), dynamic=True)
    assert report['onnx']['file'] == 'thin_dynamic.onnx'
    assert report['onnx']['height_and_width'] == 'multiples of 32'
    assert report['onnx']['deviations']['random, another size'] < 1e-4
    session = onnxruntime.InferenceSession(str(tmp_path / 'thin_dynamic.onnx'))
    for shape in ((32, 32), (64, 96), (96, 64), (224, 160)):
        image = torch.randn(1, 3, *shape)
        found = session.run(None, {'image': image.numpy()})
        assert deviation(source.backbone(image), map(torch.from_numpy, found)) < 1e-4


# ------------------------------------------------------------ Core ML's numbers


@pytest.fixture(scope='module')
def programs():
    """The thin network with images as input, in float16 and in float32."""
    source = thin_source()
    source.backbone.switch_to_deploy()
    return {
        precision: convert_coreml(
            prepare_coreml(source.backbone, SHAPE, precision, IMAGENET), SHAPE, precision, 'iOS16',
            'RGB',
        )
        for precision in ('float16', 'float32')
    }  # fmt: skip


@pytest.mark.parametrize(('precision', 'limit'), [('float16', 2e-2), ('float32', 1e-5)])
def test_coreml_computes_the_backbone(programs, precision, limit):
    """Pixels in, the backbone's maps out: each channel by its own mean and deviation."""
    pixels = torch.randint(0, 256, (1, 3, *SHAPE)).float()
    mean, std = torch.tensor([IMAGENET.mean, IMAGENET.std])[:, :, None, None]
    expected = thin_source().backbone((pixels - mean) / std)
    found = run_program(programs[precision]._mil_program, pixels)
    assert deviation(expected, found) < limit


def test_deviations_per_channel_are_inside(programs):
    """Not in coremltools' image input, which knows one scale for all channels."""
    (image,) = programs['float16'].get_spec().description.input
    assert image.type.WhichOneof('Type') == 'imageType'
    operators = programs['float16']._mil_program.functions['main'].operations
    assert [o.op_type for o in operators if o.op_type != 'const'][:2] == ['cast', 'conv']
    normalization = Normalization((10.0, 20.0, 30.0), (1.0, 2.0, 4.0), 'BGR')
    backbone = thin_source(out_indices=(0,)).backbone
    graphs = [prepare_coreml(backbone, SHAPE, 'float32', n) for n in (normalization, None)]
    weights = [graph.backbone.stem.conv.weight for graph in graphs]
    ratios = (weights[1] / weights[0]).mean((0, 2, 3))
    torch.testing.assert_close(ratios, torch.tensor(normalization.std))


def test_padded_images():
    """Padding with normalised zeros means that normalisation comes first, in the program, too."""
    shape = (50, 70)
    backbone = thin_source(out_indices=(0, 2)).backbone
    graph = prepare_coreml(backbone, shape, 'float32', IMAGENET)
    model = convert_coreml(graph, shape, 'float32', 'iOS16', 'RGB')
    pixels = torch.randint(0, 256, (1, 3, *shape)).float()
    mean, std = torch.tensor([IMAGENET.mean, IMAGENET.std])[:, :, None, None]
    expected = backbone((pixels - mean) / std)
    assert [tuple(out.shape[2:]) for out in expected] == [(13, 18), (4, 5)]
    assert deviation(expected, run_program(model._mil_program, pixels)) < 1e-5


@pytest.mark.parametrize('stage', [2, 3])
def test_exported_attention_in_float16_on_the_reference(stage):
    """Finite and within 1 % of float32 at 512x512, each operator rounded to float16."""
    network = CARE('s0').eval().requires_grad_(False)
    state = from_published(published_weights('s0'))
    network.load_state_dict({k: v for k, v in state.items() if not k.startswith('head.')})
    seen = []
    for module in network.stages[stage].blocks[-1].modules():
        if isinstance(module, LinearAttention):
            module.register_forward_hook(lambda m, x, out: seen.append((m, x[0], out)))
    network(reference_image(512, 512))
    ((attention, x, expected),) = seen
    graph = nn.Sequential(FoldedLinearAttention(attention, float16_only=True))
    graph.backbone, graph.names = SimpleNamespace(in_channels=x.shape[1]), ('attended',)
    model = convert_coreml(graph.eval(), tuple(x.shape[2:]))
    assert 'linear_activation' in count_operators(model)
    (found,) = run_program(model._mil_program, x.half())
    assert found.isfinite().all()
    assert deviation([expected], [found]) < 0.01


# ------------------------------------------------------------ compression


@pytest.fixture(scope='module')
def wide():
    """A program with weights large enough that coremltools compresses them (2048 values)."""
    torch.manual_seed(0)
    graph = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.GELU(), nn.Conv2d(64, 8, 1))
    graph.backbone, graph.names = SimpleNamespace(in_channels=64), ('stage1',)
    return convert_coreml(graph.eval(), (8, 8))


def check_compressed(tmp_path, wide, compression, limit, share):
    compressed = compress_coreml(wide, compression)
    metadata = dict(arch='wide', part='backbone', version='0')
    sizes = [save_coreml(m, tmp_path / 'm.mlpackage', metadata) for m in (wide, compressed)]
    assert sizes[1] < share * sizes[0]
    assert count_operators(compressed) == count_operators(wide)
    image = torch.randn(1, 64, 8, 8)
    found = run_program(decompress_weights(compressed)._mil_program, image.half())
    exact = run_program(wide._mil_program, image.half())
    assert 0 < deviation(exact, found) < limit


def test_int8(tmp_path, wide):
    check_compressed(tmp_path, wide, 'int8', 0.02, 0.6)


@pytest.mark.parametrize(
    ('compression', 'limit', 'share'), [('palettize4', 0.3, 0.4), ('palettize8', 0.03, 0.6)]
)
def test_palettize(tmp_path, wide, compression, limit, share):
    pytest.importorskip('sklearn')
    check_compressed(tmp_path, wide, compression, limit, share)


def test_size_is_reported(tmp_path):
    report = export_backbone(
        thin_source(out_indices=(0,)), tmp_path, SHAPE, ('coreml',), compress='int8'
    )
    package = tmp_path / 'thin_64x96.mlpackage'
    size = sum(file.stat().st_size for file in package.rglob('*') if file.is_file())
    assert report['coreml']['bytes'] == size and report['coreml']['compression'] == 'int8'
    text = (tmp_path / 'thin_64x96.txt').read_text()
    assert f'{size / 1e6:.2f} MB' in text and 'compression: int8' in text


@pytest.mark.parametrize('compression', ['palettize4', 'palettize8'])
def test_scikit_learn_missing(tmp_path, monkeypatch, compression):
    monkeypatch.setitem(sys.modules, 'sklearn', None)
    words = rf'{compression}, through scikit-learn, needs sklearn.*mmcare\[export\]'
    with pytest.raises(ImportError, match=words):
        export_backbone(thin_source(), tmp_path / 'out', SHAPE, compress=compression)
    assert not (tmp_path / 'out').exists()
    check_coreml('int8')


# ------------------------------------------------------------ interruptions


def files_below(directory):
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob('*.*')}


def test_interrupted_coreml(tmp_path, monkeypatch):
    """Half of a package is written; then neither it nor a change of the older one is left."""
    package = tmp_path / 'thin_64x96.mlpackage'
    package.mkdir()
    (package / 'older.txt').write_text('older')
    save = ct.models.MLModel.save

    def save_half(self, path):
        save(self, path)
        next(Path(path).rglob('weight.bin')).unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(ct.models.MLModel, 'save', save_half)
    with pytest.raises(KeyboardInterrupt):
        export_backbone(thin_source(out_indices=(0,)), tmp_path, SHAPE, ('coreml',))
    assert [path.name for path in tmp_path.iterdir()] == [package.name]
    assert [path.name for path in package.iterdir()] == ['older.txt']


def test_interrupted_onnx(tmp_path, monkeypatch):
    (tmp_path / 'thin_64x96.onnx').write_text('older')
    written = []

    def interrupt(path):
        written.append(path.stat().st_size)
        raise KeyboardInterrupt

    monkeypatch.setattr(to_onnx_module, 'onnx_runner', interrupt)
    with pytest.raises(KeyboardInterrupt):
        export_backbone(thin_source(out_indices=(0,)), tmp_path, SHAPE, ('onnx',))
    assert written[0] > 0
    assert [path.name for path in tmp_path.iterdir()] == ['thin_64x96.onnx']
    assert (tmp_path / 'thin_64x96.onnx').read_text() == 'older'


# ------------------------------------------------------------ bad input: one line, exit status 2


@pytest.fixture(scope='module')
def tool():
    spec = importlib.util.spec_from_file_location('export_backbone_tool', TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def failing(tool, monkeypatch, capsys, tmp_path):
    """Run the tool, which must fail; return its line."""

    def run(*arguments):
        command = [TOOL, *arguments]
        if '--out-dir' not in arguments:
            command += ['--out-dir', tmp_path / 'out']
        monkeypatch.setattr(sys, 'argv', [str(part) for part in command])
        with pytest.raises(SystemExit) as stop:
            tool.main()
        assert stop.value.code == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert line.startswith('error: ')
        assert not (tmp_path / 'out').exists()
        return line

    return run


@pytest.mark.parametrize(
    ('arguments', 'words'),
    [
        (('s0', '--shape', '0', '512'), 'shape must be height and width from 32 to 4096'),
        (('s0', '--shape', '-512', '512'), 'shape must be height and width from 32 to 4096'),
        (('s0', '--shape', '512', '100000'), 'got (512, 100000)'),
        (('s0', '--shape', '512', 'x'), "invalid int value: 'x'"),
        (('s0', '--shape', '512'), 'expected 2 arguments'),
        (('s0', '--format', 'tflite'), "invalid choice: 'tflite'"),
        (('s0', '--compress', 'int2'), "invalid choice: 'int2'"),
        (('s7',), "'s7' is neither an arch (s0, s1, s2) nor a config"),
        (('gone.py',), 'gone.py'),
        (('s0', 'gone.pth'), 'gone.pth'),
        (('s0', '--with-neck'), 'is a backbone without neck or head: give a config'),
        (('s0', '--with-neck', '--part', 'model'), 'not allowed with argument'),
    ],
)
def test_bad_arguments(failing, arguments, words):
    assert words in failing(*arguments)


def test_config_without_care(failing, tmp_path):
    (tmp_path / 'resnet.py').write_text("model = dict(backbone=dict(type='ResNet'))")
    assert "must have one dict with type='mmcare.CARE'" in failing(tmp_path / 'resnet.py')
    (tmp_path / 'none.py').write_text('a = 1')
    assert 'it has 0' in failing(tmp_path / 'none.py')


def test_config_of_a_care_that_cannot_be_built(failing, tmp_path):
    (tmp_path / 'odd.py').write_text("model = dict(backbone=dict(type='CARE', arch='s9'))")
    line = failing(tmp_path / 'odd.py')
    assert 'odd.py describes cannot be built' in line and "arch='s9' is unknown" in line


def test_checkpoint_of_another_variant(failing, tmp_path):
    torch.save(published_weights('s1'), tmp_path / 's1.pth')
    assert 's1' in failing('s0', tmp_path / 's1.pth')


def test_folder_that_cannot_be_written(failing, tmp_path, monkeypatch):
    (tmp_path / 'file').touch()
    assert 'is not a directory' in failing('s0', '--out-dir', tmp_path / 'file' / 'folder')
    monkeypatch.setattr('os.access', lambda path, mode: False)  # root may write everywhere
    assert 'cannot be written' in failing('s0', '--out-dir', tmp_path / 'folder')
    with pytest.raises(PermissionError):
        check_writable(tmp_path)


def test_coremltools_missing(failing, monkeypatch):
    monkeypatch.setitem(sys.modules, 'coremltools', None)
    line = failing('s0')
    assert 'export to Core ML needs coremltools' in line and 'mmcare[export]' in line
    monkeypatch.setitem(sys.modules, 'onnxruntime', None)
    assert 'export to ONNX needs onnxruntime' in failing('s0', '--format', 'onnx')
