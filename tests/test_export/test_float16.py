"""Attention whose heads are off or saturated, on the engines that compute in float16 here."""

import pytest
from helpers import THIN, craft_heads
from test_export import thin_source

from mmcare.export import export_backbone
from mmcare.export.formats import FORMATS
from mmcare.models.backbones.care import LinearAttention

# A block of stages 3 and 4 for each; with one head, XNNPACK does not take the products.
BIASES = (0, -3, -6, -9, -15, 300)
ARCH = dict(THIN, depths=(1, 1, 3, 3), head_channels=(4, 4, 4, 4))


@pytest.mark.parametrize(('kind', 'key'), [('coreml', ''), ('litert', '_float16')])
def test_heads_that_training_switches_off(tmp_path, kind, key):
    """On zeros and hundredfold images too. The released form returns NaN from -9 on."""
    for package in FORMATS[kind].packages:
        pytest.importorskip(package)
    source = thin_source(arch=ARCH)
    blocks = [one for one in source.network.modules() if isinstance(one, LinearAttention)]
    for bias, block in zip(BIASES, blocks, strict=True):
        craft_heads(block, bias)
    report = export_backbone(source, tmp_path, (128, 128), (kind,))[kind]
    assert all(deviation < 1e-2 for deviation in report[f'deviations{key}'].values())
    assert report.get('delegates', 1) == 1
