"""What float16 is hard on: attention whose heads are off or saturated, and many detections."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from export_helpers import odd_model, thin_model
from helpers import THIN, craft_heads
from onnxruntime.transformers.float16 import convert_float_to_float16
from test_postprocessing import detector
from torch import nn

from mmcare.export import export_model, open_exported
from mmcare.export.backends import BACKENDS
from mmcare.export.backends.onnx_float16 import round_to_float16
from mmcare.export.graph import Graph
from mmcare.export.tasks import OutputFormat
from mmcare.export.tasks.one_stage_results import Boxes
from mmcare.models.backbones.care import LinearAttention

# A block of stages 3 and 4 for each; with one head, XNNPACK does not take the products.
BIASES = (0, -3, -6, -9, -15, 300)
ARCH = dict(THIN, depths=(1, 1, 3, 3), head_channels=(4, 4, 4, 4))


@pytest.mark.conversion
@pytest.mark.parametrize(
    ('backend', 'key'), [('coreml', ''), ('onnx', '_float16'), ('litert', '_float16')]
)
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


class Large(nn.Module):
    """What leaves float16 on the way."""

    def forward(self, images):
        return ((images * 1e6).relu() * 1e-6,)


def test_an_overflow(tmp_path, caplog):
    """A file that is right in float32 is written; log, report and description say the rest."""
    source = odd_model(Large(), ['large'])
    report = export_model(source, tmp_path, (8, 8), ('onnx',))['onnx']
    words = "ONNX Runtime in float16's outputs differ from PyTorch's by inf"
    assert report['max_rel_error_float16'].startswith(f'too large: {words}')
    assert report['max_rel_error']['random'] < 1e-5
    (logged,) = [x.message for x in caplog.records if x.levelname == 'WARNING']
    assert logged.startswith(f'onnx: only in float32: {words}')
    path = tmp_path / report['file']
    assert report['float16'] is False and open_exported(path).description['float16'] is False
    with pytest.raises(ValueError, match='has no float16'):
        open_exported(path, float16=True)


SIDE, OBJECTS, SEEN = 512, 120, 12  # each object is seen in as many cells as a trained head sees it
SCENES = [range(3), range(80), range(60, 80)]  # classes


def maps_of_a_scene(head, classes, sizes):
    """Return what a trained head of 80 classes gives for objects in rows, as maps of each level."""
    priors = head.prior_generator.grid_priors(sizes, device='cpu')
    lengths, priors = [len(x) for x in priors], torch.cat(priors)
    centers = (priors[:, :2] + priors[:, 2:]) / 2
    logits, deltas = torch.full((len(priors), 80), -6.0), torch.zeros(len(priors), 4)
    for number in range(OBJECTS):
        row, column = divmod(number, 11)
        center, size = torch.tensor([column, row]) * 46 + 26.0, 20 + 20 * torch.rand(2)
        box = torch.cat([center - size / 2, center + size / 2])
        cells = (centers - center).abs().amax(1).argsort()[:SEEN]
        scores = (1 - 0.1 * torch.rand(1)) * torch.linspace(0.5, 0.9, SEEN)  # no two of them equal
        logits[cells, classes[number % len(classes)]] = scores[torch.randperm(SEEN)].logit()
        moved = box + 0.03 * size.repeat(2) * torch.randn(SEEN, 4)
        deltas[cells] = head.bbox_coder.encode(priors[cells], moved)
    return [
        x.reshape(1, *size, -1).permute(0, 3, 1, 2)
        for values in (logits, deltas)
        for x, size in zip(values.split(lengths), sizes, strict=True)
    ]


class Scenes(nn.Module):
    """A head's maps of several scenes: the color of the first pixel says which is seen."""

    def __init__(self, scenes):
        super().__init__()
        self.number = len(scenes[0])
        for index, maps in enumerate(zip(*scenes, strict=True)):
            self.register_buffer(f'maps{index}', torch.cat(maps))

    def forward(self, image):
        scene = image[0, :, 0, 0][:, None, None, None]
        maps = [getattr(self, f'maps{index}') for index in range(self.number)]
        return tuple((x * scene).sum(0, keepdim=True) for x in maps)


