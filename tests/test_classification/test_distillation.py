"""Distillation: the loss against values computed by hand, and what a teacher must not be."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import THIN
from mmengine.model import ExponentialMovingAverage
from mmengine.optim import build_optim_wrapper
from mmengine.registry import DefaultScope, init_default_scope
from torch import nn

pytest.importorskip('mmpretrain')
from mmpretrain.registry import MODELS
from mmpretrain.structures import DataSample

from mmcare.classification import DistillationClassifier
from mmcare.models import CARE
from mmcare.weights.reading import CheckpointError

CLASSES = 3


@pytest.fixture(autouse=True)
def scope():
    init_default_scope('mmpretrain')
    yield
    DefaultScope._instance_dict.clear()


def teacher_config(num_classes=CLASSES):
    """A small network of mmpretrain, with batch norms."""
    return dict(
        type='ImageClassifier',
        backbone=dict(type='ResNet', depth=18, base_channels=4, stem_channels=4),
        neck=dict(type='GlobalAveragePooling'),
        head=dict(type='LinearClsHead', num_classes=num_classes, in_channels=32),
    )


@pytest.fixture
def teacher_file(tmp_path):
    """Weights of a random teacher."""
    teacher = MODELS.build(teacher_config())
    teacher.head.fc.weight.data.normal_()
    torch.save(dict(state_dict=teacher.state_dict()), tmp_path / 'teacher.pth')
    return str(tmp_path / 'teacher.pth')


def student(teacher, checkpoint=None, **changes):
    config = dict(
        type='mmcare.DistillationClassifier',
        data_preprocessor=dict(num_classes=CLASSES, mean=[120.0] * 3, std=[60.0] * 3, to_rgb=True),
        backbone=dict(type='mmcare.CARE', arch=THIN, out_indices=(3,)),
        neck=dict(type='GlobalAveragePooling'),
        head=dict(
            type='mmcare.CAREClsHead',
            num_classes=CLASSES,
            in_channels=CARE(THIN).out_channels[-1],
        ),
        teacher=teacher,
        teacher_checkpoint=checkpoint,
    )
    return MODELS.build({**config, **changes})


class Fixed(nn.Module):
    """A teacher that always gives the same logits, and keeps what it has seen."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(logits))
        self.seen = []

    def forward(self, images):
        self.seen.append((images.clone(), self.training, torch.is_grad_enabled()))
        return self.logits[: len(images)]


def labelled(labels):
    return [DataSample().set_gt_label(label) for label in labels]


def batch():
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    return dict(inputs=images, data_samples=labelled([0, 1, 2, 0]))


@pytest.mark.parametrize(
    ('distillation', 'temperature', 'expected'),
    [
        # -log of softmax([2, 0, 0])[0] and of softmax([0, 1, 0])[0]: the teacher says 0 and 0.
        ('hard', 1.0, (0.239540 + 1.551445) / 2),
        # p = (e^2, 1, 1) / 9.38906, q = (e, 1, 1) / 4.71828: sum of p log(p / q) is 0.098889; then
        # p = (e, 1, e^0.5) / 5.36700, q = (1, e^0.5, 1) / 3.64872: 0.181021. Times tau^2.
        ('soft', 2.0, 4 * (0.098889 + 0.181021) / 2),
    ],
)
def test_loss_against_the_teacher_by_hand(distillation, temperature, expected):
    teacher_logits = torch.tensor([[4.0, 0.0, 0.0], [2.0, 0.0, 1.0]])
    logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    teacher = Fixed(teacher_logits.tolist())
    model = student(teacher, distillation=distillation, temperature=temperature)
    loss = model.distillation_loss(logits, teacher_logits)
    assert loss.item() == pytest.approx(expected, rel=1e-4)


