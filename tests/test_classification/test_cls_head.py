"""The two heads: what they compute, their losses, loading them whole or not at all, folding."""

import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import DATA, THIN, published_weights, reference_image, run
from mmengine.registry import MODELS as ROOT_MODELS
from mmengine.registry import DefaultScope, init_default_scope
from mmengine.runner.checkpoint import load_state_dict

pytest.importorskip('mmpretrain')
from mmpretrain.registry import MODELS
from mmpretrain.structures import DataSample

from mmcare.classification import CAREClsHead
from mmcare.models import CARE
from mmcare.weights.convert import convert_checkpoint
from mmcare.weights.reading import CheckpointError, load_weights

CHANNELS, CLASSES = CARE(THIN).out_channels[-1], 5


@pytest.fixture(autouse=True)
def scope():
    init_default_scope('mmpretrain')
    yield
    DefaultScope._instance_dict.clear()


def classifier(arch=THIN, neck=dict(type='GlobalAveragePooling'), init_cfg=None, **head):  # noqa: B006
    """An mmpretrain classifier with both heads."""
    head = dict(dict(type='mmcare.CAREClsHead', num_classes=CLASSES, in_channels=CHANNELS), **head)
    backbone = dict(type='mmcare.CARE', arch=arch, out_indices=(3,), init_cfg=init_cfg)
    return MODELS.build(dict(type='ImageClassifier', backbone=backbone, neck=neck, head=head))


def randomise(model):
    """Give every tensor of a model a value that no initialisation has."""
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand_like(tensor) + 0.5)
    return model


def equal(first, second):
    first, second = first.state_dict(), second.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def labelled(labels):
    return [DataSample().set_gt_label(label) for label in labels]


# ------------------------------------------------------------ what it computes


@pytest.mark.parametrize('neck', [dict(type='GlobalAveragePooling'), None])
def test_logits_of_the_released_network(tmp_path, neck):
    torch.save(dict(state_dict=published_weights('s0')), tmp_path / 'CARETrans_S0.pth.tar')
    model = classifier('s0', neck, num_classes=1000, in_channels=1024).eval()
    model.load_state_dict(load_weights(str(tmp_path / 'CARETrans_S0.pth.tar')))
    with torch.no_grad():
        image = reference_image(224, 224)
        logits = dict(logits=model(image))
        both = model.head.head_logits(model.extract_feat(image))
        logits.update(zip(('cls_logits', 'dist_logits'), both, strict=True))
        model.head.switch_to_deploy()
        folded = model(image)
    expected = np.load(DATA / 'reference_s0_224x224.npz')
    for name, value in logits.items():
        reference = torch.from_numpy(expected[name])
        assert value.shape == reference.shape == (1, 1000)
        assert (value - reference).abs().max() < 1e-4 * reference.abs().max(), name
    assert (folded - logits['logits']).abs().max() < 1e-5 * folded.abs().max()


def test_registered_under_one_name():
    assert type(ROOT_MODELS.build(dict(type='mmcare.CAREClsHead', num_classes=3, in_channels=8)))
    assert 'CAREClsHead' not in ROOT_MODELS.module_dict


def test_initialisation():
    head = CAREClsHead(400, 300)
    head.init_weights()
    for part in (head.cls_head, head.distill_head):
        assert abs(part.fc.weight.std() - 0.02) < 5e-4 and part.fc.weight.abs().max() < 0.2
        assert (part.fc.bias == 0).all() and part.norm.eps == 1e-6


def test_predictions():
    model = classifier().eval()
    images = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        pooled = model.backbone(images)[-1].mean((2, 3))
        torch.testing.assert_close(model.extract_feat(images, 'pre_logits'), F.gelu(pooled))
        predicted = model.predict(images, labelled([0, 1]))
        scores = torch.softmax(model(images), 1)
    assert [sample.pred_label.item() for sample in predicted] == scores.argmax(1).tolist()
    torch.testing.assert_close(predicted[1].pred_score, scores[1])


@pytest.mark.parametrize('mixed', [False, True], ids=['labels', 'mixed labels'])
def test_loss_is_the_mean_of_both_heads(mixed):
    loss = dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original') if mixed else None
    head = randomise(CAREClsHead(CLASSES, CHANNELS, loss=loss))
    features = (torch.randn(4, CHANNELS, 2, 3),)
    labels = torch.tensor([1, 0, 4, 4])
    samples, targets = labelled(labels), F.one_hot(labels, CLASSES).float()
    if mixed:
        scores = torch.rand(4, CLASSES).softmax(1)
        samples = [DataSample().set_gt_score(score) for score in scores]
        targets = 0.9 * scores + 0.1 / CLASSES
    losses = head.loss(features, samples)
    names = ('loss_cls', 'loss_distill')
    assert set(losses) == set(names)
    for name, logits in zip(names, head.head_logits(features), strict=True):
        expected = -(targets * logits.log_softmax(1)).sum(1).mean() / 2
        torch.testing.assert_close(losses[name], expected)
    sum(losses.values()).backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in head.parameters())


