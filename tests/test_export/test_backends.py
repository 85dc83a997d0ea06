"""What backends share: images of pixels, checks, descriptions, and a backend that a test adds."""

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from export_helpers import odd_model, thin_model
from helpers import ROOT, THIN, deviation, run_tool
from toy_configs import sure_model

from mmcare import CARE
from mmcare.deployment import prepare_backbone
from mmcare.export import export_model, open_exported
from mmcare.export.backends import BACKENDS
from mmcare.export.backends.onnx import Onnx
from mmcare.export.check import ExportError
from mmcare.export.loading import IMAGENET
from mmcare.weights.reading import digest_weights
from mmcare_runtime.engines import ENGINES

PADDED = (50, 70)


@pytest.mark.conversion
@pytest.mark.parametrize('backend', [x for x in BACKENDS if 'float32' in BACKENDS[x].precisions])
def test_pixels(tmp_path, backend):
    """Pixels in, the maps of the normalised image out, where CARE pads; test_coreml has others."""
    for package in BACKENDS[backend].packages:
        pytest.importorskip(package)
    source = thin_model(out_indices=(0, 3))
    report = export_model(source, tmp_path, PADDED, (backend,), 'image', precision='float32')
    (image,) = report[backend]['inputs']
    padding = [*source.normalization.mean]
    padding = [round(x) for x in padding] if image['dtype'] == 'uint8' else padding
    assert (image['mean'], image['padding']) == (None, padding)
    program = open_exported(tmp_path / report[backend]['file'])
    assert program.input_kind == 'image' and program.input_shape == (1, 3, *PADDED)
    pixels = torch.randint(0, 256, (1, 3, *PADDED)).float()
    pixels = pixels.contiguous(memory_format=torch.channels_last)
    outputs = [torch.from_numpy(output) for output in program.run(pixels.numpy())]
    assert deviation(source.task(IMAGENET.normalize(pixels)), outputs) < 1e-4


@pytest.mark.conversion
def test_formats_do_not_disturb_each_other(tmp_path):
    """All take one program; a detector's has buffers that it does not use."""
    pytest.importorskip('litert_torch')
    source = sure_model('retinanet', tmp_path)
    reports = export_model(source, tmp_path, (64, 96), ('executorch', 'litert'))
    assert all(report['max_rel_error']['random'] < 1e-4 for report in reports.values())


def test_full_disk(tmp_path):
    """ExecuTorch's own save logs the error, and leaves half a file."""
    partition = pytest.importorskip('executorch.backends.xnnpack.partition.xnnpack_partitioner')
    from mmcare.export.backends.executorch import lower

    program = torch.export.export(torch.nn.ReLU(), (torch.ones(1, 3),))
    path = tmp_path / 'full.pte'
    path.symlink_to('/dev/full')
    with pytest.raises(OSError, match='No space left'):
        lower(program, partition.XnnpackPartitioner(), path, {})


CASES = [
    *(
        (name, dict(precision=p))
        for name, backend in BACKENDS.items()
        for p in backend.precisions
        if name != 'executorch-coreml'
    ),
    # The name of executorch-coreml in 1.0; test_postprocessing.py has the new one.
    ('executorch', dict(precision='float16', delegate='coreml')),
    *(('coreml', dict(compress=c)) for c in BACKENDS['coreml'].options['compress']['choices']),
]


def refuse_a_flipped_bit(path):
    """Flip one in the middle of the weights."""
    file = max((path, *path.rglob('*')), key=lambda file: file.is_file() and file.stat().st_size)
    content = file.read_bytes()
    middle = len(content) // 2
    file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    with pytest.raises(ValueError, match=f'{path.name} is damaged'):
        open_exported(path)
    file.write_bytes(content)


def run_in_two_threads(program):
    """Run one file for two images at the same time."""
    images = [
        np.random.default_rng(seed).normal(size=program.input_shape).astype(np.float32)
        for seed in range(2)
    ]
    expected, jobs = [*map(program.run, images)], [0, 1] * 4
    with ThreadPoolExecutor(2) as pool:
        results = pool.map(lambda index: program.run(images[index]), jobs)
        for index, outputs in zip(jobs, results, strict=True):
            for output, wanted in zip(outputs, expected[index], strict=True):
                np.testing.assert_array_equal(output, wanted)


