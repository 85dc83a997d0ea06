"""A config of each family of the toolboxes, made narrow: files give the toolbox's own results.

The families are those of benchmarks/families.py, which exports them whole.
"""

import json
import sys
from dataclasses import replace

import cv2
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from export_helpers import odd_model
from helpers import FORKS, ROOT, deviation, newer, run
from mmengine.config import Config
from mmengine.runner import EpochBasedTrainLoop, Runner
from torch.utils.data import DataLoader

sys.path.insert(0, str(ROOT / 'benchmarks'))  # where scripts find each other

import families

from mmcare import mmcv_ext
from mmcare.export import export_model, load_model, open_exported
from mmcare.export.backends import BACKENDS
from mmcare.export.errors import ExportError
from mmcare.export.graph import build_graph
from mmcare.export.images import draw_images
from mmcare.export.in_toolbox import replaced_part
from mmcare.export.pipelines import fit_config
from mmcare.export.rewrites import LITERT, export_program, with_torchvision
from mmcare.export.tasks.base import OutputFormat

pytestmark = newer
pytest.importorskip('mmdet')
SIDE = 64
CHANNELS = (
    'in_channels',
    'out_channels',
    'feat_channels',
    'point_feat_channels',
    'block_mid_channels',
    'conv_out_channels',
    'fc_out_channels',
    'embed_dims',
    'feedforward_channels',
    'num_feats',
)
GROUPS = dict(type='GN', num_groups=4)
WIDE = (
    'SSDLite',
    'SSD300',
    'YOLOv3',
    'RetinaNet, Swin-T',
    'RTMDet',
    'Conditional DETR',
)  # as they are
WITH_GROUPS = 'ATSS', 'AutoAssign', 'CenterNet-update', 'DDOD', 'FCOS', 'GFL', 'TOOD', 'VFNet'
DETECTORS = [name for name, x in families.FAMILIES.items() if x.config.startswith('mmdet')]
OTHERS = [name for name in families.FAMILIES if name not in DETECTORS]
DEFORMED = 'DDOD', 'RepPoints', 'TOOD', 'VFNet'


