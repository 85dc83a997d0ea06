"""LiteRT: structure, numbers with and without XNNPACK, and int8."""

import numpy as np
import pytest
import torch
from export_helpers import SHAPE, STAGES, Shared, export_int8, smooth, spec_of, thin_source
from helpers import THIN

from mmcare.export import export_model
from mmcare.export.backends import BACKENDS
from mmcare.export.source import IMAGENET
from mmcare.export.verify import ExportError, signal_to_noise

pytest.importorskip('litert_torch')
from ai_edge_litert.interpreter import Interpreter

# With one head, LiteRT writes a product of matrices as a layer that XNNPACK does not take.
TWO_HEADS = dict(THIN, head_channels=(4, 4, 4, 4))


def described(path):
    program = Interpreter(str(path))
    runner = program.get_signature_runner()
    details = {**runner.get_input_details(), **runner.get_output_details()}
    by_signature = [details[name] for name in ('image', *STAGES)]
    in_order = [*program.get_input_details(), *program.get_output_details()]
    assert [x['name'] for x in by_signature] == [x['name'] for x in in_order]
    return [(x['shape'].tolist(), x['dtype']) for x in in_order]


@pytest.fixture(scope='module')
def exported(tmp_path_factory, pictures):
    out_dir = tmp_path_factory.mktemp('litert')
    options = dict(shape=SHAPE, formats=('litert',))
    source = thin_source(arch=TWO_HEADS)
    reports = [
        export_model(source, out_dir, **options),
        export_model(source, out_dir, precision='int8', images=pictures, **options),
    ]
    return out_dir, *reports


def test_structure(exported):
    out_dir, *reports = exported
    maps = thin_source(arch=TWO_HEADS).network(torch.zeros(1, 3, *SHAPE))
    shapes = [[1, *SHAPE, 3], *([*x.permute(0, 2, 3, 1).shape] for x in maps)]
    for report, end in zip(reports, ('', '_int8'), strict=True):
        entries = report['litert']
        assert entries['file'] == f'thin_64x96{end}.tflite'
        assert entries['delegates'] == 1 and entries['outside'] == {}
        assert [x['shape'] for x in entries['inputs'] + entries['outputs']] == shapes
        assert described(out_dir / entries['file']) == [(shape, np.float32) for shape in shapes]
        (image,) = entries['inputs']
        assert (
            image['layout'] == 'NHWC' and image['kind'] == 'tensor' and image['channels'] == 'RGB'
        )
        assert (image['mean'], image['std']) == ([*IMAGENET.mean], [*IMAGENET.std])
        program = Interpreter(str(out_dir / entries['file']))
        assert any(x['dtype'] == np.int8 for x in program.get_tensor_details()) == bool(end)
        kinds = {node['op_name'] for node in program._get_ops_details()}
        assert not {'BROADCAST_TO', 'ELU'} & kinds and {'CONV_2D', 'BATCH_MATMUL'} <= kinds


@pytest.mark.parametrize('delegate', [True, False])
def test_numbers(exported, delegate):
    """As PyTorch's in float; in int8 not far, though pictures are few."""
    out_dir, report, quantized = exported
    image, network = smooth(5), thin_source(arch=TWO_HEADS).network
    expected = network(image)
    for entries in (report['litert'], quantized['litert']):
        found = BACKENDS['litert'].open(out_dir / entries['file'], delegate).run(image)
        assert min(signal_to_noise([expected], [found])) > (
            15 if 'quantization' in entries else 100
        )
    assert max(report['litert']['deviations'].values()) < 1e-5
    assert min(quantized['litert']['quantization']['snr'].values()) > 20


class Large(torch.nn.Module):
    """What leaves float16 on the way."""

    def forward(self, images):
        return ((images * 1e6).relu() * 1e-6,)


def test_float16(exported, tmp_path):
    """Files are compared in it, and refused."""
    _, report, quantized = exported
    assert 1e-5 < report['litert']['deviations_float16']['random'] < 5e-3
    assert min(quantized['litert']['quantization']['snr_float16'].values()) > 20
    with pytest.raises(ExportError, match=r'^LiteRT in float16.*odd_64x96.tflite'):
        BACKENDS['litert'].export(spec_of(Large(), ['large'], SHAPE), tmp_path)
    spec = spec_of(Large(), ['large'], SHAPE, tolerance=1e-3)
    found = BACKENDS['litert'].export(spec, tmp_path)['deviations_float16']
    assert found == 'not compared: a tolerance is given'


class Gated(Shared):
    """A convolution whose maps are an output and feed a layer in float32."""

    def forward(self, images):
        maps = self.first(images)
        return maps, maps.sigmoid()


@pytest.mark.parametrize('kind', [Shared, Gated])
def test_int8_ranges_and_order_of_outputs(tmp_path, kind):
    """The brightest picture counts in full. With Shared, two levels share their weights."""
    picture, calibration = smooth(0), [smooth(1) / 10, smooth(1)]
    torch.manual_seed(0)
    network = kind().eval()
    report = export_int8(network, ['second', 'first'], picture, calibration, tmp_path, 'litert')
    snr = report['quantization']['snr']
    assert list(snr) == ['second', 'first'] and min(snr.values()) > 20