@pytest.mark.conversion
@pytest.mark.parametrize(('backend', 'options'), CASES)
def test_checks_and_descriptions(tmp_path, pictures, backend, options):
    """In every format, precision and compression; alone, in another folder, without our paths."""
    for package in BACKENDS[backend].packages:
        pytest.importorskip(package)
    source = thin_model(out_indices=(0,))
    arguments = dict(shape=(32, 64), formats=(backend,), images=pictures, **options)
    report = export_model(source, tmp_path / 'out', **arguments)[backend]
    file = tmp_path / 'out' / report['file']
    older = {path.name: path.stat().st_mtime for path in file.parent.glob('*.json')}
    alone = file.rename(tmp_path / f'alone{file.suffix}')
    parts = [alone, *alone.rglob('*')]
    assert not any(str(ROOT).encode() in part.read_bytes() for part in parts if part.is_file())
    program = open_exported(alone)
    if program.timed:
        run_in_two_threads(program)
    found = program.description
    assert found == {key: report[key] for key in found}
    assert {*report} - {*found} >= {'file', 'bytes'} and found['format'] == backend
    refuse_a_flipped_bit(alone)
    if backend == 'executorch' and options.get('delegate') != 'coreml':
        with pytest.raises(ValueError, match='one number of threads'):
            open_exported(alone, threads=2)
        del program
        open_exported(alone, threads=2)  # now no other file is open
        open_exported(alone)
    assert found['sha256'] == digest_weights(source.task.model.state_dict(), {})
    assert found['precision'] == options.get('precision', 'float16')
    assert found.get('compress') == options.get('compress')
    if options.get('precision') == 'int8':
        assert report['calibration_images'] == 2  # two more are held back
    default = next(iter(BACKENDS[backend].precisions))
    words = ['thin_32x64', *(value for value in options.values() if value != default)]
    assert file.name == '_'.join(words) + file.suffix
    alone.rename(file)
    if backend != 'litert' and options.get('precision', default) != default:
        return  # its check is that of LiteRT

    source.task.model.__class__ = Wrong
    with pytest.raises(ExportError, match='is not written'):
        export_model(source, tmp_path / 'out', **arguments)
    assert {path.name: path.stat().st_mtime for path in file.parent.glob('*.json')} == older
    assert len([*file.parent.iterdir()]) == 2


class Wrong(CARE):
    """A CARE that answers exporters wrongly."""


@prepare_backbone.register(Wrong)
def prepare_wrongly(backbone, image):
    backbone.stem.conv.weight.mul_(-1)


class Apply(torch.nn.Module):
    def __init__(self, operator):
        super().__init__()
        self.operator = operator

    def forward(self, images):
        return (self.operator(images),)


@pytest.mark.parametrize(
    ('backend', 'operator', 'words'),
    [
        ('ncnn', lambda images: images.sort(3)[0], 'ncnn has no .*sort.*'),
        ('ncnn', torch.relu, 'pnnx failed'),
        ('litert', lambda images: torch.linalg.eigvals(images[..., :3, :3]).real, 'litert cannot'),
    ],
)
def test_unsupported_operators(tmp_path, monkeypatch, backend, operator, words):
    for package in BACKENDS[backend].packages:
        pytest.importorskip(package)
    if 'pnnx' in words:
        monkeypatch.setattr('pnnx.EXEC_PATH', 'false')
    source = odd_model(Apply(operator), ['applied'], normalization=None)
    with pytest.raises(ExportError, match=f'{words}.*odd_32x32{BACKENDS[backend].suffix}'):
        export_model(source, tmp_path, (32, 32), (backend,))
    assert not list(tmp_path.iterdir())


class Saved(Onnx):
    name, suffix = 'saved', '.saved'


def test_a_new_backend(tmp_path, monkeypatch, capsys):
    """What writing needs is its class; the tool knows it then. Stopped, it writes nothing."""
    monkeypatch.setitem(BACKENDS, 'saved', Saved())
    monkeypatch.setitem(ENGINES, '.saved', ('onnxruntime',))
    config = tmp_path / 'thin.py'
    config.write_text(f"model = dict(backbone=dict(type='mmcare.CARE', arch={THIN}))")
    options = '--format', 'saved', '--shape', 64, 64, '--out-dir', tmp_path / 'out'
    export = partial(run_tool, monkeypatch, 'export', config, *options)
    with monkeypatch.context() as patched:
        patched.setattr(Saved, 'write', Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(SystemExit, match='130'):
            export()
    assert capsys.readouterr().err.endswith('stopped: what is complete is written\n')
    assert not (tmp_path / 'out').exists()
    export()
    printed = capsys.readouterr().out
    assert 'file: thin_64x64.saved' in printed
    assert "pictures: 'none compared: ValueError: the config has no mean" in printed
    report = json.loads((tmp_path / 'out' / 'thin_64x64.saved.json').read_text())
    assert report['max_rel_error']['random'] < 1e-5 and report['inputs'][0]['shape'] == [
        1,
        3,
        64,
        64,
    ]
    assert open_exported(tmp_path / 'out' / 'thin_64x64.saved').description['format'] == 'saved'
