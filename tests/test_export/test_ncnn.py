"""ncnn: files that older versions compute as well, and what they crash on."""

import sys

import numpy as np
import pytest
import torch
from export_helpers import SHAPE, odd_model, thin_model
from helpers import ROOT, run
from test_postprocessing import source_of
from torch import nn

sys.path.insert(0, str(ROOT / 'benchmarks'))  # where scripts find each other

import heads

from mmcare.export import export_model, open_exported
from mmcare.export.backends.ncnn import Ncnn
from mmcare.export.errors import ExportError

for package in Ncnn.packages:
    pytest.importorskip(package)

OLDEST = ROOT / '.venv/ncnn-20250503'


class Folded(nn.Module):
    """Heads are folded into the leading axis, as in the released attention."""

    def forward(self, images):
        heads = images.repeat(1, 2, 1, 1).reshape(2, 3, -1)
        return (torch.bmm(heads, heads.transpose(1, 2)).reshape(1, 2, 3, 3),)


@pytest.mark.conversion
def test_batch_axes_are_refused(tmp_path):
    source = odd_model(Folded(), ['products'], normalization=None)
    with pytest.raises(ExportError, match=r'pnnx takes an axis of reshape_\d+.* for the batch'):
        export_model(source, tmp_path, (32, 32), ('ncnn',))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_oldest_version(tmp_path):
    """A CARE, segmentors, a detector and a classifier; files say that it was tried."""
    if not (OLDEST / '.ready').exists():
        pytest.skip('no old ncnn: `make test-ncnn` fetches it')
    jobs, image = {}, np.random.default_rng(0).normal(size=(1, 3, *SHAPE)).astype(np.float32)
    kinds = (source_of(kind, tmp_path) for kind in ('fpn', 'RetinaNet', 'classifier'))
    for source in thin_model(), heads.build(heads.HEADS['UPer']), *kinds:
        report = export_model(source, tmp_path, SHAPE, ('ncnn',))['ncnn']
        jobs[report['file']] = open_exported(tmp_path / report['file']).run(image)
    code = """
import json, sys, ncnn, numpy
from mmcare_runtime import open_exported
print(ncnn.__version__)
image = numpy.load(sys.argv[1])
for number, file in enumerate(sys.argv[2:]):
    numpy.savez(f'{sys.argv[1]}.{number}.npz', *open_exported(file).run(image))
"""
    np.save(tmp_path / 'image.npy', image)
    files = [tmp_path / file for file in jobs]
    paths = f'{OLDEST}:{ROOT}'
    printed = run(sys.executable, '-c', code, tmp_path / 'image.npy', *files, PYTHONPATH=paths)
    assert f'ncnn {printed.stdout.strip()}' == report['tried_with'][0]
    for number, expected in enumerate(jobs.values()):
        found = np.load(tmp_path / f'image.npy.{number}.npz')
        for output, wanted in zip(found.values(), expected, strict=True):
            np.testing.assert_allclose(output, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())
