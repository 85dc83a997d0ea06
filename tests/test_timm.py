"""CARE in timm: counts, maps and logits, and what timm's own tests ask of every model."""

import importlib
import sys
from argparse import Namespace

import numpy as np
import pytest
import torch
from helpers import DATA, THIN, published_weights, reference_image
from torch import nn

from mmcare.models import CARE
from mmcare.weights.published import whole_classifier
from mmcare.weights.reading import CheckpointError

timm = pytest.importorskip('timm')
mmcare_timm = pytest.importorskip('mmcare.timm')

PARAMETERS = dict(s0=7_340_000, s1=9_602_424, s2=19_481_288)


def thin(**options):
    """A thin network whose two heads differ."""
    return mmcare_timm.CAREClassifier(THIN, **{'num_classes': 5, **options})


def count(model):
    return sum(map(torch.numel, model.parameters()))


@pytest.fixture(scope='module')
def published(tmp_path_factory):
    """A file as published, a training checkpoint of timm, with EMA weights that differ."""
    path = tmp_path_factory.mktemp('published') / 'CARETrans_S0.pth.tar'
    weights = published_weights('s0')
    other = {**weights, 'head.fc.bias': weights['head.fc.bias'] + 2}
    torch.save(dict(state_dict=other, state_dict_ema=weights, args=Namespace(lr=1e-3)), path)
    return path


@pytest.fixture
def uninitialised(monkeypatch):
    """Initialising takes seconds, most of all on the meta device."""
    monkeypatch.setattr(mmcare_timm, 'initialize', lambda *_: None)


@pytest.mark.parametrize('arch', PARAMETERS)
def test_counts_and_features_are_those_of_care(arch, uninitialised):
    with torch.device('meta'):
        backbone = CARE(arch)
        assert count(timm.create_model(f'care_{arch}')) == PARAMETERS[arch]
        assert count(timm.create_model(f'care_{arch}', num_classes=0)) == count(backbone)
        features = timm.create_model(f'care_{arch}', features_only=True)
        part = timm.create_model(f'care_{arch}', features_only=True, out_indices=(1, 2))
        assert count(part) == count(CARE(arch, out_indices=(1, 2)))
    assert count(features) == count(backbone)
    assert features.feature_info.channels() == list(backbone.out_channels)
    assert features.feature_info.reduction() == [4, 8, 16, 32]
    assert part.feature_info.channels() == list(backbone.out_channels[1:3])


@torch.no_grad()
def test_published_file_gives_the_released_logits(published, uninitialised):
    """timm takes the EMA weights of the file."""
    model = timm.create_model('care_s0', checkpoint_path=published).eval()
    assert model.state_dict().keys() == whole_classifier(published_weights('s0')).keys()
    expected = np.load(DATA / 'reference_s0_224x224.npz')
    image = reference_image(224, 224)
    last = model.forward_features(image)
    assert last.shape[2:] == model.pretrained_cfg['pool_size']
    features = model.forward_head(last, pre_logits=True)
    found = dict(logits=model(image), folded=timm.utils.reparameterize_model(model)(image))
    found['cls_logits'] = model.head.cls_head(features)
    found['dist_logits'] = model.head.distill_head(features)
    for name, logits in found.items():
        reference = torch.from_numpy(expected[name if name in expected else 'logits'])
        assert (logits - reference).abs().max() < 1e-4 * reference.abs().max(), name


@torch.no_grad()
def test_file_goes_into_features_other_classes_and_channels(published, uninitialised):
    source = dict(pretrained=True, pretrained_cfg_overlay=dict(file=str(published)))
    model = timm.create_model('care_s0', **source, features_only=True, out_indices=(0, 2)).eval()
    care = CARE('s0', out_indices=(0, 2)).eval()
    care.load_state_dict(published_weights('s0'))
    image = torch.rand(2, 3, 45, 70)
    torch.testing.assert_close(model(image), list(care(image)), rtol=0, atol=0)
    gray = timm.create_model('care_s0', **source, num_classes=7, in_chans=1)
    assert gray(image[:, :1]).shape == (2, 7)
    summed = published_weights('s0')['stem.0.weight'].sum(1, keepdim=True)
    torch.testing.assert_close(gray.backbone.stem.conv.weight, summed)


def test_init_cfg_reads_without_running_code(tmp_path):
    """mmengine's own loader refuses the file, or would run code from it."""
    weights = thin().backbone.state_dict()
    torch.save(dict(state_dict=weights, args=Namespace()), tmp_path / 'file.pth')
    model = thin(init_cfg=dict(type='Pretrained', checkpoint=str(tmp_path / 'file.pth')))
    torch.testing.assert_close(model.backbone.state_dict(), weights)
    assert all(layer.weight.std() < 0.03 for layer in model.get_classifier())


def test_configuration_of_the_released_evaluation(uninitialised):
    with torch.device('meta'):
        model = timm.create_model('care_s2.dist_in1k')
    data = timm.data.resolve_data_config(model=model)
    assert data['mean'] == (0.485, 0.456, 0.406) and data['std'] == (0.229, 0.224, 0.225)
    assert data['crop_pct'] == 224 / 256 and data['interpolation'] == 'bicubic'
    assert data['input_size'] == (3, 224, 224) and data['crop_mode'] == 'center'
    names = [model.pretrained_cfg['first_conv'], *model.pretrained_cfg['classifier']]
    assert {f'{name}.weight' for name in names} <= model.state_dict().keys()
    assert model.get_classifier() == tuple(map(model.get_submodule, names[1:]))
    assert timm.list_models('care_*') == ['care_s0', 'care_s1', 'care_s2']


