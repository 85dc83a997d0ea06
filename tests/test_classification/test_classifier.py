"""Both heads and distillation: logits, losses, fusing, and loading files whole or not at all."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import DATA, THIN, assert_equal, published_weights, randomise, reference_image
from mmengine.model import ExponentialMovingAverage
from mmengine.optim import build_optim_wrapper
from mmengine.registry import init_default_scope
from mmengine.runner.checkpoint import load_state_dict
from torch import nn
from toy_configs import TEACHER as LARGE_TEACHER

pytest.importorskip('mmpretrain')
from mmpretrain.registry import MODELS
from mmpretrain.structures import DataSample

from mmcare.classification import CAREClsHead
from mmcare.models.loading import check_state_dict
from mmcare.weights.reading import CheckpointError, load_weights

CHANNELS, CLASSES = 128, 3  # 128 is the width of THIN's last map
TEACHER = dict(LARGE_TEACHER, head=dict(LARGE_TEACHER['head'], num_classes=CLASSES))


@pytest.fixture(autouse=True)
def scope():
    init_default_scope('mmpretrain')


def classifier(arch=THIN, classes=CLASSES, channels=CHANNELS, **changes):
    config = dict(
        type='ImageClassifier',
        data_preprocessor=dict(num_classes=classes, mean=[120.0] * 3, std=[60.0] * 3, to_rgb=True),
        backbone=dict(type='mmcare.CARE', arch=arch, out_indices=(3,)),
        neck=dict(type='GlobalAveragePooling'),
        head=dict(type='mmcare.CAREClsHead', num_classes=classes, in_channels=channels),
    )
    return MODELS.build({**config, **changes})


def student(teacher=TEACHER, **changes):
    return classifier(type='mmcare.DistillationClassifier', teacher=teacher, **changes)


def labelled(labels):
    return [DataSample().set_gt_label(label) for label in labels]


def batch():
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    return dict(inputs=images, data_samples=labelled([0, 1, 2, 0]))


def test_logits_of_the_released_network(tmp_path):
    torch.save(dict(state_dict=published_weights('s0')), tmp_path / 'CARETrans_S0.pth.tar')
    model = classifier('s0', 1000, 1024).eval()
    model.load_state_dict(load_weights(tmp_path / 'CARETrans_S0.pth.tar'))
    with torch.no_grad():
        image = reference_image(224, 224)
        logits = dict(logits=model(image))
        both = model.head(model.extract_feat(image), separate=True)
        of_maps = model.head(model.backbone(image), separate=True)  # without a neck
        torch.testing.assert_close(of_maps, both)
        logits.update(zip(('cls_logits', 'dist_logits'), both, strict=True))
        model.head.switch_to_deploy()
        logits_fused = model(image)
        loaded = CAREClsHead(1000, 1024, deploy=True)
        loaded.load_state_dict(model.head.state_dict())
    expected = np.load(DATA / 'reference_s0_224x224.npz')
    for name, value in logits.items():
        reference = torch.from_numpy(expected[name])
        assert value.shape == reference.shape == (1, 1000)
        assert (value - reference).abs().max() < 1e-4 * reference.abs().max(), name
    assert (logits_fused - logits['logits']).abs().max() < 1e-5 * logits_fused.abs().max()
    assert list(loaded.state_dict()) == ['folded_head.fc.weight', 'folded_head.fc.bias']


@pytest.mark.parametrize('mixed', [False, True], ids=['labels', 'mixed labels'])
def test_loss_is_the_mean_of_both_heads(mixed):
    loss = dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original')
    head = randomise(CAREClsHead(CLASSES, CHANNELS, **(dict(loss=loss) if mixed else {})))
    features = (torch.randn(4, CHANNELS, 2, 3),)
    labels = torch.tensor([1, 0, 2, 2])
    samples, targets = labelled(labels), F.one_hot(labels, CLASSES).float()
    if mixed:
        scores = torch.rand(4, CLASSES).softmax(1)
        samples = [DataSample().set_gt_score(score) for score in scores]
        targets = 0.9 * scores + 0.1 / CLASSES
    losses = head.loss(features, samples)
    assert set(losses) == {'loss_cls', 'loss_distill'}
    for loss, logits in zip(losses.values(), head(features, separate=True), strict=True):
        torch.testing.assert_close(loss, -(targets * logits.log_softmax(1)).sum(1).mean() / 2)


@pytest.fixture
def source():
    return randomise(classifier())


def drop(state, part):
    for key in [key for key in state if key.startswith(part)]:
        del state[key]


@pytest.mark.parametrize(
    ('change', 'words'),
    [
        (lambda state: drop(state, 'head.'), r'missing: head\.cls_head\.norm'),
        (lambda state: drop(state, 'head.distill_head.'), r'missing: head\.distill_head\.norm'),
        (lambda state: state['head.distill_head.fc.bias'].fill_(torch.nan), 'not finite: head'),
        (lambda s: s.update({'head.folded_head.fc.bias': torch.ones(3)}), 'not in the model'),
    ],
)
def test_files_that_do_not_fit_the_heads(source, change, words):
    state = source.state_dict()
    change(state)
    with pytest.raises(CheckpointError, match=words):
        check_state_dict(classifier().head, state, 'head.', 'file.pth')


def test_file_with_another_number_of_classes(source, capsys):
    """As in mmpretrain: classifiers are skipped with a warning, everything else is loaded."""
    model, state = classifier(classes=7), source.state_dict()
    check_state_dict(model.head, state, 'head.', 'file.pth')
    load_state_dict(model, state, strict=False)
    given = {key: value for key, value in model.state_dict().items() if '.fc.' not in key}
    assert_equal(given, {key: state[key] for key in given})
    assert len(state) - len(given) == 4 == capsys.readouterr().out.count('size mismatch')


class Fixed(nn.Module):
    """A teacher that always gives the same logits, and keeps what it has seen."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(logits))
        self.seen = []

    def forward(self, images):
        self.seen.append((images.clone(), self.training, torch.is_grad_enabled()))
        return self.logits[: len(images)]