@pytest.fixture(scope='module')
def decoder(tmp_path_factory):
    """An ONNX file of 80 classes, 512x512, with NMS inside."""
    folder = tmp_path_factory.mktemp('decoder')
    head = detector(folder, classes=80).task.head
    torch.manual_seed(0)
    sizes = [(SIDE // stride, SIDE // stride) for stride in (8, 16, 32)]
    scenes = [maps_of_a_scene(head, classes, sizes) for classes in SCENES]
    boxes = Boxes(
        head, scenes[0], (SIDE, SIDE), dict(max_detections=300), OutputFormat(nms='operator')
    )
    names = [output['name'] for output in boxes.outputs]
    network = nn.Sequential(Scenes(scenes), boxes).eval()
    graph = Graph(network, torch.zeros(1, 3, SIDE, SIDE), names, thin_model().task.info, 0, boxes)
    description = dict(inputs=[dict(dtype='float32')], precision='float32')
    BACKENDS['onnx'].write(graph, folder / 'decoder.onnx', description, {}, [])
    return folder / 'decoder.onnx'


def round_by_ours(path):
    round_to_float16(path, path.with_name('rounded.onnx'))
    return onnx.load(path.with_name('rounded.onnx'))


def test_sizes_stay(tmp_path):
    """A scale of 1.1 is 1.0996 in float16, which would make another size."""
    image = onnx.helper.make_tensor_value_info('image', onnx.TensorProto.FLOAT, (1, 1, 40, 60))
    larger = onnx.helper.make_tensor_value_info('larger', onnx.TensorProto.FLOAT, (1, 1, 44, 66))
    scales = onnx.numpy_helper.from_array(np.array([1, 1, 1.1, 1.1], np.float32), 'scales')
    resize = onnx.helper.make_node('Resize', ['image', '', 'scales'], ['larger'])
    graph = onnx.helper.make_graph([resize], 'resize', [image], [larger], [scales])
    onnx.save(onnx.helper.make_model(graph, ir_version=8), tmp_path / 'resize.onnx')
    half = onnxruntime.InferenceSession(round_by_ours(tmp_path / 'resize.onnx').SerializeToString())
    assert half.run(None, {'image': np.zeros((1, 1, 40, 60), np.float32)})[0].shape[2:] == (44, 66)


@pytest.mark.parametrize(
    'convert',
    [round_by_ours, lambda path: convert_float_to_float16(onnx.load(path), keep_io_types=True)],
    ids=['ours', 'onnxruntime'],
)
def test_objects_of_many_classes(decoder, convert):
    """No index and no class passes through a float: as many objects, each where it is."""
    half = onnxruntime.InferenceSession(convert(decoder).SerializeToString())
    single = onnxruntime.InferenceSession(decoder)
    for index, classes in enumerate(SCENES):
        image = np.zeros((1, 3, SIDE, SIDE), np.float32)
        image[:, index] = 1
        (boxes, scores, labels), results = (x.run(None, dict(image=image)) for x in (single, half))
        found = scores[0] > 0.3
        assert found.sum() == OBJECTS == (results[1] > 0.3).sum()
        assert {*labels[0, found]} == {*classes} and found[:OBJECTS].all()
        distances = np.abs(boxes[0, :OBJECTS, None] - results[0][0, :OBJECTS]).max(2)
        nearest = distances.argmin(1)  # equal scores may be in another order
        assert distances.min(1).max() < 1 and len({*nearest}) == OBJECTS
        assert (labels[0, :OBJECTS] == results[2][0, nearest]).all()


def test_no_index_becomes_a_float(decoder):
    """Neither in this file nor in another one of its kind."""
    model = onnx.shape_inference.infer_shapes(onnx.load(decoder))
    values = [*model.graph.value_info, *model.graph.initializer]
    types = {x.name: getattr(x, 'data_type', 0) or x.type.tensor_type.elem_type for x in values}
    casts = [node for node in model.graph.node if node.op_type == 'Cast']
    integers = onnx.TensorProto.INT32, onnx.TensorProto.INT64
    assert not [x for x in casts if types[x.input[0]] in integers and x.attribute[0].i == 1]
