"""What formats share: images of pixels, checks, descriptions, and a format that a test adds."""

import json
import runpy
import sys
from unittest.mock import Mock

import pytest
import torch
from helpers import ROOT, THIN
from test_export import deviation, job_of, normalised, thin_source
from test_quantize import draw_pictures

from mmcare.export import export_model
from mmcare.export.backends import FORMATS
from mmcare.export.backends.base import Exported, Format, Written
from mmcare.export.export import write_file
from mmcare.export.runtime import open_exported
from mmcare.export.verify import ExportError
from mmcare.weights.reading import digest_weights

PADDED, TOOL = (50, 70), str(ROOT / 'tools' / 'export_backbone.py')


@pytest.mark.parametrize('kind', FORMATS)
def test_pixels(tmp_path, kind):
    """Pixels in, the maps of the normalised image out, where CARE pads; test_coreml has others."""
    for package in FORMATS[kind].packages:
        pytest.importorskip(package)
    source = thin_source(out_indices=(0, 3))
    report = export_model(source, tmp_path, PADDED, (kind,), 'image', precision='float32')
    (image,) = report[kind]['inputs']
    assert (image['mean'], image['padding']) == (None, [*source.normalization.mean])
    program = open_exported(tmp_path / report[kind]['file'])
    assert program.pixels and program.input_shape == (1, 3, *PADDED)
    pixels = torch.randint(0, 256, (1, 3, *PADDED)).float()
    pixels = pixels.contiguous(memory_format=torch.channels_last)
    found = [torch.from_numpy(one) for one in program.run(pixels)]
    assert deviation(source.network(normalised(pixels)), found) < 1e-4


KINDS = [
    *((name, dict(precision=one)) for name, form in FORMATS.items() for one in form.precisions),
    *(('coreml', dict(compress=one)) for one in FORMATS['coreml'].options['compress']['choices']),
]


@pytest.fixture(scope='module')
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp('pictures')
    draw_pictures(folder / 'deeper', '.PNG')
    (folder / 'notes.txt').write_text('no picture')
    return folder


@pytest.mark.parametrize(('kind', 'options'), KINDS)
def test_a_wrong_weight_is_an_error_and_a_right_file_says_what_it_is(
    tmp_path, monkeypatch, pictures, kind, options
):
    """In every format, precision and compression; alone, in another folder."""
    for package in FORMATS[kind].packages:
        pytest.importorskip(package)
    source = thin_source(out_indices=(0,))
    arguments = dict(shape=(32, 64), formats=(kind,), images=pictures, **options)
    report = export_model(source, tmp_path / 'out', **arguments)[kind]
    file = tmp_path / 'out' / report['file']
    older = {path.name: path.stat().st_mtime for path in file.parent.glob('*.json')}
    found = open_exported(file.rename(tmp_path / f'alone{file.suffix}')).description
    assert found == {key: report[key] for key in found}
    assert {*report} - {*found} >= {'file', 'bytes'} and found['format'] == kind
    assert found['sha256'] == digest_weights(source.network.model.state_dict(), {})
    assert found['precision'] == options.get('precision', 'float16')
    assert found.get('compress') == options.get('compress')
    if options.get('precision') == 'int8':
        assert report['quantization']['images'] == 2  # two more are held back
    name = [one for one in options.values() if one != next(iter(FORMATS[kind].precisions))]
    assert file.name == '_'.join(['thin_32x64', *name]) + file.suffix
    (tmp_path / f'alone{file.suffix}').rename(file)

    def wrong_fold(network):
        network.backbone.stem.conv.weight.mul_(-1)

    monkeypatch.setattr('mmcare.export.export.fold_all', wrong_fold)
    with pytest.raises(ExportError, match='is not written'):
        export_model(source, tmp_path / 'out', **arguments)
    assert {path.name: path.stat().st_mtime for path in file.parent.glob('*.json')} == older
    assert len([*file.parent.iterdir()]) == 2


class Apply(torch.nn.Module):
    """An operator that not every format has."""

    def __init__(self, operator):
        super().__init__()
        self.operator = operator

    def forward(self, images):
        return (self.operator(images),)


@pytest.mark.parametrize(
    ('kind', 'operator', 'words'),
    [
        ('ncnn', lambda images: images.sort(3)[0], 'ncnn has no .*sort.*'),
        ('ncnn', torch.relu, 'pnnx failed'),
        ('litert', lambda images: torch.linalg.eigvals(images[..., :3, :3]).real, 'LiteRT cannot'),
    ],
)
def test_what_cannot_be_converted_is_one_error(tmp_path, monkeypatch, kind, operator, words):
    """An operator that ncnn does not have is named."""
    for package in FORMATS[kind].packages:
        pytest.importorskip(package)
    if 'pnnx' in words:
        monkeypatch.setattr('pnnx.EXEC_PATH', 'false')
    job, path = (
        job_of(Apply(operator), ['applied'], (32, 32)),
        tmp_path / f'odd{FORMATS[kind].ending}',
    )
    with pytest.raises(ExportError, match=f'{words}.*{path.name}'):
        write_file(FORMATS[kind], job, path)
    assert not list(tmp_path.iterdir())


class Saved(Format):
    """A program, as torch.export saves it."""

    name = 'saved'
    ending = '.pt2'
    packages = ()
    runtime = 'PyTorch'

    def write(self, job, path, description):
        torch.export.save(job.program, path, extra_files=dict(mmcare=json.dumps(description)))
        return Written({})

    def open(self, path):
        extra = dict(mmcare='')
        program = torch.export.load(path, extra_files=extra)
        description = json.loads(extra['mmcare'])
        run = program.module()
        return Exported(
            lambda images: [one.numpy() for one in run(images)],
            tuple(description['inputs'][0]['shape']),
            description,
        )


def test_a_format_is_a_file(tmp_path, monkeypatch, capsys):
    """What writing needs is its class; the tool knows it then. Stopped, it writes nothing."""
    monkeypatch.setitem(FORMATS, 'saved', Saved())
    config = tmp_path / 'thin.py'
    config.write_text(f"model = dict(backbone=dict(type='mmcare.CARE', arch={THIN}))")
    options = ['--format', 'saved', '--shape', '64', '64', '--out-dir', str(tmp_path / 'out')]
    monkeypatch.setattr(sys, 'argv', [TOOL, str(config), *options])
    with monkeypatch.context() as patched:
        patched.setattr('mmcare.export.export.write_file', Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(SystemExit, match='130'):
            runpy.run_path(TOOL, run_name='__main__')
    assert capsys.readouterr().err.endswith('stopped: nothing is written\n')
    assert not (tmp_path / 'out').exists()
    runpy.run_path(TOOL, run_name='__main__')
    printed = capsys.readouterr().out
    assert 'file: thin_64x64.pt2' in printed
    assert "pictures: 'none compared: ValueError: the config has no mean" in printed
    report = json.loads((tmp_path / 'out' / 'thin_64x64.pt2.json').read_text())
    assert report['deviations']['random'] < 1e-5 and report['inputs'][0]['shape'] == [1, 3, 64, 64]
    assert open_exported(tmp_path / 'out' / 'thin_64x64.pt2').description['format'] == 'saved'