@pytest.fixture
def teacher_file(tmp_path):
    torch.save(dict(state_dict=MODELS.build(TEACHER).state_dict()), tmp_path / 'teacher.pth')
    return tmp_path / 'teacher.pth'


def test_loss_by_hand(monkeypatch):
    """0.7 of the labels' cross-entropy on one head, 0.3 of the teacher's loss on the other."""
    teacher = Fixed([[0.0, 2.0, 0.0], [0.0, 2.0, 1.0]])
    model = student(teacher, alpha=0.3)
    cls_logits = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    distill_logits = torch.tensor([[0.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
    logits = cls_logits, distill_logits
    monkeypatch.setattr(model.head, 'forward', lambda feats, separate=False: logits)
    losses = model.loss(torch.rand(2, 3, 32, 32), labelled([0, 2]))
    # Labels 0 and 2: log(e + 2) - 1 and log 3.
    assert losses['loss_cls'].item() == pytest.approx(0.7 * (0.551445 + 1.098612) / 2, rel=1e-5)
    # The teacher's class is 1 and 1: log 3 and log(e^2 + 2) - 2.
    expected = 0.3 * (1.098612 + 0.239540) / 2
    assert losses['loss_distill'].item() == pytest.approx(expected, rel=1e-4)


def test_teacher_sees_the_very_batch():
    """Mixed, normalised and in RGB; in evaluation mode, without gradients."""
    teacher = Fixed([[0.0, 1.0, 0.0]] * 4)
    np.random.seed(0)
    model = student(teacher, train_cfg=dict(augments=dict(type='Mixup', alpha=0.8))).train()
    seen = []
    model.backbone.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].clone()))
    data = batch()
    plain = (data['inputs'].flip(1).float() - 120) / 60
    processed = model.data_preprocessor(data, training=True)
    model(**processed, mode='loss')
    ((images, training, with_gradients),) = teacher.seen
    assert torch.equal(images, seen[0]) and torch.equal(images, processed['inputs'])
    assert not torch.equal(images, plain) and images.abs().max() < 3
    assert not training and not with_gradients


