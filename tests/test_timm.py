"""CARE in timm: counts, maps and logits, loading, and what timm's own tests ask of every model."""

import importlib
import inspect
import re
from argparse import Namespace
from multiprocessing import get_context

import numpy as np
import pytest
import torch
from helpers import DATA, THIN, assert_equal, published_weights, reference_image

from mmcare.models import CARE
from mmcare.models.loading import read_state_dict

timm = pytest.importorskip('timm')
mmcare_timm = pytest.importorskip('mmcare.timm')

PARAMETERS = dict(s0=7_340_000, s1=9_602_424, s2=19_481_288)
IMAGE = torch.rand(2, 3, 45, 70, generator=torch.Generator().manual_seed(0))


def thin(**options):
    options = {'num_classes': 5, 'layer_scale_init_value': 0.1, **options}
    return mmcare_timm.CAREClassifier(THIN, **options)


def count(model):
    return sum(map(torch.numel, model.parameters()))


@pytest.fixture(scope='module')
def published(tmp_path_factory):
    path = tmp_path_factory.mktemp('published') / 'CARETrans_S0.pth.tar'
    torch.save(dict(state_dict=published_weights('s0'), args=Namespace(lr=1e-3)), path)
    return path


@pytest.mark.parametrize('arch', PARAMETERS)
def test_counts_and_features_are_those_of_care(arch):
    with torch.device('meta'):
        backbone = CARE(arch)
        assert count(timm.create_model(f'care_{arch}')) == PARAMETERS[arch]
        assert count(timm.create_model(f'care_{arch}', num_classes=0)) == count(backbone)
        features = timm.create_model(f'care_{arch}', features_only=True)
    assert count(features) == count(backbone)
    assert features.feature_info.channels() == list(backbone.out_channels)
    assert features.feature_info.reduction() == [4, 8, 16, 32]


def register_a_fourth_arch():
    CARE.arch_zoo['s9'] = CARE.arch_zoo['s0']
    importlib.reload(mmcare_timm)
    return timm.list_models('care_*')


def test_a_fourth_arch():
    """As CONTRIBUTING.md says how to add one. In a fork, since timm forgets no model."""
    with get_context('fork').Pool(1) as pool:
        assert 'care_s9' in pool.apply(register_a_fourth_arch)


def test_configuration_of_the_released_evaluation():
    model = timm.create_model('care_s2.dist_in1k', device='meta')
    data = timm.data.resolve_data_config(model=model)
    expected = dict(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), crop_pct=224 / 256)
    expected.update(input_size=(3, 224, 224), crop_mode='center', interpolation='bicubic')
    assert expected.items() <= data.items()
    names = [model.pretrained_cfg['first_conv'], *model.pretrained_cfg['classifier']]
    assert {f'{name}.weight' for name in names} <= model.state_dict().keys()
    assert model.get_classifier() == tuple(map(model.get_submodule, names[1:]))
    assert timm.list_models('care_*') == ['care_s0', 'care_s1', 'care_s2']


@pytest.mark.parametrize('place', [('cpu', torch.float64), ('meta', torch.bfloat16)])
def test_device_and_dtype_reach_all_layers(place):
    model = thin(device=place[0], dtype=place[1])
    for _ in range(2):
        assert {(p.device.type, p.dtype) for p in model.parameters()} == {place}
        model.reset_classifier(7)
    assert {b.device.type for b in model.buffers()} == {place[0]}


def test_classifier_can_be_replaced_and_removed():
    model = thin(drop_rate=0.5).eval()
    assert model(IMAGE).shape == (2, 5)
    features = model.forward_features(IMAGE)
    assert features.shape == (2, model.num_features, 2, 3)
    model.reset_classifier(3)
    assert model(IMAGE).shape == (2, 3) and not model.head.training
    for layer in model.get_classifier():
        assert 0.01 < layer.weight.std() < 0.03 and not layer.bias.any()
    pooled = model.forward_head(features, pre_logits=True)
    model.reset_classifier(0)
    assert model.get_classifier() == ()
    assert_equal(model(IMAGE), pooled)
    model.reset_classifier(0, '')
    assert_equal(model(IMAGE), features)
    with pytest.raises(ValueError, match="global_pool must be 'avg', or '' with num_classes=0"):
        model.reset_classifier(3)
    assert thin(num_classes=0, global_pool='').eval()(IMAGE).shape == features.shape


@pytest.mark.parametrize('head', [torch.nn.Identity(), torch.nn.Linear(128, 7)], ids=str)
@pytest.mark.parametrize('training', [False, True])
def test_another_module_as_head(head, training):
    model = thin().train(training)
    model.head = head
    model(IMAGE).sum().backward()
    assert model(IMAGE).shape == (2, getattr(head, 'out_features', 128))


