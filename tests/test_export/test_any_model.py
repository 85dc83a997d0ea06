"""Models of the toolboxes with backbones of their own, and a backbone that only this test knows."""

import builtins

import pytest
import torch
from export_helpers import run_file
from helpers import FORKS, deviation, newer
from mmengine.registry import MODELS
from torch import nn
from torch.utils._pytree import tree_structure

from mmcare.deployment import BackboneInfo, describe_backbone, prepare_backbone
from mmcare.export import export_model, load_model
from mmcare.export.pipelines import name_steps
from mmcare.export.plan import plan_export
from mmcare.export.request import ExportRequest
from mmcare.export.tasks import make_task
from mmcare.export.tasks.base import find_tensors
from mmcare.weights.reading import CheckpointError

pytestmark = newer
SHAPE = (128, 128)
BOTH = 'onnx', 'executorch'
MODELS_OF_TOOLBOXES = {
    'mmdet::atss/atss_r50_fpn_1x_coco.py': ('decoded', BOTH),
    'mmdet::fcos/fcos_r50-caffe_fpn_gn-head_1x_coco.py': ('decoded', BOTH),
    'mmdet::rtmdet/rtmdet_tiny_8xb32-300e_coco.py': ('decoded', BOTH),
    'mmdet::mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py': ('decoded', BOTH),
    'mmseg::pspnet/pspnet_r18-d8_4xb2-80k_cityscapes-512x1024.py': ('raw', BOTH),
    'mmpretrain::resnet/resnet18_8xb32_in1k.py': ('probabilities', BOTH),
    'mmseg::segformer/segformer_mit-b0_8xb2-160k_ade20k-512x512.py': ('decoded', ('onnx',)),
    'mmpretrain::deit/deit-tiny_4xb256_in1k.py': ('raw', ('onnx',)),
}


@pytest.mark.conversion
@pytest.mark.parametrize('name', MODELS_OF_TOOLBOXES)
def test_models_of_the_toolboxes(name, tmp_path):
    """Each file is compared with PyTorch, in float32 and, where that is possible, in float16."""
    outputs, formats = MODELS_OF_TOOLBOXES[name]
    for package in formats:
        pytest.importorskip(package)
    shape = (224, 224) if 'deit' in name else SHAPE
    options = dict(outputs=outputs, compare_float16=False)
    reports = export_model(load_model(name, part='model'), tmp_path, shape, formats, **options)
    for report in reports.values():
        print(name, report['format'], report['max_rel_error'])
        assert report['max_rel_error']['random'] < 2e-5
        assert (tmp_path / report['file']).is_file()


@MODELS.register_module()
class Stub(nn.Module):
    """A backbone with a layer of a name of its own, which only its answers know."""

    def __init__(self):
        super().__init__()
        self.patches, self.scale = nn.Conv2d(4, 8, 4, 4), nn.Parameter(torch.full((8, 1, 1), 3.0))

    def forward(self, images):
        return (self.patches(images) * self.scale,)


@describe_backbone.register
def describe_stub(backbone: Stub) -> BackboneInfo:
    return BackboneInfo('stub', 4, ('patches',), stride=4, stages='patches')


@prepare_backbone.register
def prepare_stub(backbone: Stub, image: torch.Tensor) -> None:
    backbone.patches.weight *= backbone.scale[..., None]
    backbone.patches.bias *= backbone.scale[:, 0, 0]
    backbone.scale.fill_(1.0)