def narrow(values):
    """Divide the numbers of channels in a config by 16, in place."""
    for key, value in values.items():
        parts = [x for x in (value if isinstance(value, list) else [value]) if isinstance(x, dict)]
        for part in parts:
            narrow(part)
        if parts:
            continue
        if key in CHANNELS:
            is_list = isinstance(value, (list, tuple))
            values[key] = [x // 16 for x in value] if is_list else value // 16
        elif key == 'num_groups':
            values[key] = GROUPS[key]


def build(name, folder):
    """Build a family's narrow model with random weights."""
    family = families.FAMILIES[name]
    config = Config.fromstring(families.write_config(family), '.py')
    if name == 'Segmenter':
        config.model.backbone.update(img_size=(SIDE, SIDE), num_layers=2)
        config.model.test_cfg.update(crop_size=(SIDE, SIDE), stride=(SIDE, SIDE))
    if name in DETECTORS and name not in WIDE:
        backbone, depth = config.model.backbone, config.model.backbone.get('depth')
        narrow({key: part for key, part in config.model.items() if key != 'backbone'})
        if name == 'YOLOX':
            backbone.widen_factor /= 16
        elif depth == 18:
            backbone.base_channels, backbone.stem_channels = 16, 16
            config.model.neck.in_channels = [16, 32, 64, 128]
        else:
            backbone.base_channels, backbone.stem_channels = 4, 4
    if name in WITH_GROUPS:
        config.model.bbox_head.norm_cfg = GROUPS
    path = folder / 'narrow.py'
    config.dump(path)
    model = load_model(path, part='model')
    families.prepare(model, family, SIDE)
    return model


@torch.no_grad()
@pytest.mark.parametrize('name', DETECTORS)
def test_boxes_of_the_toolbox(tmp_path, name):
    """All 50 best boxes of mmdet are those of a decoded file."""
    # Compiled MMCV deforms no maps of one pixel, as DDOD's smallest would be.
    side = 320 if name.startswith(('DDOD', 'SSD')) else SIDE
    model, shape = build(name, tmp_path), (side, side)
    pixels = draw_images(3, shape, model.normalization)['smooth'].pixels
    image = model.normalization.normalize(pixels)
    raw = model.task(image)
    names = model.task.name_outputs(raw)
    assert len(names) == len(raw)
    options = dict(proposals=1000) if 'R-CNN' in name else {}  # as many as mmdet has
    decoded = model.task.post_process(raw, shape, OutputFormat(), options)
    outputs = [x.numpy() for x in decoded(raw)]
    description = dict(outputs=decoded.outputs, **decoded.metadata)
    assert families.compare_with_toolbox(model, description, lambda _: outputs, side) == 1
    assert decoded.max_error(raw, outputs) < 1e-6
    moved = [outputs[0] + 0.01 * side, *outputs[1:]]
    assert decoded.max_error(raw, moved) > 1e-3


@torch.no_grad()
@pytest.mark.parametrize('name', OTHERS)
def test_labels_and_scores_of_the_toolboxes(tmp_path, name):
    """All labels of mmseg, and mmpretrain's scores, are those of what files compute."""
    toolbox = families.FAMILIES[name].config.partition('::')[0]
    pytest.importorskip(toolbox)
    if FORKS and toolbox == 'mmseg':
        pytest.skip("the forks' MMEngine does not find mmseg's configs")
    side = SIDE if toolbox == 'mmseg' else families.FAMILIES[name].side
    model, shape = build(name, tmp_path), (side, side)
    if toolbox == 'mmpretrain':  # or scores would be all alike, or 0 and 1
        families.set_statistics(model, side)
    raw = model.task(torch.zeros(1, 3, *shape))
    names = model.task.name_outputs(raw)
    post_process = model.task.post_process(raw, shape, OutputFormat(), {})
    network = build_graph(model, shape, None, names, post_process, False).network
    described = dict(model.task.describe(model.config, raw), shape=shape)
    found = []

    def run(image):
        found[:] = [x.numpy() for x in network(torch.from_numpy(image))]
        return found

    description = dict(described, outputs=post_process.outputs)
    equal = families.compare_with_toolbox(model, description, run, side)
    assert len(np.unique(found[0])) > 1
    if toolbox == 'mmseg':
        assert equal == 1
    else:
        assert equal < 0.01 * found[0].std()


def test_encodings_of_positions_are_constants(tmp_path):
    """Whose arithmetic of integers Core ML lacks."""
    model = build('DETR', tmp_path)
    weight = model.config.model.bbox_head.loss_cls.class_weight
    assert weight == 1.0  # as written: the head, which makes it a tensor, has a copy
    image = torch.randn(1, 3, SIDE, SIDE)
    graph = build_graph(model, (SIDE, SIDE), None, ['logits', 'boxes'], None, False)
    assert deviation(model.task(image), graph.network(image)) < 1e-5
    names = {str(node.target) for node in graph.program.graph.nodes}
    assert not names & {'aten.sin.default', 'aten.floor_divide.default', 'aten.cumsum.default'}


class Deformed(torch.nn.Module):
    """Both deformable convolutions of MMCV, of which one samples in two groups."""

    def __init__(self):
        from mmcv.ops import DeformConv2d, ModulatedDeformConv2dPack

        super().__init__()
        self.offsets = torch.nn.Conv2d(3, 2 * 9, 3, 2, 1)
        self.first = DeformConv2d(3, 8, 3, 2, 1)
        self.second = ModulatedDeformConv2dPack(8, 6, (3, 1), 1, (1, 0), deform_groups=2)
        torch.nn.init.normal_(self.second.conv_offset.weight)

    def forward(self, image):
        return (self.second(self.first(image, 3 * self.offsets(image))),)


def test_deformable_convolutions(monkeypatch, tmp_path):
    """They are one operator in ONNX, from opset 19 on, and plain operators elsewhere."""
    pytest.importorskip('mmcv.ops')
    for name in ('deform_conv', 'modulated_deform_conv'):
        monkeypatch.setattr(sys.modules[f'mmcv.ops.{name}'], 'ext_module', mmcv_ext)
    model, image = odd_model(Deformed().eval(), ['map']), torch.randn(1, 3, 14, 11)
    program = export_program(model.task, image)
    plain = program.run_decompositions(with_torchvision(LITERT))
    assert 'deform' in str(program.graph) and 'deform' not in str(plain.graph)
    assert deviation(model.task(image), plain.module()(image)) < 1e-5
    report = export_model(model, tmp_path, (14, 11), ('onnx',))['onnx']
    assert report['opset'] == 19 and report['max_rel_error']['random'] < 1e-5
    with pytest.raises(ExportError, match='opset=19'):
        export_model(model, tmp_path, (14, 11), ('onnx',), opset=18)


@pytest.mark.conversion
def test_deformable_convolutions_in_litert(tmp_path):
    """Their samples' weights are parts of a map, and XNNPACK computes them in float16 too."""
    pytest.importorskip('mmcv.ops')
    pytest.importorskip('litert_torch')
    model = odd_model(Deformed().eval(), ['map'])
    report = export_model(model, tmp_path, (14, 11), ('litert',), tolerance=0.1)['litert']
    assert report['max_rel_error']['random'] < 1e-4
    assert report['max_rel_error_float16']['random'] < 0.1  # positions are rounded


@torch.no_grad()
@pytest.mark.conversion
@pytest.mark.parametrize('name', ['Cascade R-CNN', 'Cascade Mask R-CNN'])
def test_files_of_cascades(tmp_path, name):
    """All stages are in a file, whose 50 best boxes are mmdet's."""
    pytest.importorskip('onnxruntime')
    model, shape = build(name, tmp_path), (SIDE, SIDE)
    options = dict(outputs='decoded', proposals=1000)
    report = export_model(model, tmp_path, shape, ('onnx',), **options)['onnx']
    assert report['max_rel_error']['random'] < 1e-5
    assert report['max_rel_error_float16']['random'] < 1e-2
    program = open_exported(tmp_path / report['file'])
    equal = families.compare_with_toolbox(model, program.description, program.run, SIDE)
    assert equal == 1


@pytest.mark.conversion
def test_zeros_of_queries_in_core_ml(tmp_path):
    """DETR's first queries are zeros, which the converter would take for integers."""
    pytest.importorskip('coremltools')
    model = build('DETR', tmp_path)
    report = export_model(model, tmp_path, (SIDE, SIDE), ('coreml',), outputs='decoded')['coreml']
    assert report['max_rel_error']['random'] < 2e-2


class Windows(torch.nn.Module):
    """Cuts an image as Swin does."""

    def forward(self, image):
        parts = image.reshape(1, 3, 2, 4, 2, 4).permute(0, 2, 4, 3, 5, 1).contiguous()
        return parts.view(-1, 4, 4, 3) + parts.view(torch.int32).view(-1, 4, 4, 3) * 0


def test_a_crop_of_channels():
    class Crop(torch.nn.Module):
        def forward(self, x):
            return F.pad(x, (0, -1, 0, -2, 0, -1))

    image = torch.randn(1, 3, 8, 8)
    assert torch.equal(export_program(Crop(), image).module()(image), Crop()(image))


def test_a_view_of_a_copy_that_is_left_out():
    image = torch.randn(1, 3, 8, 8)
    program = export_program(Windows(), image)
    assert torch.equal(program.module()(image), Windows()(image))
    assert 'clone' not in str(program.graph)


class Attention(torch.nn.MultiheadAttention):
    """Attention of mmseg's SegFormer: its queries are not its keys, one weight is for all."""

    def forward(self, image):
        tokens = image.flatten(2).permute(2, 0, 1)
        return (super().forward(tokens, tokens[::2], tokens[::2])[0].permute(1, 0, 2),)


@pytest.mark.conversion
def test_parts_of_a_weight_in_executorch(tmp_path):
    pytest.importorskip('executorch')
    model = odd_model(Attention(8, 2).eval(), ['tokens'], None)
    model.task.info = replace(model.task.info, in_channels=8)
    report = export_model(model, tmp_path, (4, 6), ('executorch',))['executorch']
    assert report['max_rel_error']['random'] < 1e-5


class Bias(torch.nn.Module):
    """Swin's bias for positions, which is permuted, after a convolution in channels last."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3, padding=1).to(memory_format=torch.channels_last)
        self.bias = torch.nn.Parameter(torch.randn(4, 6, 8))

    def forward(self, image):
        return (self.conv(image) + self.bias.permute(2, 0, 1).contiguous().unsqueeze(0),)


@pytest.mark.conversion
def test_permuted_weights_in_executorch(tmp_path):
    pytest.importorskip('executorch')
    model = odd_model(Bias().eval(), ['map'])
    report = export_model(model, tmp_path, (4, 6), ('executorch',))['executorch']
    assert report['max_rel_error']['random'] < 1e-5


class Means(torch.nn.Module):
    """GFL's mean of a distribution, whose weight is a row, and TOOD's product for a single cell."""

    def __init__(self):
        super().__init__()
        self.steps = torch.nn.Parameter(torch.arange(8.0))
        self.weight = torch.nn.Parameter(torch.rand(1, 4, 3, 2))

    def forward(self, image):
        means = F.linear(image.reshape(-1, 8).softmax(1), self.steps).reshape(1, -1)
        cell = image.mean((2, 3), keepdim=True)
        weight = (self.weight * cell.sigmoid().reshape(1, 1, 3, 1)).reshape(1, 4, 6)
        product = torch.bmm(weight, torch.cat([cell, cell], 1).reshape(1, 6, 1))
        return means, product.reshape(1, 4, 1, 1).relu()


@pytest.mark.conversion
@pytest.mark.parametrize('name', ['litert', 'executorch'])
def test_weights_of_one_row_and_products_with_one_column(tmp_path, name):
    pytest.importorskip(BACKENDS[name].packages[-1])
    model = odd_model(Means().eval(), ['means', 'product'], None)
    report = export_model(model, tmp_path, (4, 6), (name,))[name]
    assert report['max_rel_error']['random'] < 1e-5
    assert name == 'executorch' or report['max_rel_error_float16']['random'] < 1e-2


class Rows(torch.nn.Module):
    """An attention with one head, which divides by a product with one row, and K-Net's layer."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(5, 3))

    def forward(self, image):
        columns = image.flatten(2).sigmoid()[:, None]
        rows = columns.mT
        shares = torch.matmul(rows, columns) / torch.matmul(rows[:, :, :1], columns)
        return shares, F.linear(rows.transpose(1, 2), self.weight).relu()


@pytest.mark.conversion
def test_products_and_layers_of_rows_in_litert(tmp_path):
    pytest.importorskip('litert_torch')
    model = odd_model(Rows().eval(), ['shares', 'kernels'], None)
    report = export_model(model, tmp_path, (4, 6), ('litert',))['litert']
    assert report['max_rel_error']['random'] < 1e-5


PREDICT = """
import json, sys
sys.modules['torch'] = None  # an import of it raises
import numpy as np
from mmcare_runtime import open_exported
results = open_exported(sys.argv[1]).predict(np.load(sys.argv[2]), score=-1.0)
print(json.dumps({name: results[name].tolist() for name in ('boxes', 'scores', 'labels')}))
"""


@pytest.mark.parametrize('name', ['YOLOX', 'DETR'])
def test_from_a_run_of_mmdet_to_boxes_without_pytorch(tmp_path, name):
    """A checkpoint of its runner, a file, and the runtime: boxes are those of mmdet's inference."""
    from mmdet.apis import inference_detector, init_detector

    pytest.importorskip('onnxruntime')
    shape, weights = (64, 96), tmp_path / 'epoch_1.pth'
    network = build(name, tmp_path).task.model
    config = Config.fromfile(tmp_path / 'narrow.py')
    runner = Runner.from_cfg({**config, 'work_dir': str(tmp_path)})
    runner._train_loop = EpochBasedTrainLoop(runner, DataLoader([0]), 1)  # without data
    runner.model.load_state_dict(network.state_dict())
    runner.call_hook('before_run')  # YOLOX saves an average of its weights
    runner.optim_wrapper = runner.build_optim_wrapper(runner.optim_wrapper)
    runner.save_checkpoint(str(tmp_path), weights.name, save_param_scheduler=False)
    source = load_model(tmp_path / 'narrow.py', weights, 'model')
    report = export_model(source, tmp_path, shape, ('onnx',), 'image', outputs='decoded')['onnx']
    assert report['checkpoint'] == 'epoch_1.pth'
    picture = np.random.default_rng(0).integers(0, 256, (9, 12, 3), np.uint8)
    picture = cv2.resize(picture, (192, 128), interpolation=cv2.INTER_CUBIC)
    np.save(tmp_path / 'picture.npy', picture)
    done = run(sys.executable, '-c', PREDICT, tmp_path / report['file'], tmp_path / 'picture.npy')
    results = {name: np.array(x) for name, x in json.loads(done.stdout).items()}
    fit_config(config, shape)
    network = init_detector(config, str(weights), device='cpu')
    wanted = inference_detector(network, picture).pred_instances.numpy()
    assert families.share_of_boxes(wanted, results) == 1
    with replaced_part(network, open_exported(tmp_path / report['file']), checked=True):
        found = inference_detector(network, picture).pred_instances.numpy()
    in_mmdet = dict(boxes=found.bboxes, scores=found.scores, labels=found.labels)
    assert families.share_of_boxes(wanted, in_mmdet) == 1
    if name == 'YOLOX':  # pixels as they are, gray around them, no clipping
        (image,) = report['inputs']
        assert image['channels'] == 'BGR' and image['padding'] == [114.0] * 3
        assert source.normalization.mean == (0.0,) * 3 and source.normalization.std == (1.0,) * 3
        assert report['test_cfg']['clip_border'] is False and results['boxes'].min() < 0
