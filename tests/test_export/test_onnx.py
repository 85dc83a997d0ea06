"""ONNX for PCs and boards: batches, NMS left to the engine, int8, and old engines."""

import json
import sys
from functools import partial

import numpy as np
import onnx
import pytest
import torch
from export_helpers import SHAPE, export_int8, smooth, thin_model
from helpers import ROOT, run
from test_postprocessing import source_of

from mmcare.export import export_model, open_exported
from mmcare.export.backends import onnx_int8
from mmcare.export.backends.onnx import OPSETS
from mmcare.export.errors import ExportError

sys.path.insert(0, str(ROOT / 'benchmarks'))  # where scripts find each other

import int8_operators

OLDEST, OPENVINO = ROOT / '.venv/onnxruntime-1.15', ROOT / '.venv/openvino'


def pictures(number):
    """Pictures of the input's ratio: no box is in the padding."""
    rng = np.random.default_rng(0)
    sizes = [(SHAPE[0] * i, SHAPE[1] * i, 3) for i in range(1, number + 1)]
    return [rng.integers(0, 256, size, np.uint8) for size in sizes]


@pytest.fixture(scope='module')
def detectors(tmp_path_factory):
    """One detector for batches, with NMS in the file and outside."""
    folder = tmp_path_factory.mktemp('detectors')
    source = source_of('RetinaNet', folder)
    options = dict(shape=SHAPE, formats=('onnx',), input_kind='image', outputs='decoded')
    jobs = dict(inside=dict(batch=3), outside=dict(nms='outside', batch=2))
    reports = {key: export_model(source, folder, **options, **job) for key, job in jobs.items()}
    return {key: open_exported(folder / report['onnx']['file']) for key, report in reports.items()}


@pytest.mark.conversion
def test_pictures_in_batches(detectors):
    """Each picture gets what it gets alone, also where a batch is not full."""
    assert [x.file.name for x in detectors.values()] == [
        'retinanet_model_64x96_decoded_batch3.onnx',
        'retinanet_model_64x96_decoded_batch2_outside.onnx',
    ]
    inside, outside = (x.predict(pictures(4)) for x in detectors.values())
    alone = [detectors['inside'].predict(x) for x in pictures(4)]
    assert len(inside) == 4 and min(len(x['boxes']) for x in alone) > 2
    for several in inside, outside:
        for results, expected in zip(several, alone, strict=True):
            np.testing.assert_allclose(results['boxes'], expected['boxes'], rtol=0, atol=1e-3)
            np.testing.assert_array_equal(results['labels'], expected['labels'])


@pytest.mark.conversion
def test_boxes_for_engines_with_nms(detectors):
    """EfficientNMS of TensorRT takes (B, P, 4) and (B, P, K)."""
    boxes, scores = detectors['outside'].description['outputs']
    number = 4 * (8 * 12 + 4 * 6 + 2 * 3)
    assert boxes['shape'] == [2, number, 4] and scores['shape'] == [2, number, 2]
    nodes = onnx.load(detectors['outside'].file).graph.node
    assert not {'NonMaxSuppression', 'TopK', 'ScatterND'} & {node.op_type for node in nodes}


@pytest.mark.conversion
def test_label_maps_in_batches(tmp_path):
    """The export has compared them with PyTorch."""
    source = source_of('fpn', tmp_path)
    report = export_model(source, tmp_path, SHAPE, ('onnx',), outputs='decoded', batch=2)['onnx']
    program = open_exported(tmp_path / report['file'])
    assert program.input_shape == (2, 3, *SHAPE) and report['outputs'][0]['shape'][0] == 2
    several, alone = program.predict(pictures(3)), [program.predict(x) for x in pictures(3)]
    for results, expected in zip(several, alone, strict=True):
        np.testing.assert_array_equal(results['labels'], expected['labels'])


@pytest.mark.conversion
def test_batches_of_maps_in_int8(tmp_path, monkeypatch):
    """An image that differs from the first is compared also."""
    images = [torch.randint(0, 256, (1, 3, *SHAPE)).float() for _ in range(4)]
    options = dict(formats=('onnx',), batch=2, precision='int8', images=images)
    report = export_model(thin_model(), tmp_path, SHAPE, **options)['onnx']
    assert report['file'] == 'thin_64x96_batch2_int8.onnx' and report['calibration_images'] == 2
    assert min(report['sqnr_db'].values()) > 15


def quantized_maps(path):
    """Return the zero points of a file's maps, and the types of operators that write int8 maps."""
    graph = onnx.load(path).graph
    made = {name: node for node in graph.node for name in node.output}
    convs = [node for node in graph.node if node.op_type == 'Conv']
    assert convs and all(made[x].op_type == 'DequantizeLinear' for c in convs for x in c.input[:2])
    constants = {x.name: onnx.numpy_helper.to_array(x) for x in graph.initializer}
    nodes = [node for node in graph.node if node.op_type == 'QuantizeLinear']
    writers = {made[node.input[0]].op_type for node in nodes if node.input[0] in made}
    return [constants[node.input[2]] for node in nodes], writers


@pytest.fixture(scope='module')
def small(tmp_path_factory, pictures):
    """A CARE in int8 by opset, and for TensorRT."""
    options = dict(formats=('onnx',), precision='int8', images=pictures)
    jobs = {opset: dict(opset=opset) for opset in OPSETS} | dict(tensorrt=dict(int8_for='tensorrt'))
    reports = {}
    for key, job in jobs.items():
        folder = tmp_path_factory.mktemp(str(key))
        report = export_model(thin_model(), folder, SHAPE, **options, **job)['onnx']
        reports[key] = dict(report, path=folder / report['file'])
    return reports