@pytest.mark.parametrize('form', ['mm', 'bare', 'deit', 'distributed'])
def test_teacher_is_no_part_of_the_student(teacher_file, form):
    """Not trained, saved or averaged, in evaluation mode; from any form of its file."""
    state = torch.load(teacher_file)['state_dict']
    prefixed = {f'module.{key}': value for key, value in state.items()}
    forms = dict(mm=dict(state_dict=state), bare=state, deit=dict(model=state))
    torch.save(dict(forms, distributed=prefixed)[form], teacher_file)
    model = student(teacher_checkpoint=str(teacher_file))
    averaged = ExponentialMovingAverage(model)  # as EMAHook does, before weights are initialized
    model.init_weights()
    assert not isinstance(averaged.module._teacher[0], nn.Module)
    assert {name.split('.')[0] for name in model.state_dict()} == {'backbone', 'head'}
    optim_wrapper = build_optim_wrapper(model, dict(optimizer=dict(type='AdamW', lr=1e-2)))
    model.train()
    before = model.head.distill_head.fc.weight.clone()
    losses = model.train_step(batch(), optim_wrapper)
    assert {'loss', 'loss_cls', 'loss_distill'} <= losses.keys()
    assert not torch.equal(before, model.head.distill_head.fc.weight)
    assert_equal(model.teacher.state_dict(), state)  # also running statistics
    assert not any(parameter.requires_grad for parameter in model.teacher.parameters())


@pytest.mark.parametrize('teacher', ['resnet18', 'vit_tiny_patch16_224'])
def test_teacher_of_timm_keeps_the_weights_that_it_loads(tmp_path, teacher):
    timm = pytest.importorskip('timm')
    model = timm.create_model(teacher, num_classes=CLASSES)
    torch.save(model.state_dict(), tmp_path / 'teacher.pth')
    config = dict(type='TimmClassifier', model_name=teacher, num_classes=CLASSES, pretrained=True)
    loads = dict(pretrained_cfg_overlay=dict(file=str(tmp_path / 'teacher.pth'), num_classes=3))
    network = student(dict(config, **loads))
    network.init_weights()
    assert_equal(network.teacher.model.state_dict(), model.state_dict())


def test_type_and_layout_of_the_teacher():
    """The student does not take them over."""
    teacher, seen = nn.Sequential(nn.Conv2d(3, CLASSES, 32, 32), nn.Flatten()), []
    model = student(teacher, teacher_dtype='bfloat16', teacher_channels_last=True)
    optimizer = build_optim_wrapper(model, dict(optimizer=dict(type='SGD', lr=0.1)))
    teacher[0].register_forward_pre_hook(lambda conv, inputs: seen.extend([*inputs, conv.weight]))
    assert model.train_step(batch(), optimizer)['loss_distill'].isfinite()
    assert {tensor.dtype for tensor in seen} == {torch.bfloat16}
    assert all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in seen)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_teachers_that_do_not_fit(teacher_file):
    """Other classes, a part of the weights and random weights could all go unnoticed."""
    with pytest.raises(ValueError, match=r"must be the head's \(2, 3\), got \(2, 2\)"):
        student(Fixed([[0.0, 1.0]] * 2)).loss(torch.rand(2, 3, 32, 32), labelled([0, 1]))
    state = torch.load(teacher_file)['state_dict']
    del state['head.fc.bias']
    torch.save(state, teacher_file)
    with pytest.raises(RuntimeError, match=r'Missing key.*head\.fc\.bias'):
        student(teacher_checkpoint=str(teacher_file)).init_weights()
    with pytest.raises(ValueError, match='teacher_checkpoint must be'):
        student()
    with pytest.raises(ValueError, match=r'alpha must be in \[0, 1\], got 1.5'):
        student(Fixed([[0.0] * 3]), alpha=1.5)