@pytest.mark.parametrize('recompute', [False, True], ids=['plain', 'grad checkpointing'])
def test_every_parameter_learns(recompute):
    model = thin(drop_path_rate=0.1)
    model.set_grad_checkpointing(recompute)
    model.set_distilled_training()
    model.reset_classifier(3)
    runs = []
    hook = model.backbone.stages[1].blocks[0].register_forward_pre_hook(lambda *_: runs.append(1))
    logits, distilled = model(IMAGE)
    (logits * distilled).sum().backward()
    hook.remove()
    assert len(runs) == 1 + recompute
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_intermediates_and_pruning():
    model = thin().eval()
    expected = list(model.backbone(IMAGE))
    last, maps = model.forward_intermediates(IMAGE)
    assert_equal(maps, expected)
    assert_equal(last, model.forward_features(IMAGE))
    assert_equal(model.forward_intermediates(IMAGE, [1], intermediates_only=True), [expected[1]])
    for method in ('forward_intermediates', 'prune_intermediate_layers'):
        theirs = inspect.signature(getattr(timm.models.ConvNeXt, method)).parameters.values()
        ours = inspect.signature(getattr(model, method)).parameters.values()
        assert [(p.name, p.default) for p in ours] == [(p.name, p.default) for p in theirs][1:]
    model.backbone.stages[2].register_forward_pre_hook(lambda *_: pytest.fail('not stopped'))
    last, maps = model.forward_intermediates(IMAGE, [0, 1], True, True)
    assert_equal([*maps, last], [expected[0], expected[1], expected[1]])
    head = model.head
    assert model.prune_intermediate_layers([0, 1], prune_head=False) == [0, 1]
    assert model.head is head and len(model.backbone.stages) == 2
    assert model.prune_intermediate_layers([-1]) == [1] and not model.get_classifier()
    assert_equal(model(IMAGE), expected[1])
    model.reset_classifier(3, 'avg')
    assert model(IMAGE).shape == (2, 3) and model.num_features == expected[1].shape[1]


@pytest.mark.parametrize('kind', ['getter', 'list', 'dict', 'hook', 'fx'])
@torch.no_grad()
def test_feature_extractors(kind):
    options = dict(features_only=True, out_indices=(1, 3), feature_cls=kind)
    features = timm.create_model('care_s0', layer_scale_init_value=0.1, **options).eval()
    care = next(module for module in features.modules() if isinstance(module, CARE))
    expected, found = care(IMAGE), features(IMAGE)
    if kind == 'dict':
        assert [*found] == ['1', '3']
        found = [*found.values()]
    assert_equal(found, [expected[1], expected[3]])


def test_first_features_train_from_scratch():
    """DDP expects a gradient of every parameter."""
    options = dict(features_only=True, out_indices=(0, 1), from_scratch=True)
    features = timm.create_model('care_s0', **options)
    sum(x.mean() for x in features(IMAGE)).backward()
    assert all(parameter.grad is not None for parameter in features.parameters())


def test_features_are_computed_again():
    features, runs = timm.create_model('care_s0', features_only=True, out_indices=(0,)), []
    features.set_grad_checkpointing()
    care = next(module for module in features.modules() if isinstance(module, CARE))
    care.stages[0].blocks[0].register_forward_pre_hook(lambda *_: runs.append(1))
    features(IMAGE)[0].sum().backward()
    assert len(runs) == 2


@torch.no_grad()
def test_reparameterize_model():
    model = thin().double().eval()
    for parameter in model.parameters():
        parameter.add_(torch.rand_like(parameter) / 10)
    fused = timm.utils.reparameterize_model(model)
    torch.testing.assert_close(fused(IMAGE.double()), model(IMAGE.double()), rtol=1e-9, atol=1e-9)
    assert {*fused.head.state_dict()} == {'folded_head.fc.weight', 'folded_head.fc.bias'}
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in fused.modules())
    assert fused.get_classifier() == (fused.head.folded_head.fc,)
    model.head.distill_head.fc.register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match=r'distill_head\.fc .* cannot be fused'):
        timm.utils.reparameterize_model(model)


@torch.no_grad()
def test_published_file_gives_the_released_logits(published):
    model = timm.create_model('care_s0', checkpoint_path=published).eval()
    expected = np.load(DATA / 'reference_s0_224x224.npz')
    image = reference_image(224, 224)
    last = model.forward_features(image)
    assert last.shape[2:] == model.pretrained_cfg['pool_size']
    found = dict(logits=model(image), fused=timm.utils.reparameterize_model(model)(image))
    both = model.head(model.forward_head(last, pre_logits=True), separate=True)
    found.update(zip(('cls_logits', 'dist_logits'), both, strict=True))
    for name, logits in found.items():
        reference = torch.from_numpy(expected[name if name in expected else 'logits'])
        assert (logits - reference).abs().max() < 1e-4 * reference.abs().max(), name
    # The released evaluation reads a bare state dict.
    assert not any(timm.create_model('care_s0').load_state_dict(published_weights('s0')))


@torch.no_grad()
def test_other_classes_and_channels(published):
    source = dict(pretrained=True, pretrained_cfg_overlay=dict(file=str(published)))
    model = timm.create_model('care_s0', **source, features_only=True, out_indices=(0, 2)).eval()
    care = CARE('s0', out_indices=(0, 2)).eval()
    care.load_state_dict(read_state_dict(care, published), strict=False)
    assert_equal(model(IMAGE), list(care(IMAGE)))
    gray = timm.create_model('care_s0', **source, num_classes=7, in_chans=1)
    assert gray(IMAGE[:, :1]).shape == (2, 7)
    summed = published_weights('s0')['stem.0.weight'].sum(1, keepdim=True)
    torch.testing.assert_close(gray.backbone.stem.conv.weight, summed)


@pytest.mark.parametrize(
    ('name', 'given', 'words'),
    [
        ('care_s0', None, 'Runtime.*CARE-Transformer.*checkpoint_path=FILE'),
        ('care_s1', 'file', "Checkpoint.*_S0.pth.*arch='s0'"),
        ('care_s1', 'state_dict', "Checkpoint.*the state dict does not fit.*arch='s0'"),
    ],
)
def test_bad_input(published, name, given, words):
    sources = dict(file=str(published), state_dict=published_weights('s0'))
    source = given and {given: sources[given]}
    with pytest.raises(RuntimeError) as caught:
        timm.create_model(name, pretrained=True, pretrained_cfg_overlay=source, num_classes=7)
    assert re.match(words, f'{caught.typename}: {caught.value}', re.DOTALL)
    with pytest.raises(TypeError, match='out_indices'):  # for features_only, which takes it itself
        timm.create_model(name, out_indices=(1, 3))
