"""What formats share: images of pixels, joined reports, and a format that a test adds."""

import json
import runpy
import sys

import pytest
import torch
from helpers import ROOT, THIN
from test_export import deviation, normalised, thin_source

from mmcare.export import export_backbone
from mmcare.export.formats import FORMATS
from mmcare.export.formats.base import Format
from mmcare.export.runtime import open_exported

PADDED, TOOL = (50, 70), str(ROOT / 'tools' / 'export_backbone.py')


@pytest.mark.parametrize('kind', [name for name, form in FORMATS.items() if form.runtime])
@pytest.mark.filterwarnings('ignore:.*delegates instead of one')  # of attention with one head
def test_pixels(tmp_path, kind):
    """Pixels in, the maps of the normalised image out, where CARE pads; test_coreml has others."""
    for package in FORMATS[kind].packages:
        pytest.importorskip(package)
    source = thin_source(out_indices=(0, 3))
    report = export_backbone(source, tmp_path, PADDED, (kind,), 'image', precision='float32')
    (image,) = report[kind]['inputs']
    assert (image['mean'], image['padding']) == (None, [*source.normalization.mean])
    program = open_exported(tmp_path / report[kind]['file'])
    assert program.pixels and program.input_shape == (1, 3, *PADDED)
    pixels = torch.randint(0, 256, (1, 3, *PADDED)).float()
    found = [torch.from_numpy(one) for one in program.run(pixels)]
    assert deviation(source.network(normalised(pixels)), found) < 1e-4


class Text(Format):
    """The graph, as text."""

    name = 'text'
    ending = '.graph'
    packages = ()

    def write(self, job, path):
        path.write_text(str(job.program.graph))
        return dict(deviations='text is not run')


def test_a_format_is_a_file(tmp_path, monkeypatch):
    """What writing needs is its class; the tool and the report know it then."""
    monkeypatch.setitem(FORMATS, 'text', Text())
    config = tmp_path / 'thin.py'
    config.write_text(f"model = dict(backbone=dict(type='mmcare.CARE', arch={THIN}))")
    options = ['--format', 'text', '--shape', '64', '64', '--out-dir', str(tmp_path / 'out')]
    monkeypatch.setattr(sys, 'argv', [TOOL, str(config), *options])
    runpy.run_path(TOOL, run_name='__main__')
    assert 'aten.conv2d' in (tmp_path / 'out' / 'thin_64x64.graph').read_text()
    report = json.loads((tmp_path / 'out' / 'thin_64x64.json').read_text())
    assert report['text']['bytes'] > 0 and report['text']['inputs'][0]['shape'] == [1, 3, 64, 64]
    with pytest.raises(ValueError, match='other formats cannot be run here'):
        open_exported(tmp_path / 'out' / 'thin_64x64.graph')


def test_reports_are_joined(tmp_path, monkeypatch):
    """Of one network; an entry without its file is left out."""
    monkeypatch.setitem(FORMATS, 'text', Text())
    for kind, expected in (('onnx', {'onnx'}), ('text', {'onnx', 'text'})):
        export_backbone(thin_source(out_indices=(0,)), tmp_path, (32, 32), (kind,))
        report = json.loads((tmp_path / 'thin_32x32.json').read_text())
        assert report.keys() & FORMATS.keys() == expected
    (tmp_path / 'thin_32x32.onnx').unlink()
    report = export_backbone(thin_source(out_indices=(0,)), tmp_path, (32, 32), ('text',))
    assert report.keys() & FORMATS.keys() == {'text'}