def test_accuracy_is_that_of_the_mean_logits():
    head = randomise(CAREClsHead(CLASSES, CHANNELS, cal_acc=True, topk=(1, 2)))
    features = (torch.randn(4, CHANNELS),)
    predicted = head(features).argmax(1)
    predicted[0] = (predicted[0] + 1) % CLASSES
    losses = head.loss(features, labelled(predicted))
    assert losses['accuracy_top-1'][0] == 75 and losses['accuracy_top-2'][0] >= 75


# ------------------------------------------------------------ folding


def test_folding_is_exact():
    model = randomise(classifier()).eval()
    images = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        model.double()
        expected = model(images.double())
        model.head.switch_to_deploy()
        torch.testing.assert_close(model(images.double()), expected, rtol=1e-9, atol=0)
    assert [name for name, _ in model.head.named_parameters()] == [
        'folded_head.fc.weight',
        'folded_head.fc.bias',
    ]
    loaded = CAREClsHead(CLASSES, CHANNELS, deploy=True)
    loaded.load_state_dict(model.head.float().state_dict())
    assert equal(loaded, model.head)


# ------------------------------------------------------------ loading and converting


@pytest.fixture
def source():
    return randomise(classifier())


@pytest.fixture
def published(source, tmp_path):
    """A file in the published format with the weights of ``source``."""
    torch.save(dict(state_dict=source.state_dict()), tmp_path / 'ours.pth')
    convert_checkpoint(tmp_path / 'ours.pth', tmp_path / 'published.pth.tar')
    return tmp_path / 'published.pth.tar'


def test_published_file_fills_the_classifier(published, source, tmp_path):
    there = torch.load(published)['state_dict']
    assert torch.equal(there['dist_head.fc.weight'], source.head.distill_head.fc.weight)
    model = classifier()
    model.load_state_dict(load_weights(str(published)))
    assert equal(model, source)
    convert_checkpoint(published, tmp_path / 'again.pth')
    model.load_state_dict(torch.load(tmp_path / 'again.pth')['state_dict'])
    assert equal(model, source)


def test_published_file_without_safe_loading_is_refused(published):
    """What stock mmengine does: the names as they are in the file, and not strict."""
    state = torch.load(published)['state_dict']
    with pytest.raises(CheckpointError):
        load_state_dict(classifier(), state, strict=False)
    model = torch.nn.ModuleDict(dict(head=CAREClsHead(CLASSES, CHANNELS)))
    with pytest.raises(CheckpointError, match=r'mmcare\.engine\.safe_loading'):
        load_state_dict(model, state, strict=False)


@pytest.mark.parametrize(
    ('drop', 'words'),
    [
        ('head.', 'missing: cls_head.norm.weight, '),
        ('head.distill_head.', 'missing: distill_head.norm.weight, '),
        ('head.cls_head.fc.bias', r'missing: cls_head\.fc\.bias\n'),
    ],
)
def test_a_part_of_the_heads_is_refused(source, drop, words):
    state = {k: v for k, v in source.state_dict().items() if not k.startswith(drop)}
    with pytest.raises(CheckpointError, match=words):
        load_state_dict(classifier(), state, strict=False)


def test_values_and_shapes_that_do_not_fit_are_refused(source):
    state = source.head.state_dict()
    with pytest.raises(CheckpointError, match=r'cls_head\.fc\.weight \(5, \d+\) instead of \(7'):
        load_state_dict(CAREClsHead(7, CHANNELS), state, strict=False)
    with pytest.raises(CheckpointError, match='weights are not'):
        load_state_dict(CAREClsHead(CLASSES, CHANNELS, deploy=True), state, strict=False)
    state['distill_head.fc.bias'][0] = float('nan')
    with pytest.raises(CheckpointError, match=r'distill_head\.fc\.bias'):
        load_state_dict(CAREClsHead(CLASSES, CHANNELS), state, strict=False)


@pytest.mark.parametrize('prefix', [{}, dict(prefix='backbone.')], ids=['', 'backbone.'])
def test_backbone_of_a_file_with_other_classes(published, source, prefix):
    init_cfg = dict(type='Pretrained', checkpoint=str(published), **prefix)
    model = classifier(num_classes=7, init_cfg=init_cfg)
    model.init_weights()
    assert equal(model.backbone, source.backbone)
    assert model.head.cls_head.fc.weight.std() < 0.03  # as initialised


def test_imports_without_mmpretrain():
    """mmcare does not need it, and says what to install where it is needed."""
    code = """
import sys
sys.modules['mmpretrain'] = None  # importing it raises ModuleNotFoundError
import mmcare
assert 'mmcare.classification' not in sys.modules
try:
    import mmcare.classification
except ImportError as error:
    print(error)
"""
    assert 'pip install "mmpretrain>=1.2.0,<2"' in run(sys.executable, '-c', code).stdout