def test_a_backbone_that_only_the_test_knows(tmp_path):
    """Its answers are used, its weights are loaded whole or raise, from a file of a model too."""
    config, weights = tmp_path / 'stub.py', tmp_path / 'stub.pth'
    config.write_text("model = dict(type='Any', backbone=dict(type='Stub'))")
    stub = Stub()
    state = {f'backbone.{name}': value for name, value in stub.state_dict().items()}
    torch.save(dict(state_dict=dict(state, **{'head.fc.weight': torch.ones(1)})), weights)
    source = load_model(config, weights)
    report = export_model(source, tmp_path, (16, 32), ('onnx',))['onnx']
    assert report['arch'] == 'stub' and report['convolutions'] == [['patches', 1]]
    image = torch.randn(1, 4, 16, 32)
    names, outputs = run_file(tmp_path / report['file'], image)
    assert names == ['patches'] and deviation(stub(image), outputs) < 1e-5
    assert torch.equal(source.task.model.scale, stub.scale)  # the source was not changed
    torch.save({'backbone.patches.bias': torch.ones(8)}, weights)
    with pytest.raises(CheckpointError, match=r'patches\.weight'):
        load_model(config, weights)


@MODELS.register_module()
class Taught(nn.Module):
    """A student and its teacher, each with a backbone."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = (nn.ModuleDict(dict(backbone=Stub())) for _ in range(2))


def test_the_backbone_of_a_student(tmp_path):
    """It is filled from a checkpoint of the whole, of the student, or of itself."""
    config, weights, taught = tmp_path / 'taught.py', tmp_path / 'taught.pth', Taught()
    config.write_text("model = dict(type='Taught')")
    for saved in (taught, taught.student, taught.student.backbone):
        torch.save(saved.state_dict(), weights)
        loaded = load_model(config, weights).task.model.patches.weight
        assert torch.equal(loaded, taught.student.backbone.patches.weight)


@MODELS.register_module()
class Picky(nn.Conv2d):
    """A backbone for images of one size; an error is raised when it is built, or by others."""

    img_size = 64

    def __init__(self, error, when='forward'):
        super().__init__(3, 8, 4, 4)
        self.error = getattr(builtins, error)
        if when == 'build':
            raise self.error('odd')

    def forward(self, images):
        if images.shape[2] != self.img_size:
            raise self.error('odd')
        return (super().forward(images),)


@pytest.mark.parametrize(
    'error',
    ['AssertionError', 'AttributeError', 'KeyError', 'RuntimeError', 'TypeError', 'ValueError'],
)
def test_what_models_of_others_raise(tmp_path, error):
    """It becomes one error, which names the backbone's own size of images, if there is one."""
    config = tmp_path / 'picky.py'
    config.write_text(f"model = dict(type='Any', backbone=dict(type='Picky', error='{error}'))")
    source = load_model(config)
    words = r'cannot compute images of \(128, 64\); the img_size of its backbone is 64: .*odd'
    with pytest.raises(ValueError, match=words):
        export_model(source, tmp_path, (128, 64), ('onnx',))
    config.write_text(
        f"model = dict(type='Any', backbone=dict(type='Picky', error='{error}', when='build'))"
    )
    with pytest.raises(ValueError, match=r'the model of .*picky\.py cannot be built: .*odd'):
        load_model(config)


@MODELS.register_module()
class Scaled(Stub):
    """A backbone with layer scales, and a parameter that begins at zero."""

    def __init__(self):
        super().__init__()
        values = dict(gamma_1=1e-6, layer_scale_1=1e-5, gamma=1.0, zeros=0.0)
        for name, value in values.items():
            self.register_parameter(name, nn.Parameter(torch.full((8,), value)))


def test_layer_scales_hide_no_blocks(tmp_path):
    """Random models have them at 0.1, whatever their names are; trained ones keep theirs."""
    config, weights = tmp_path / 'scaled.py', tmp_path / 'scaled.pth'
    config.write_text("model = dict(type='Any', backbone=dict(type='Scaled'))")
    model = load_model(config).task.model
    for scale in (model.gamma_1, model.layer_scale_1, model.gamma):
        assert torch.equal(scale, torch.full((8,), 0.1))
    assert not model.zeros.any() and torch.equal(model.scale, Stub().scale)
    trained = Scaled()
    torch.save(trained.state_dict(), weights)
    loaded = load_model(config, weights).task.model
    assert torch.equal(loaded.gamma_1, trained.gamma_1)


