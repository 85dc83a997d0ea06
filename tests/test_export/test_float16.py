"""Attention whose heads are off or saturated, on the engines that compute in float16 here."""

import pytest
from export_helpers import thin_model
from helpers import THIN, craft_heads

from mmcare.export import export_model
from mmcare.export.backends import BACKENDS
from mmcare.models.backbones.care import LinearAttention

# A block of stages 3 and 4 for each; with one head, XNNPACK does not take the products.
BIASES = (0, -3, -6, -9, -15, 300)
ARCH = dict(THIN, depths=(1, 1, 3, 3), head_channels=(4, 4, 4, 4))


@pytest.mark.parametrize(('backend', 'key'), [('coreml', ''), ('litert', '_float16')])
def test_heads_that_training_switches_off(tmp_path, backend, key):
    """On zeros and hundredfold images too. The released form returns NaN from -9 on."""
    for package in BACKENDS[backend].packages:
        pytest.importorskip(package)
    source = thin_model(arch=ARCH)
    blocks = [m for m in source.task.modules() if isinstance(m, LinearAttention)]
    for bias, block in zip(BIASES, blocks, strict=True):
        craft_heads(block, bias)
    report = export_model(source, tmp_path, (128, 128), (backend,), 'tensor')[backend]
    assert all(error < 1e-2 for error in report[f'max_rel_error{key}'].values())
    assert report.get('delegates', 1) == 1