def test_classifier_can_be_replaced_and_removed():
    model, image = thin(drop_rate=0.5).eval(), torch.rand(2, 3, 64, 64)
    assert model(image).shape == (2, 5)
    features = model.forward_features(image)
    assert features.shape == (2, model.num_features, 2, 2)
    model.set_distilled_training()
    model.reset_classifier(3)
    assert model(image).shape == (2, 3) and not model.head.training and model.head.apart
    assert all(
        layer.weight.std() < 0.03 and not layer.bias.any() for layer in model.get_classifier()
    )
    pooled = model.forward_head(features, pre_logits=True)
    model.reset_classifier(0)
    assert model.get_classifier() == ()
    torch.testing.assert_close(model(image), pooled)
    model.reset_classifier(0, '')
    torch.testing.assert_close(model(image), features)
    with pytest.raises(ValueError, match="global_pool must be 'avg', or '' with num_classes=0"):
        model.reset_classifier(3)
    assert thin(num_classes=0, global_pool='').eval()(image).shape == features.shape


@pytest.mark.parametrize('recompute', [False, True], ids=['plain', 'grad checkpointing'])
def test_every_parameter_learns(recompute):
    model = thin(drop_path_rate=0.1, layer_scale_init_value=0.1)
    model.set_grad_checkpointing(recompute)
    model.set_distilled_training()
    runs = []
    hook = model.backbone.stages[1].blocks[0].register_forward_pre_hook(lambda *_: runs.append(1))
    logits, distilled = model(torch.rand(2, 3, 64, 64))
    (logits * distilled).sum().backward()
    hook.remove()
    assert len(runs) == 1 + recompute
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_intermediates():
    model, image = thin(layer_scale_init_value=0.1).eval(), torch.rand(1, 3, 100, 130)
    expected = model.backbone(image)
    last, maps = model.forward_intermediates(image)
    info = timm.models.FeatureInfo(model.feature_info, 4)
    torch.testing.assert_close(maps, list(expected))
    sizes = [(-(-100 // stride), -(-130 // stride)) for stride in info.reduction()]
    assert [tuple(one.shape[2:]) for one in maps] == sizes
    assert [one.shape[1] for one in maps] == info.channels()
    torch.testing.assert_close(last, model.forward_features(image))
    chosen = model.forward_intermediates(image, [1], intermediates_only=True)
    torch.testing.assert_close(chosen, [expected[1]])
    assert model.prune_intermediate_layers([0, 1]) == [0, 1]
    assert model.num_features == info.channels()[1] and len(model.backbone.stages) == 2
    torch.testing.assert_close(model.forward_intermediates(image, [1])[0], expected[1])


def test_groups_of_layers_are_those_of_care(uninitialised):
    with torch.device('meta'):
        model = timm.create_model('care_s0')
    groups = timm.models.group_parameters(model, model.group_matcher(), reverse=True)
    depth = model.backbone.get_layer_depth
    assert groups == {n: depth(n, 'backbone.')[0] for n, _ in model.named_parameters()}
    coarse = timm.models.group_parameters(model, model.group_matcher(coarse=True), reverse=True)
    assert set(coarse.values()) == {*range(6)}


@torch.no_grad()
def test_export_and_fx():
    model, image = thin(layer_scale_init_value=0.1).eval(), torch.rand(1, 3, 64, 64)
    torch.testing.assert_close(torch.export.export(model, (image,)).module()(image), model(image))
    pooled = timm.models.create_feature_extractor(model, ['head.drop'])(image)['head.drop']
    torch.testing.assert_close(pooled, model.forward_head(model.forward_features(image), True))


def test_bad_input(published, monkeypatch, uninitialised):
    with torch.device('meta'), pytest.raises(AssertionError, match=r'4 is out of range \(0 to 3\)'):
        timm.create_model('care_s0', features_only=True, out_indices=(3, 4))
    with pytest.raises(RuntimeError, match=r'(?s)CARE-Transformer.*checkpoint_path=FILE'):
        timm.create_model('care_s0', pretrained=True)
    with pytest.raises(CheckpointError, match="weights are those of arch='s0'"):
        timm.create_model('care_s1', checkpoint_path=published)
    with pytest.raises(CheckpointError, match='do not fit 5 classes'):
        timm.create_model('care_s0', checkpoint_path=published, num_classes=5)
    with pytest.raises(CheckpointError, match='pretrained_cfg_overlay'):
        timm.create_model('care_s0', checkpoint_path=published, features_only=True)
    model, state = thin(), thin().state_dict()
    before = nn.utils.parameters_to_vector(model.parameters())
    state['head.distill_head.fc.bias'][0] = torch.nan
    left = dict(list(state.items())[:-1])
    for broken in (state, left, {**left, 'more': torch.zeros(1)}):
        with pytest.raises(CheckpointError):
            model.load_state_dict(broken)
    assert torch.equal(nn.utils.parameters_to_vector(model.parameters()), before)
    monkeypatch.setitem(sys.modules, 'timm', None)
    monkeypatch.delitem(sys.modules, 'mmcare.timm')
    with pytest.raises(ImportError, match=r'mmcare\[timm\]'):
        importlib.import_module('mmcare.timm')
