"""Necks and whole models behind a thin backbone: what is built, its weights, and its numbers."""

import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import onnxruntime
import pytest
import torch
from mil_interpreter import run_program
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from thin import THIN
from torch import nn

from mmcare.analysis.counting import build_from_config
from mmcare.checkpoint import CheckpointError
from mmcare.deploy import export_backbone, load_source
from mmcare.deploy.export import _fold
from mmcare.deploy.parts import MatrixPool
from mmcare.deploy.to_coreml import convert_coreml, count_operators, prepare_coreml

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / 'tools' / 'export_backbone.py'
WIDTHS = [16, 16, 32, 128]
SHAPE = (64, 96)
PREPROCESSOR = 'mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375]'
BACKBONE = f"backbone=dict(type='mmcare.CARE', arch={THIN})"
SEG_HEAD = "channels=8, num_classes=5, norm_cfg=dict(type='SyncBN'), align_corners=False"
CONFIGS = dict(
    neck=f"""
default_scope = 'mmdet'
model = dict(
    type='MaskRCNN',
    data_preprocessor=dict(type='DetDataPreprocessor', bgr_to_rgb=True, {PREPROCESSOR}),
    {BACKBONE.replace(', arch', ', out_indices=(0, 1), arch')},
    neck=dict(type='FPN', in_channels={WIDTHS[:2]}, out_channels=8, num_outs=3),
    rpn_head=dict(type='NoSuchHead'))
""",
    fpn=f"""
default_scope = 'mmseg'
model = dict(
    type='EncoderDecoder',
    data_preprocessor=dict(type='SegDataPreProcessor', bgr_to_rgb=True, {PREPROCESSOR}),
    {BACKBONE},
    neck=dict(type='FPN', in_channels={WIDTHS}, out_channels=8, num_outs=4),
    decode_head=dict(type='FPNHead', in_channels=[8] * 4, in_index=[0, 1, 2, 3],
                     feature_strides=[4, 8, 16, 32], {SEG_HEAD}),
    auxiliary_head=dict(type='FCNHead', in_channels=32, in_index=2, {SEG_HEAD}),
    test_cfg=dict(mode='whole'))
""",
    upernet=f"""
default_scope = 'mmseg'
model = dict(
    type='EncoderDecoder',
    data_preprocessor=dict(type='SegDataPreProcessor', bgr_to_rgb=True, {PREPROCESSOR}),
    {BACKBONE},
    decode_head=dict(type='UPerHead', in_channels={WIDTHS}, in_index=[0, 1, 2, 3],
                     pool_scales=(1, 2, 3, 6), {SEG_HEAD}),
    test_cfg=dict(mode='whole'))
""",
    classifier=f"""
default_scope = 'mmpretrain'
custom_imports = dict(imports=['mmcare.classification'], allow_failed_imports=False)
model = dict(
    type='ImageClassifier',
    data_preprocessor=dict(type='ClsDataPreprocessor', num_classes=5, to_rgb=True, {PREPROCESSOR}),
    {BACKBONE.replace(', arch', ', out_indices=(3,), arch')},
    neck=dict(type='GlobalAveragePooling'),
    head=dict(type='mmcare.CAREClsHead', num_classes=5, in_channels=128))
""",
)  # fmt: skip


def write_config(tmp_path, name):
    path = tmp_path / f'{name}.py'
    path.write_text(CONFIGS[name])
    return path


@pytest.fixture
def whole(tmp_path):
    """Build a whole model by its toolbox, with weights that all matter; also write both."""

    def build(name):
        path = write_config(tmp_path, name)
        cfg = Config.fromfile(path)
        init_default_scope(cfg.default_scope)
        torch.manual_seed(5)
        model = MODELS.build(deepcopy(cfg.model)).eval().requires_grad_(False)
        for key, value in model.state_dict().items():
            if key.endswith('running_var'):
                value.uniform_(0.5, 2)
            elif value.is_floating_point() and value.dim() < 2:
                value.normal_(0.5, 0.2)
        torch.save(dict(state_dict=model.state_dict()), tmp_path / 'weights.pth')
        return model, path, tmp_path / 'weights.pth'

    return build


def deviation(expected, found):
    """Largest difference of outputs, as a share of each one's largest magnitude."""
    pairs = list(zip(expected, found, strict=True))
    assert all(a.shape == b.shape for a, b in pairs)
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)


def coreml_deviation(source, expected, image):
    """Of the float32 program, with a normalised tensor as input."""
    folded = _fold(source, tuple(image.shape[2:]))
    graph = prepare_coreml(folded.backbone, SHAPE, 'float32', None, folded.behind)
    model = convert_coreml(graph, SHAPE, 'float32')
    operators = count_operators(model)
    assert not {'batch_norm', 'transpose', 'scatter'} & set(operators)
    names = [output.name for output in model.get_spec().description.output]
    assert names == list(source.behind.names)
    return deviation(expected, run_program(model._mil_program, image)), operators


