"""LiteRT: structure, numbers with and without XNNPACK, and int8."""

from functools import partial

import numpy as np
import pytest
import torch
from export_helpers import SHAPE, STAGES, Gated, Shared, export_int8, odd_model, smooth, thin_model
from helpers import THIN

from mmcare.export import export_model, open_exported
from mmcare.export.check import sqnr_db
from mmcare.export.loading import IMAGENET

pytest.importorskip('litert_torch')
from ai_edge_litert.interpreter import Interpreter, OpResolverType

from mmcare_runtime.engines import litert

pytestmark = pytest.mark.conversion

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
    source = thin_model(arch=TWO_HEADS)
    reports = [
        export_model(source, out_dir, **options),
        export_model(source, out_dir, precision='int8', images=pictures, **options),
    ]
    return out_dir, *reports


def test_structure(exported):
    out_dir, *reports = exported
    maps = thin_model(arch=TWO_HEADS).task(torch.zeros(1, 3, *SHAPE))
    shapes = [[1, *SHAPE, 3], *([*x.permute(0, 2, 3, 1).shape] for x in maps)]
    for report, end in zip(reports, ('', '_int8'), strict=True):
        entries = report['litert']
        assert entries['file'] == f'thin_64x96{end}.tflite'
        assert entries['delegates'] == 1 and entries['non_delegated_ops'] == {}
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


def test_pieces_of_large_kernels_stay_in_float32(exported):
    """Sums of pieces would take longer in int8."""
    out_dir, _, quantized = exported
    program = Interpreter(
        str(out_dir / quantized['litert']['file']),
        experimental_op_resolver_type=OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
    )
    details = {tensor['index']: tensor for tensor in program.get_tensor_details()}
    nodes = [x for x in program._get_ops_details() if x['op_name'] == 'DEPTHWISE_CONV_2D']
    kernels = [details[node['inputs'][1]] for node in nodes]
    found = {(kernel['shape'][1] == kernel['shape'][2], kernel['dtype']) for kernel in kernels}
    assert found == {(True, np.int8), (False, np.float32)}


@pytest.mark.parametrize('delegate', [True, False])
def test_numbers(exported, delegate):
    """As PyTorch's in float; in int8 not far, though pictures are few."""
    out_dir, report, quantized = exported
    image, network = smooth(5), thin_model(arch=TWO_HEADS).task
    expected = network(image)
    for entries in (report['litert'], quantized['litert']):
        path = out_dir / entries['file']
        outputs = litert.open_file(path, threads=1, delegate=delegate).run(image.numpy())
        assert min(sqnr_db([expected], [outputs])) > (15 if 'sqnr_db' in entries else 100)
    assert max(report['litert']['max_rel_error'].values()) < 1e-5
    assert min(quantized['litert']['sqnr_db'].values()) > 20


class Large(torch.nn.Module):
    """What leaves float16 on the way."""

    def forward(self, images):
        return ((images * 1e6).relu() * 1e-6,)


def test_float16(exported, tmp_path):
    """Files are compared in it; a file that is wrong in it says so, and is not opened in it."""
    _, report, quantized = exported
    assert 1e-5 < report['litert']['max_rel_error_float16']['random'] < 5e-3
    assert min(quantized['litert']['sqnr_db_float16'].values()) > 20
    export = partial(export_model, odd_model(Large(), ['large']), tmp_path, SHAPE, ('litert',))
    for tolerance in (None, 1e-3):
        report = export(tolerance=tolerance)['litert']
        assert report['max_rel_error_float16'].startswith('too large: LiteRT in float16')
        assert report['float16'] is False and report['max_rel_error']['random'] < 1e-5
        path = tmp_path / report['file']
        assert open_exported(path).description['float16'] is False
        with pytest.raises(ValueError, match='in float32 only'):
            open_exported(path, float16=True)
    report = export(compare_float16=False)['litert']
    assert report['max_rel_error_float16'] == 'not compared: switched off'


@pytest.mark.parametrize('kind', [Shared, Gated])
def test_int8_ranges_and_order_of_outputs(tmp_path, kind):
    """The brightest picture counts in full. With Shared, two levels share their weights."""
    picture, calibration = smooth(0), [smooth(1) / 10, smooth(1)]
    torch.manual_seed(0)
    network = kind().eval()
    report = export_int8(network, ['second', 'first'], picture, calibration, tmp_path, 'litert')
    ratios = report['sqnr_db']
    assert list(ratios) == ['second', 'first'] and min(ratios.values()) > 20
