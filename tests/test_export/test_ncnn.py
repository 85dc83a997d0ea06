"""ncnn through pnnx: numbers, and what ncnn does not have."""

import pytest
import torch
from test_export import SHAPE, deviation, job_of, thin_source
from torch import nn

from mmcare.export import export_backbone
from mmcare.export.export import write_file
from mmcare.export.formats import FORMATS
from mmcare.export.runtime import open_exported
from mmcare.export.verify import ExportError

pytest.importorskip('ncnn')


@pytest.mark.parametrize('shape', [SHAPE, (50, 70)])
def test_ncnn_computes_the_backbone(tmp_path, shape):
    folder = tmp_path / 'thin_{}x{}.ncnn'.format(*shape)
    folder.mkdir()
    (folder / 'older').touch()
    source = thin_source()
    report = export_backbone(source, tmp_path, shape, ('ncnn',))['ncnn']
    names = {path.name for path in folder.iterdir()}
    assert names == {'model.ncnn.param', 'model.ncnn.bin', 'mmcare.json'}
    assert report['deviations']['random'] < 1e-5
    program = open_exported(folder)
    assert program.input_shape == (1, 3, *shape)
    image = torch.randn(1, 3, *shape)
    found = [torch.from_numpy(output) for output in program.run(image)]
    assert deviation(source.network(image), found) < 1e-4


class Sorted(nn.Module):
    """Values sorted along the width."""

    def forward(self, images):
        return (images.sort(3)[0],)


@pytest.mark.parametrize('words', ['ncnn has no .*sort.*', 'pnnx failed'])
def test_a_failure_is_one_error(tmp_path, monkeypatch, words):
    """An operator that ncnn does not have is named."""
    if 'pnnx' in words:
        monkeypatch.setattr('pnnx.EXEC_PATH', 'false')
    job = job_of(Sorted(), ['sorted'], (32, 32))
    with pytest.raises(ExportError, match=f'{words}; sorted.ncnn is not written'):
        write_file(FORMATS['ncnn'], job, tmp_path / 'sorted.ncnn')
    assert not list(tmp_path.iterdir())