@pytest.mark.conversion
@pytest.mark.parametrize('opset', OPSETS)
def test_what_onnx_runtime_fuses_in_int8(small, opset):
    """No convolution computes in float32, and each GELU is one operator, as in float32."""
    report, network = small[opset], thin_model().task
    counts = int8_operators.count_operators(report['path'])
    assert not counts['Conv'] + counts['FusedConv'] + counts['Erf']
    assert counts['QLinearConv'] == sum(number for _, number in report['convolutions'])
    assert counts['Gelu'] == sum(isinstance(x, torch.nn.GELU) for x in network.modules()) > 0
    zeros, writers = quantized_maps(report['path'])
    assert {zero.dtype for zero in zeros} == {np.dtype(np.uint8)} and 'Concat' in writers


@pytest.mark.conversion
def test_int8_for_tensorrt(small):
    """Maps have no zero points."""
    assert small['tensorrt']['path'].name == 'thin_64x96_int8_tensorrt.onnx'
    assert small['tensorrt']['int8_for'] == 'tensorrt' and 'int8_for' not in small[18]
    zeros, _ = quantized_maps(small['tensorrt']['path'])
    assert {zero.dtype for zero in zeros} == {np.dtype(np.int8)} and not np.any(zeros)
    ratios = zip(small['tensorrt']['sqnr_db'].values(), small[18]['sqnr_db'].values(), strict=True)
    assert all(other < ratio for other, ratio in ratios)  # ranges must be symmetric


def test_int8_does_not_saturate(tmp_path):
    """x86 without VNNI adds two products in 16 bits."""
    network = torch.nn.Conv2d(3, 4, 1, bias=False)
    torch.nn.init.ones_(network.weight)
    picture = smooth(0).abs()
    report = export_int8(network, ['sums'], picture, [picture], tmp_path, 'onnx')
    assert report['sqnr_db']['sums'] > 35


def test_what_does_not_fit(tmp_path):
    source = source_of('RetinaNet', tmp_path)
    for options, words in (
        (dict(batch=2, formats=('onnx', 'ncnn')), "batch=2 is only for formats='onnx'"),
        (dict(batch=0), 'batch= is 1 to 64'),
        (dict(nms='outside'), "nms= is for outputs='decoded'"),
        (dict(int8_for='tensorrt'), "int8_for= is for precision='int8'"),
        (dict(nms='outside', outputs='decoded', max_detections=9), "'executorch', 'litert'"),
    ):
        with pytest.raises(ValueError, match=words):
            export_model(
                source, tmp_path / 'out', SHAPE, **dict(dict(formats=('onnx',)), **options)
            )
    with pytest.raises(ValueError, match='nms= is not for classifiers'):
        options = dict(nms='outside', outputs='decoded', formats=('onnx',))
        export_model(source_of('classifier', tmp_path), tmp_path / 'out', SHAPE, **options)


@pytest.mark.slow
def test_oldest_engine(tmp_path):
    """Opset 18 and its IR version, as docs/boards.md says."""
    if not (OLDEST / '.ready').exists():
        pytest.skip('no old ONNX Runtime: `make test-onnx` fetches it')
    source, image = source_of('RetinaNet', tmp_path), np.ones((1, 3, *SHAPE), np.float32)
    jobs = []
    for outputs in ('raw', 'decoded'):
        file = export_model(source, tmp_path, SHAPE, ('onnx',), outputs=outputs)['onnx']['file']
        expected = open_exported(tmp_path / file).run(image)
        np.savez(tmp_path / f'{file}.npz', **{f'ones{i}': x for i, x in enumerate(expected)})
        jobs.append(dict(file=file, engine='onnx', limit=1e-5))
    np.savez(tmp_path / 'images.npz', ones=image)
    (tmp_path / 'jobs.json').write_text(json.dumps(jobs))
    script = ROOT / 'tests/test_export/engines.py'
    code = 'import onnxruntime, runpy, sys; print(onnxruntime.__version__);'
    code += 'sys.argv[:] = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name="__main__")'
    printed = run(sys.executable, '-c', code, script, tmp_path, PYTHONPATH=str(OLDEST)).stdout
    assert printed.startswith('1.15.')


@pytest.mark.slow
def test_residuals_in_openvino(tmp_path, pictures, monkeypatch):
    """int8 has as little noise as in ONNX Runtime; what is for TensorRT is refused there."""
    if not (OPENVINO / '.ready').exists():
        pytest.skip('no OpenVINO: `make test-onnx` fetches it')
    monkeypatch.syspath_prepend(OPENVINO)
    options = dict(shape=SHAPE, formats=('onnx',), precision='int8', images=pictures)
    export = partial(export_model, thin_model(), tmp_path, **options)
    report = export()['onnx']
    for name, ratio in report['sqnr_db_openvino'].items():
        assert abs(ratio - report['sqnr_db'][name]) < 1
    report = export(int8_for='tensorrt')['onnx']
    assert 'sqnr_db_openvino' not in report
    with pytest.raises(ValueError, match='OpenVINO computes int8 without zero points wrongly'):
        open_exported(tmp_path / report['file'], engine='openvino')
    monkeypatch.setattr(onnx_int8, 'quantize', onnx_int8.quantize_for_tensorrt)
    monkeypatch.setattr('mmcare_runtime.engines.openvino._has_signed_maps', lambda model: False)
    with pytest.raises(ExportError, match=r'stage\d has \S+ dB in OpenVINO and \S+ dB in ONNX'):
        export()