def test_sizes_are_multiples_of_the_stride(tmp_path):
    """Of the model's own, here 8, if no size is given, also."""
    pytest.importorskip('mmseg')
    if FORKS:
        pytest.skip("the forks' MMEngine does not find mmseg's configs")
    name = 'mmseg::deeplabv3plus/deeplabv3plus_r18-d8_4xb2-80k_cityscapes-512x1024.py'
    source = load_model(name, part='model')
    name_steps(source.config)['Resize'].scale = (100, 60)
    assert plan_export(source, ExportRequest(formats=('onnx',))).shape == (64, 104)
    assert plan_export(source, ExportRequest((72, 40), ('onnx',))).shape == (72, 40)
    with pytest.raises(ValueError, match='multiples of 8'):
        plan_export(source, ExportRequest((72, 44), ('onnx',)))


REFUSED = {
    'mmdet::fast_rcnn/fast-rcnn_r50_fpn_1x_coco.py': 'the FastRCNN has no RPN',
    'mmdet::sparse_rcnn/sparse-rcnn_r50_fpn_1x_coco.py': 'the SparseRoIHead computes results in',
    'mmdet::deformable_detr/deformable-detr_r50_16xb2-50e_coco.py': 'of the DeformableDETR loops',
    'mmdet::dino/dino-4scale_r50_8xb2-12e_coco.py': 'of the DINO loops over a tensor of sizes',
    'mmpretrain::glip/glip-t_headless.py': 'are exported whole, not a ImageClassifier',
}


@pytest.mark.parametrize('name', REFUSED)
def test_models_that_are_refused_whole(name):
    pytest.importorskip(name.partition(':')[0])
    with pytest.raises(ValueError, match=REFUSED[name]):
        load_model(name, part='model')


class Packed(nn.Conv2d):
    """A backbone that returns its map as a test says."""

    def forward(self, images):
        return self.pack(super().forward(images))


@pytest.mark.parametrize(
    'pack',
    [
        lambda x: x,
        lambda x: dict(fine=x, coarse=[x[..., ::2]]),
        lambda x: (None, (x, x.mean((2, 3)))),
    ],
    ids=['tensor', 'dictionary', 'none and token'],
)
def test_a_file_returns_what_the_backbone_returns(pack):
    """In its toolbox, where the rest of the model reads it."""
    model, image = nn.Module(), torch.randn(1, 3, 8, 8)
    model.backbone = Packed(3, 4, 2, 2)
    model.backbone.pack = pack
    task = make_task(model)
    ((owner, name, substitute),) = task.substitutes(task, {}, image)
    assert owner is model.backbone and name == 'forward'
    found, expected = substitute(image), model.backbone(image)
    assert tree_structure(found) == tree_structure(expected)
    for x, y in zip(task(image), find_tensors(found), strict=True):
        assert torch.equal(x, y)


def test_names_of_the_toolboxes(tmp_path):
    source = load_model('mmpretrain::resnet/resnet18_8xb32_in1k.py', part='model')
    assert source.name == 'resnet18_8xb32_in1k' and source.task.info.stride == 32
    state = source.task.model.state_dict()
    removed = state.pop('backbone.layer1.0.conv1.weight')
    torch.save(state, tmp_path / 'resnet.pth')
    with pytest.raises(CheckpointError, match=r'backbone\.layer1\.0\.conv1\.weight'):
        load_model('mmpretrain::resnet/resnet18_8xb32_in1k.py', tmp_path / 'resnet.pth', 'model')
    with pytest.raises(FileNotFoundError, match=r'gone\.py'):
        load_model('mmpretrain::resnet/gone.py')
    with pytest.raises(ValueError, match='is not a config: mmengine does not support'):
        load_model('timm::resnet/resnet18.py')
    assert removed.shape == (64, 64, 3, 3)
    name = 'mmpretrain::dinov2/vit-small-p14_dinov2-pre_headless.py'  # without a default scope
    assert load_model(name).task.info.arch == 'VisionTransformer'
