"""ONNX for PCs and boards: batches, NMS left to the engine, int8, and old engines."""

import json
import sys

import numpy as np
import onnx
import pytest
import torch
from export_helpers import SHAPE, export_int8, smooth, thin_model
from helpers import ROOT, run
from test_postprocessing import source_of

from mmcare.export import export_model, open_exported

OLDEST = ROOT / '.venv/onnxruntime-1.15'


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
    model = onnx.load(tmp_path / report['file'])
    types = {x.name: x.data_type for x in model.graph.initializer}
    convs = [node for node in model.graph.node if node.op_type == 'Conv']
    made = {node.output[0]: node for node in model.graph.node}
    assert convs and all(made[x].op_type == 'DequantizeLinear' for c in convs for x in c.input[:2])
    zeros = [node.input[2] for node in model.graph.node if node.op_type == 'QuantizeLinear']
    assert {types[name] for name in zeros} == {onnx.TensorProto.INT8}
    assert not any(
        onnx.numpy_helper.to_array(x).any() for x in model.graph.initializer if x.name in zeros
    )


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
