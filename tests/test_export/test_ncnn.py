"""ncnn through pnnx: what ncnn does not have; test_formats has the numbers."""

import pytest
from test_export import job_of
from torch import nn

from mmcare.export.export import write_file
from mmcare.export.formats import FORMATS
from mmcare.export.verify import ExportError

pytest.importorskip('ncnn')


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