def onnx_outputs(path, image):
    session = onnxruntime.InferenceSession(str(path))
    names = [output.name for output in session.get_outputs()]
    return names, [torch.from_numpy(x) for x in session.run(None, {'image': image.numpy()})]


# ------------------------------------------------------------ numbers


def test_neck_of_a_detector(tmp_path):
    """Backbone and neck alone: the heads are not built (here they could not be)."""
    source = load_source(write_config(tmp_path, 'neck'), part='neck')
    assert source.behind.names == ('neck1', 'neck2', 'neck3')
    report = export_backbone(source, tmp_path / 'out', SHAPE, ('onnx',), dynamic=True)
    assert report['part'] == 'neck' and report['onnx']['file'] == 'neck_neck_dynamic.onnx'
    for shape in (SHAPE, (128, 64)):
        image = torch.randn(1, 3, *shape)
        expected = source.behind.neck(source.backbone(image))
        names, found = onnx_outputs(tmp_path / 'out' / 'neck_neck_dynamic.onnx', image)
        assert names == list(source.behind.names)
        assert deviation(expected, found) < 1e-4
    image = torch.randn(1, 3, *SHAPE)
    share, _ = coreml_deviation(source, source.behind.neck(source.backbone(image)), image)
    assert share < 1e-5


@pytest.mark.parametrize('name', ['fpn', 'upernet', 'classifier'])
def test_whole_models(tmp_path, whole, name):
    """Logits as the toolbox's own model has them, before segmentors resize them to the image."""
    model, config, weights = whole(name)
    source = load_source(config, weights, 'model')
    assert source.behind.names == ('logits',)
    image = torch.randn(1, 3, *SHAPE)
    expected = model(image, mode='tensor')
    assert expected.shape == ((1, 5) if name == 'classifier' else (1, 5, 16, 24))
    assert deviation([expected], source.network(image)) < 1e-6
    share, operators = coreml_deviation(source, [expected], image)
    assert share < 1e-5
    if name == 'classifier':
        assert operators['linear'] == 1 and operators['layer_norm'] == 1  # one head of two
    if name == 'upernet':
        assert operators['reduce_mean'] == 1 and operators['matmul'] == 4 + 3 * 2
        report = export_backbone(source, tmp_path / 'out', SHAPE, ('onnx',))
        assert report['parameters'] < sum(p.numel() for p in model.parameters())
        names, found = onnx_outputs(tmp_path / 'out' / 'upernet_model_64x96.onnx', image)
        assert names == ['logits'] and deviation([expected], found) < 1e-4
        assert 'BatchNormalization' not in report['onnx']['operators']


@pytest.mark.parametrize(
    'head', ['mmcare.CAREClsHead', 'CAREClsHead', 'mmcare.classification.CAREClsHead']
)
def test_folded_classifier(whole, monkeypatch, head):
    text = CONFIGS['classifier'].replace('mmcare.CAREClsHead', head)
    monkeypatch.setitem(CONFIGS, 'classifier', text)
    model, config, weights = whole('classifier')
    image = torch.randn(1, 3, *SHAPE)
    expected = model(image, mode='tensor')
    model.backbone.switch_to_deploy()
    model.head.switch_to_deploy()
    torch.save(dict(state_dict=model.state_dict()), weights)
    source = load_source(config, weights, 'model')
    assert source.backbone.deploy and source.behind.head.deploy
    assert deviation([expected], source.network(image)) < 1e-4


# ------------------------------------------------------------ how types are written

SUBCLASS = """
from mmcare.models import CARE


class MyCARE(CARE):
    pass


class Doubling(CARE):
    def forward(self, x):
        return tuple(2 * output for output in super().forward(x))
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of a project's own, from which configs import."""
    (tmp_path / 'my_backbones.py').write_text(SUBCLASS)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop('my_backbones', None)


@pytest.mark.parametrize(
    ('imports', 'kind', 'expected'),
    [
        ('', "'CARE'", 'CARE'),
        ('', "'mmcare.models.CARE'", 'CARE'),
        ('', "'my_backbones.MyCARE'", 'MyCARE'),
        ('from mmcare.models import CARE', 'CARE', 'CARE'),
        ('from my_backbones import MyCARE', 'MyCARE', 'MyCARE'),
    ],
)
def test_types_of_backbones(tmp_path, module, imports, kind, expected):
    """All that can be built and counted can be exported, too."""
    path = tmp_path / 'config.py'
    path.write_text(f'{imports}\nmodel = dict({BACKBONE})'.replace("'mmcare.CARE'", kind))
    assert type(load_source(path).backbone).__name__ == expected
    assert type(build_from_config(path).backbone).__name__ == expected


def test_a_backbone_that_computes_something_else(tmp_path, module):
    path = tmp_path / 'config.py'
    path.write_text(f'model = dict({BACKBONE})'.replace('mmcare.CARE', 'my_backbones.Doubling'))
    with pytest.raises(ValueError, match=r'config\.py: Doubling has a forward of its own'):
        load_source(path)


