"""The two heads: against the reference, their losses, and loading them whole or not at all."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mmengine.registry import MODELS as ROOT_MODELS
from mmengine.registry import DefaultScope, init_default_scope
from mmengine.runner import load_checkpoint
from published_reference import published_weights, reference_image

from mmcare.checkpoint import CheckpointError, convert_checkpoint, read_checkpoint
from mmcare.models import CARE

pytest.importorskip('mmpretrain')
from mmpretrain.registry import MODELS
from mmpretrain.structures import DataSample

from mmcare.classification import CAREClsHead

REFERENCE = Path(__file__).parents[1] / 'data' / 'reference_s0_224x224.npz'
TINY = dict(
    depths=(1, 1, 1, 2),
    widths=(12, 12, 24, 24),
    memory_widths=(4, 4, 8, 8),
    expansions=((2, 2),) * 4,
    head_channels=(1, 1, 4, 8),
)
CHANNELS, CLASSES = 64, 5


@pytest.fixture(autouse=True)
def scope():
    init_default_scope('mmpretrain')
    yield
    DefaultScope._instance_dict.clear()


def classifier(arch=TINY, neck=True, init_cfg=None, **head):
    """An mmpretrain classifier with both heads."""
    return MODELS.build(
        dict(
            type='ImageClassifier',
            backbone=dict(type='mmcare.CARE', arch=arch, out_indices=(3,), init_cfg=init_cfg),
            neck=dict(type='GlobalAveragePooling') if neck else None,
            head=dict(
                type='mmcare.CAREClsHead',
                **{'num_classes': CLASSES, 'in_channels': CHANNELS, **head},
            ),
        )
    )


def randomise(model):
    """Give every tensor of a model a value that no initialisation has."""
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand_like(tensor) + 0.5)
    return model


def equal(first, second):
    first, second = first.state_dict(), second.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def samples(labels):
    return [DataSample().set_gt_label(label) for label in labels]


@pytest.fixture
def published(tmp_path):
    """A file in the published format, and the classifier with its weights."""
    source = randomise(classifier())
    torch.save(dict(state_dict=source.state_dict()), tmp_path / 'ours.pth')
    convert_checkpoint(tmp_path / 'ours.pth', tmp_path / 'published.pth.tar')
    return tmp_path / 'published.pth.tar', source


# ------------------------------------------------------------ what it computes


@pytest.mark.parametrize('neck', [True, False])
def test_logits_of_the_released_network(tmp_path, neck):
    torch.save(dict(state_dict=published_weights('s0')), tmp_path / 'CARETrans_S0.pth.tar')
    model = classifier('s0', neck, num_classes=1000, in_channels=1024).eval()
    load_checkpoint(model, str(tmp_path / 'CARETrans_S0.pth.tar'), strict=True)
    expected = np.load(REFERENCE)
    image = reference_image(224, 224)
    with torch.no_grad():
        mean = model(image)
        cls_logits, distill_logits = model.head.head_logits(model.extract_feat(image))
    for name, logits in (
        ('cls_logits', cls_logits),
        ('dist_logits', distill_logits),
        ('logits', mean),
    ):
        reference = torch.from_numpy(expected[name])
        assert logits.shape == reference.shape == (1, 1000)
        assert (logits - reference).abs().max() < 1e-4 * reference.abs().max(), name
    assert (cls_logits - distill_logits).abs().max() > 0.1 * mean.abs().max()


@pytest.mark.parametrize('name', ['CAREClsHead', 'mmcare.CAREClsHead'])
@pytest.mark.parametrize('registry', [MODELS, ROOT_MODELS], ids=['mmpretrain', 'root'])
def test_both_names(name, registry):
    head = registry.build(dict(type=name, num_classes=3, in_channels=8))
    assert type(head) is CAREClsHead


def test_initialisation():
    head = CAREClsHead(400, 300)
    head.init_weights()
    for part in (head.cls_head, head.distill_head):
        assert abs(part.fc.weight.std() - 0.02) < 5e-4 and part.fc.weight.abs().max() < 0.2
        assert (part.fc.bias == 0).all() and part.norm.eps == 1e-6
        assert (part.norm.weight == 1).all() and (part.norm.bias == 0).all()
    assert not torch.equal(head.cls_head.fc.weight, head.distill_head.fc.weight)


def test_pre_logits_and_predictions():
    model = classifier().eval()
    images = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        pooled = model.backbone(images)[-1].mean((2, 3))
        torch.testing.assert_close(model.extract_feat(images, 'pre_logits'), F.gelu(pooled))
        predicted = model.predict(images, samples([0, 1]))
        scores = torch.softmax(model(images), 1)
    assert [sample.pred_label.item() for sample in predicted] == scores.argmax(1).tolist()
    torch.testing.assert_close(predicted[1].pred_score, scores[1])
    assert predicted[1].gt_label == 1


def logits_of(head):
    """Random features and what both heads make of them."""
    features = (torch.randn(4, CHANNELS, 2, 3),)
    return features, head.head_logits(features)


def test_loss_is_the_mean_of_both_heads():
    head = randomise(CAREClsHead(CLASSES, CHANNELS))
    features, (cls_logits, distill_logits) = logits_of(head)
    losses = head.loss(features, samples([1, 0, 4, 4]))
    labels = torch.tensor([1, 0, 4, 4])
    assert set(losses) == {'loss_cls', 'loss_distill'}
    torch.testing.assert_close(losses['loss_cls'], F.cross_entropy(cls_logits, labels) / 2)
    torch.testing.assert_close(losses['loss_distill'], F.cross_entropy(distill_logits, labels) / 2)
    sum(losses.values()).backward()
    for name, parameter in head.named_parameters():
        assert parameter.grad.abs().max() > 0, name


def test_loss_of_mixed_and_smoothed_labels():
    """0.1 of each label is shared among the classes, whatever Mixup and CutMix made of it."""
    loss = dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original')
    head = randomise(CAREClsHead(CLASSES, CHANNELS, loss=loss))
    features, (cls_logits, _) = logits_of(head)
    scores = torch.rand(4, CLASSES).softmax(1)
    mixed = [DataSample().set_gt_score(score) for score in scores]
    expected = -((0.9 * scores + 0.1 / CLASSES) * cls_logits.log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(head.loss(features, mixed)['loss_cls'], expected / 2)


@pytest.mark.parametrize('topk', [(1, 2), 1])
def test_accuracy_in_training(topk):
    head = randomise(CAREClsHead(CLASSES, CHANNELS, cal_acc=True, topk=topk))
    features, (cls_logits, distill_logits) = logits_of(head)
    predicted = (cls_logits + distill_logits).argmax(1)
    predicted[0] = (predicted[0] + 1) % CLASSES
    losses = head.loss(features, samples(predicted.tolist()))
    assert losses['accuracy_top-1'] == 75
    assert ('accuracy_top-2' in losses) is (topk == (1, 2))
    mixed = [DataSample().set_gt_score(torch.ones(CLASSES)) for _ in range(4)]
    with pytest.raises(ValueError, match=r'model\.head\.cal_acc=True has no meaning'):
        head.loss(features, mixed)


def test_bfloat16_autocast_is_close():
    model = classifier().eval()
    model.init_weights()
    images = torch.rand(2, 3, 64, 64)
    with torch.no_grad(), torch.autocast('cpu', torch.bfloat16):
        logits = model(images)
    with torch.no_grad():
        expected = model(images)
    assert (logits - expected).abs().max() < 0.03 * expected.abs().max()


@pytest.mark.parametrize(
    ('arguments', 'error', 'words'),
    [
        (dict(num_classes=0), ValueError, 'num_classes of CAREClsHead must be .* got 0'),
        (dict(num_classes=True), ValueError, 'num_classes of CAREClsHead must be .* got True'),
        (dict(in_channels=1024.0), ValueError, 'in_channels of CAREClsHead must be .* got 1024.0'),
        (dict(deploy='False'), TypeError, "deploy must be True or False, got 'False'"),
        (dict(cal_acc='False'), TypeError, "cal_acc must be True or False, got 'False'"),
        (dict(topk='1'), TypeError, "topk of CAREClsHead must be an integer .* got '1'"),
        (dict(topk=(1, True)), TypeError, r'topk of CAREClsHead .* got \(1, True\)'),
        (dict(topk=None), TypeError, 'topk of CAREClsHead .* got None'),
        (dict(topk=0), ValueError, 'topk of CAREClsHead must .* at least 1, got 0'),
        (dict(topk=()), ValueError, r'topk of CAREClsHead must .* at least 1, got \(\)'),
        (dict(topk=(1, 7), cal_acc=True), ValueError, r'must not exceed num_classes=5 .*\(1, 7\)'),
    ],
)
def test_bad_arguments(arguments, error, words):
    with pytest.raises(error, match=words):
        CAREClsHead(**{'num_classes': 5, 'in_channels': 64, **arguments})


@pytest.mark.parametrize('topk', [1, 5, (1, 5), [1, 5]])
def test_topk_of_mmpretrain(topk):
    """What its configs have also goes with few classes, where no accuracies are asked for."""
    assert CAREClsHead(5, 64, topk=topk, cal_acc=True).topk == topk
    assert CAREClsHead(2, 64, topk=topk).topk == topk


@pytest.mark.parametrize('shape', [(2, 32), (2, 32, 4, 4), (2, 7, 64)])
def test_features_that_do_not_fit(shape):
    with pytest.raises(ValueError, match=r'in_channels=64 .*set model\.head\.in_channels'):
        CAREClsHead(5, 64)((torch.rand(shape),))


# ------------------------------------------------------------ loading and converting


def test_published_file_fills_the_classifier(published):
    file, source = published
    model = classifier()
    load_checkpoint(model, str(file), strict=True)
    assert equal(model, source)


def test_heads_to_the_published_format_and_back(published, tmp_path):
    file, source = published
    there = read_checkpoint(file)['state_dict']
    for theirs, ours in (('head', source.head.cls_head), ('dist_head', source.head.distill_head)):
        for name, value in ours.state_dict().items():
            assert torch.equal(there[f'{theirs}.{name}'], value)
    assert 'stem.0.weight' in there
    assert 'and the ImageNet heads' not in convert_checkpoint(file, tmp_path / 'again.pth')
    again = read_checkpoint(tmp_path / 'again.pth')['state_dict']
    assert again.keys() == source.state_dict().keys()
    assert all(torch.equal(again[key], value) for key, value in source.state_dict().items())


def partial(state, drop):
    return {key: value for key, value in state.items() if not key.startswith(drop)}


@pytest.mark.parametrize(
    ('change', 'words'),
    [
        (lambda state: partial(state, 'head.'), ['missing: cls_head.norm.weight', '5 more']),
        (lambda state: partial(state, 'head.distill_head.'), ['missing: distill_head.norm.w']),
        (
            lambda state: partial(state, 'head.cls_head.fc.bias'),
            ['missing: cls_head.fc.bias\n', 'model.backbone.init_cfg.prefix=backbone.'],
        ),
    ],
)
def test_a_part_of_the_heads_is_refused(published, tmp_path, change, words):
    _, source = published
    torch.save(dict(state_dict=change(source.state_dict())), tmp_path / 'part.pth')
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(classifier(), str(tmp_path / 'part.pth'), strict=False)
    for word in words:
        assert word in str(error.value)


def test_another_number_of_classes(published):
    """An error where the whole is loaded; fine-tuning takes the backbone."""
    file, source = published
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(classifier(num_classes=7), str(file))
    for words in (
        'num_classes: the file has 5, the head 7 (model.head.num_classes)',
        'cls_head.fc.weight (5, 64) instead of (7, 64)',
        '--cfg-options model.backbone.init_cfg.type=Pretrained',
    ):
        assert words in str(error.value)
    for prefix in ({}, dict(prefix='backbone.')):
        init_cfg = dict(type='Pretrained', checkpoint=str(file), **prefix)
        model = classifier(num_classes=7, init_cfg=init_cfg)
        model.init_weights()
        assert equal(model.backbone, source.backbone)
        assert model.head.cls_head.fc.weight.std() < 0.03  # as initialised


def test_other_channels(tmp_path):
    wide = randomise(CAREClsHead(5, 96)).state_dict()
    with pytest.raises(CheckpointError, match=r'in_channels: the file has 96, the head 64'):
        CAREClsHead(5, 64).load_state_dict(wide, strict=False)


def test_imports_without_mmpretrain():
    """mmcare does not need it, and says what to install where it is needed."""
    code = """
import sys
sys.modules['mmpretrain'] = None  # importing it raises ModuleNotFoundError
import mmcare
from mmcare.sample_data import make_imagenet
from mmengine.registry import MODELS
MODELS.build(dict(type='mmcare.CARE', arch='s0'))
assert 'mmcare.classification' not in sys.modules
try:
    import mmcare.classification
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 'mmcare needs mmpretrain >= 1.2.0, < 2.0.0, which is not installed' in done.stdout
    assert 'pip install "mmpretrain>=1.2.0,<2"' in done.stdout


def test_mmcare_does_not_import_mmpretrain():
    code = 'import sys, mmcare; sys.exit("mmpretrain" in sys.modules)'
    assert subprocess.run([sys.executable, '-c', code]).returncode == 0


def test_backbone_alone_takes_a_whole_file(published):
    file, source = published
    backbone = CARE(TINY, out_indices=(3,))
    load_checkpoint(backbone, str(file))
    assert equal(backbone, source.backbone)