def test_whole_loss_by_hand(monkeypatch):
    """0.7 of the labels' cross-entropy on one head, 0.3 of the teacher's on the other."""
    model = student(Fixed([[0.0, 3.0, 0.0], [0.0, 3.0, 2.0]]), alpha=0.3)
    cls_logits = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    distill_logits = torch.tensor([[0.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
    monkeypatch.setattr(model.head, 'head_logits', lambda feats: (cls_logits, distill_logits))
    losses = model.loss(torch.rand(2, 3, 32, 32), labelled([0, 2]))
    # Labels 0 and 2: log(e + 2) - 1 and log 3. The teacher's class 1: log 3, log(e^2 + 2) - 2.
    assert losses['loss_cls'].item() == pytest.approx(0.7 * (0.551445 + 1.098612) / 2, rel=1e-5)
    assert losses['loss_distill'].item() == pytest.approx(0.3 * (1.098612 + 0.239540) / 2, rel=1e-5)


def test_teacher_sees_the_very_batch():
    """Mixed, normalised and in RGB; in evaluation mode, without gradients."""
    teacher = Fixed([[0.0, 1.0, 0.0]] * 4)
    augments = [dict(type='Mixup', alpha=0.8), dict(type='CutMix', alpha=1.0)]
    model = student(teacher, train_cfg=dict(augments=augments)).train()
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
    """Not trained, not saved, in evaluation mode, shared by copies; from any form of its file."""
    state = torch.load(teacher_file)['state_dict']
    prefixed = {f'module.{key}': value for key, value in state.items()}
    forms = dict(mm=dict(state_dict=state), bare=state, deit=dict(model=state))
    torch.save(dict(forms, distributed=prefixed)[form], teacher_file)
    model = student(teacher_config(), teacher_file)
    model.init_weights()
    assert {name.split('.')[0] for name in model.state_dict()} == {'backbone', 'head'}
    optim_wrapper = build_optim_wrapper(model, dict(optimizer=dict(type='AdamW', lr=1e-2)))
    model.train()
    before = model.head.distill_head.fc.weight.clone()
    losses = model.train_step(batch(), optim_wrapper)
    assert {'loss', 'loss_cls', 'loss_distill'} <= losses.keys()
    assert not torch.equal(before, model.head.distill_head.fc.weight)
    for key, value in model.teacher.state_dict().items():  # running statistics, too
        assert torch.equal(state[key], value), key
    assert not any(parameter.requires_grad for parameter in model.teacher.parameters())
    averaged = ExponentialMovingAverage(model)
    assert copy.deepcopy(model).teacher is averaged.module.teacher is model.teacher
    assert not [name for name in averaged.state_dict() if 'teacher' in name]


def test_testing_needs_no_teacher(teacher_file):
    """Neither its file nor its package; weights load into a classifier without a teacher, too."""
    trained = student(teacher_config(), teacher_file).eval()
    missing = dict(type='TimmClassifier', model_name='regnety_160', pretrained=False)
    model = student(missing, 'nowhere.pth').eval()
    model.load_state_dict(trained.state_dict())
    images = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(model(images), trained(images))
    with pytest.raises(FileNotFoundError, match=r'nowhere\.pth'):
        student(teacher_config(), 'nowhere.pth').init_weights()


def test_teachers_that_do_not_fit(teacher_file):
    """Fewer classes would go unnoticed; a part of the weights, or none, as well."""
    images, samples = torch.rand(2, 3, 32, 32), labelled([0, 1])
    with pytest.raises(ValueError, match=r'\(2, 2\), .* \(2, 3\): .* the same classes'):
        student(Fixed([[0.0, 1.0]] * 2)).loss(images, samples)
    state = torch.load(teacher_file)['state_dict']
    del state['head.fc.bias']
    torch.save(state, teacher_file)
    with pytest.raises(CheckpointError, match=r'teacher\.pth[\s\S]*head\.fc\.bias'):
        student(teacher_config(), teacher_file).init_weights()
    with pytest.raises(ValueError, match='teacher_checkpoint must be'):
        student(teacher_config())


@pytest.mark.parametrize(
    'changes', [dict(alpha=1.5), dict(distillation='medium')], ids=['alpha', 'distillation']
)
def test_bad_arguments(changes):
    ((name, value),) = changes.items()
    with pytest.raises(ValueError, match=f'{name} must be .* got {value!r}'):
        student(Fixed([[0.0] * 3]), **changes)


def test_soft_distillation_in_a_batch(teacher_file):
    model = student(teacher_config(), teacher_file, distillation='soft', temperature=3.0)
    assert isinstance(model, DistillationClassifier)
    data = model.data_preprocessor(batch())
    losses = model(**data, mode='loss')
    with torch.no_grad():
        teacher = F.softmax(model.teacher(data['inputs']) / 3, 1)
        _, logits = model.head.head_logits(model.extract_feat(data['inputs']))
        divergence = (teacher * (teacher.log() - F.log_softmax(logits / 3, 1))).sum(1).mean()
    torch.testing.assert_close(losses['loss_distill'].detach(), 0.5 * 9 * divergence)