def test_config_of_classes(tmp_path, whole):
    """A config that imports what it names, with weights of one that names it by text; folded."""
    model, _, weights = whole('classifier')
    image = torch.randn(1, 3, *SHAPE)
    expected = model(image, mode='tensor')
    model.backbone.switch_to_deploy()
    model.head.switch_to_deploy()
    torch.save(dict(state_dict=model.state_dict()), weights)
    text = CONFIGS['classifier'].replace('mmcare.', '')
    for name in ('CARE', 'CAREClsHead', 'GlobalAveragePooling', 'ImageClassifier'):
        text = text.replace(f"'{name}'", name)
    path = tmp_path / 'classes.py'
    path.write_text(
        'from mmpretrain.models import GlobalAveragePooling, ImageClassifier\n'
        'from mmcare.classification import CAREClsHead\n'
        'from mmcare.models import CARE\n' + text[text.index('model = ') :]
    )
    source = load_source(path, weights, 'model')
    assert deviation([expected], source.network(image)) < 1e-4
    assert load_source(path, part='neck').behind.names == ('neck1',)


@pytest.mark.parametrize('part', ['backbone', 'model'])
def test_teacher_with_a_care_of_its_own(tmp_path, part):
    teacher = (
        f"dict(type='ImageClassifier', {BACKBONE}, "
        "head=dict(type='mmcare.CAREClsHead', num_classes=5, in_channels=128))"
    )
    path = tmp_path / 'distillation.py'
    path.write_text(
        CONFIGS['classifier'].replace(
            "type='ImageClassifier',",
            f"type='mmcare.DistillationClassifier', teacher={teacher}, teacher_checkpoint='t.pth',",
        )
    )
    source = load_source(path, part=part)
    assert source.part == part and source.backbone.out_indices == (3,)


@pytest.mark.parametrize(
    ('sides', 'bins'), [((16, 24), (6, 6)), ((7, 5), (3, 2)), ((2, 3), (6, 6))]
)
def test_pooling(sides, bins):
    x = torch.randn(2, 3, *sides)
    torch.testing.assert_close(MatrixPool(sides, bins)(x), nn.AdaptiveAvgPool2d(bins)(x))


# ------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ('name', 'changes', 'part', 'words'),
    [
        ('neck', {}, 'model', 'is a MaskRCNN, whose outputs change .*--with-neck'),
        ('upernet', {}, 'neck', 'has no neck'),
        ('fpn', {'model.decode_head': []}, 'model', r'one head, a dict in model.decode_head'),
        ('fpn', {}, 'head', r"part must be of .*, got 'head'"),
    ],
)
def test_parts_that_are_not_there(tmp_path, name, changes, part, words):
    path = write_config(tmp_path, name)
    text = ''.join(f"model['{k.split('.')[1]}'] = {v!r}\n" for k, v in changes.items())
    path.write_text(path.read_text() + text)
    with pytest.raises(ValueError, match=words):
        load_source(path, part=part)


def test_shapes(tmp_path):
    source = load_source(write_config(tmp_path, 'fpn'), part='model')
    for arguments, words in (
        (dict(shape=(50, 64)), 'for model height and width are multiples of 32'),
        (dict(shape=SHAPE, dynamic=True), 'no dynamic sizes for a whole segmentor'),
    ):
        with pytest.raises(ValueError, match=words):
            export_backbone(source, tmp_path / 'out', **arguments)
    assert not (tmp_path / 'out').exists()


def test_weights_of_less_or_of_something_else(whole):
    model, config, weights = whole('fpn')
    state = model.state_dict()
    for kept, words in (
        (lambda key: key.startswith('backbone.'), r'no weights of the neck .* \(neck\.\*\)'),
        (lambda key: not key.startswith('decode_head.conv_seg'), 'does not fill the decode_head'),
    ):
        torch.save(dict(state_dict={k: v for k, v in state.items() if kept(k)}), weights)
        with pytest.raises(CheckpointError, match=words):
            load_source(config, weights, 'model')


def test_toolbox_missing(tmp_path, monkeypatch):
    path = write_config(tmp_path, 'neck')
    monkeypatch.setitem(sys.modules, 'mmdet.models', None)
    with pytest.raises(ImportError, match=r'needs mmdet, .* mim install mmdet; the backbone alone'):
        load_source(path, part='neck')
    assert load_source(path).behind is None
    path = write_config(tmp_path, 'classifier')
    monkeypatch.setitem(sys.modules, 'mmcare.classification', None)
    with pytest.raises(ImportError, match='the backbone alone does without'):
        load_source(path, part='model')


def test_backbone_of_a_config_needs_no_toolbox():
    """Not even where the config imports what needs one."""
    code = (
        'import sys\n'
        "for name in ('mmdet', 'mmseg', 'mmpretrain', 'mmcv.ops', 'mmcv._ext'):\n"
        '    sys.modules[name] = None\n'
        'from mmcare.deploy import load_source\n'
        f'load_source({str(ROOT / "configs/imagenet/care_s0_in1k.py")!r})\n'
        f'load_source({str(ROOT / "configs/mask_rcnn/care_s0_coco.py")!r})\n'
    )
    assert subprocess.run([sys.executable, '-c', code]).returncode == 0
