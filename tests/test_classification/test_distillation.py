"""Distillation: the loss against values computed by hand, and what a teacher must not be."""

import copy

import pytest
import torch
import torch.distributed
import torch.nn.functional as F
from mmengine.model import ExponentialMovingAverage, MMDistributedDataParallel
from mmengine.optim import build_optim_wrapper
from mmengine.registry import DefaultScope, init_default_scope
from torch import nn

from mmcare.checkpoint import CheckpointError

pytest.importorskip('mmpretrain')
from mmpretrain.registry import MODELS
from mmpretrain.structures import DataSample

from mmcare.classification import DistillationClassifier

TINY = dict(
    depths=(1, 1, 1, 1),
    widths=(12, 12, 24, 24),
    memory_widths=(4, 4, 8, 8),
    expansions=((2, 2),) * 4,
    head_channels=(1, 1, 4, 8),
)
CLASSES = 3


@pytest.fixture(autouse=True)
def scope():
    init_default_scope('mmpretrain')
    yield
    DefaultScope._instance_dict.clear()


def teacher_config(num_classes=CLASSES):
    """A small network of mmpretrain, with a batch norm."""
    return dict(
        type='ImageClassifier',
        backbone=dict(type='ResNet', depth=18, base_channels=4, stem_channels=4),
        neck=dict(type='GlobalAveragePooling'),
        head=dict(type='LinearClsHead', num_classes=num_classes, in_channels=32),
    )


@pytest.fixture(scope='module')
def teacher_file(tmp_path_factory):
    """Weights of a random teacher."""
    init_default_scope('mmpretrain')
    torch.manual_seed(5)
    path = tmp_path_factory.mktemp('teacher') / 'teacher.pth'
    teacher = MODELS.build(teacher_config())
    teacher.head.fc.weight.data.normal_()
    torch.save(dict(state_dict=teacher.state_dict()), path)
    return path


def student_config(teacher, checkpoint, augments=None, **changes):
    return dict(
        type='mmcare.DistillationClassifier',
        data_preprocessor=dict(num_classes=CLASSES, mean=[120.0] * 3, std=[60.0] * 3, to_rgb=True),
        backbone=dict(type='mmcare.CARE', arch=TINY, out_indices=(3,)),
        neck=dict(type='GlobalAveragePooling'),
        head=dict(type='mmcare.CAREClsHead', num_classes=CLASSES, in_channels=64),
        train_cfg=dict(augments=augments) if augments else None,
        teacher=teacher,
        teacher_checkpoint=None if checkpoint is None else str(checkpoint),
        **changes,
    )


@pytest.fixture
def student(teacher_file):
    """Gives a student with its teacher, built and initialised."""

    def build(**changes):
        model = MODELS.build(student_config(teacher_config(), teacher_file, **changes))
        model.init_weights()
        return model

    return build


class Fixed(nn.Module):
    """A teacher that always gives the same logits, and keeps what it has seen."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(logits))
        self.seen = []

    def forward(self, images):
        self.seen.append((images.clone(), self.training, torch.is_grad_enabled()))
        return self.logits[: len(images)]


def batch(number=4):
    samples = [DataSample().set_gt_label(index % CLASSES) for index in range(number)]
    images = torch.randint(0, 256, (number, 3, 32, 32), dtype=torch.uint8)
    return dict(inputs=images, data_samples=samples)


# ------------------------------------------------------------ the loss


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
    model = MODELS.build(
        student_config(
            Fixed(teacher_logits.tolist()),
            None,
            distillation=distillation,
            temperature=temperature,
        )
    )
    loss = model.distillation_loss(logits, teacher_logits)
    assert loss.item() == pytest.approx(expected, rel=1e-4)


def test_whole_loss_by_hand(monkeypatch):
    """0.7 of the labels' cross-entropy on one head, 0.3 of the teacher's on the other."""
    teacher = Fixed([[0.0, 3.0, 0.0], [0.0, 3.0, 2.0]])
    model = MODELS.build(student_config(teacher, None, alpha=0.3))
    cls_logits = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    distill_logits = torch.tensor([[0.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
    monkeypatch.setattr(model.head, 'head_logits', lambda feats: (cls_logits, distill_logits))
    labels = [DataSample().set_gt_label(0), DataSample().set_gt_label(2)]
    losses = model.loss(torch.rand(2, 3, 32, 32), labels)
    # Labels 0 and 2: log(e + 2) - 1 and log 3. The teacher's class 1: log 3, log(e^2 + 2) - 2.
    assert losses['loss_cls'].item() == pytest.approx(0.7 * (0.551445 + 1.098612) / 2, rel=1e-5)
    assert losses['loss_distill'].item() == pytest.approx(0.3 * (1.098612 + 0.239540) / 2, rel=1e-5)


def test_teacher_sees_the_very_batch(monkeypatch):
    """Mixed, normalised and in RGB; in evaluation mode, without gradients."""
    teacher = Fixed([[0.0, 1.0, 0.0]] * 4)
    augments = [dict(type='Mixup', alpha=0.8), dict(type='CutMix', alpha=1.0)]
    model = MODELS.build(student_config(teacher, None, augments)).train()
    teacher.seen.clear()  # of the trial that counted its classes
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


# ------------------------------------------------------------ what a teacher is not


def test_teacher_is_no_part_of_the_student(student, teacher_file):
    model = student()
    weights = {key: value.clone() for key, value in model.teacher.state_dict().items()}
    for key, value in torch.load(teacher_file)['state_dict'].items():
        assert torch.equal(weights[key], value)
    names = [
        *model.state_dict(),
        *(name for name, _ in model.named_parameters()),
        *(name for name, _ in model.named_modules()),
    ]
    assert not [name for name in names if 'teacher' in name]
    assert {name.split('.')[0] for name in model.state_dict()} == {'backbone', 'head'}

    optim_wrapper = build_optim_wrapper(model, dict(optimizer=dict(type='AdamW', lr=1e-2)))
    trained = {id(p) for group in optim_wrapper.param_groups for p in group['params']}
    assert trained == {id(parameter) for parameter in model.parameters()}
    model.train()
    head = model.head.distill_head.fc.weight.clone()
    for _ in range(2):
        losses = model.train_step(batch(), optim_wrapper)
    assert {'loss', 'loss_cls', 'loss_distill'} <= losses.keys()
    assert not torch.equal(head, model.head.distill_head.fc.weight)
    assert not any(module.training for module in model.teacher.modules())
    for key, value in model.teacher.state_dict().items():  # running statistics, too
        assert torch.equal(weights[key], value), key
    for parameter in model.teacher.parameters():
        assert parameter.grad is None and not parameter.requires_grad


def test_teacher_moves_with_the_student(student, teacher_file):
    model = student()
    assert next(model.double().teacher.parameters()).dtype == torch.float64
    assert next(model.to(torch.bfloat16).teacher.parameters()).dtype == torch.bfloat16
    assert next(model.to('meta').teacher.parameters()).device.type == 'meta'
    late = MODELS.build(student_config(teacher_config(), teacher_file)).half()
    assert next(late.teacher.parameters()).dtype == torch.float16


def test_copies_share_the_teacher(student):
    model = student()
    averaged = ExponentialMovingAverage(model)
    averaged.update_parameters(model)
    assert not [name for name in averaged.state_dict() if 'teacher' in name]
    assert copy.deepcopy(model).teacher is averaged.module.teacher is model.teacher


def test_distributed(student, tmp_path):
    torch.distributed.init_process_group(
        'gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1
    )
    try:
        model = MMDistributedDataParallel(student().train())
        optim_wrapper = build_optim_wrapper(model, dict(optimizer=dict(type='AdamW', lr=1e-3)))
        losses = model.train_step(batch(), optim_wrapper)
        assert torch.isfinite(losses['loss'])
        assert not [name for name in model.state_dict() if 'teacher' in name]
    finally:
        torch.distributed.destroy_process_group()


def test_testing_needs_no_teacher(student, tmp_path):
    """Neither its file nor its package; weights load into a classifier without a teacher, too."""
    trained = student().eval()
    torch.save(dict(state_dict=trained.state_dict()), tmp_path / 'trained.pth')
    missing = dict(type='TimmClassifier', model_name='regnety_160', pretrained=False)
    config = student_config(missing, 'nowhere.pth')
    plain = {key: value for key, value in config.items() if not key.startswith('teacher')}
    images = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        expected = trained(images)
        for model in (config, {**plain, 'type': 'ImageClassifier'}):
            model = MODELS.build(copy.deepcopy(model)).eval()
            model.load_state_dict(torch.load(tmp_path / 'trained.pth')['state_dict'])
            assert torch.equal(model(images), expected)


# ------------------------------------------------------------ bad input


def test_another_number_of_classes(tmp_path):
    for teacher in (teacher_config(7), MODELS.build(teacher_config(7))):
        file = None
        if isinstance(teacher, dict):
            file = tmp_path / 'teacher.pth'
            torch.save(MODELS.build(teacher).state_dict(), file)
        with pytest.raises(ValueError, match=r'tells 7 classes apart, .*head\.num_classes=3'):
            MODELS.build(student_config(teacher, file)).init_weights()


class Silent(nn.Sequential):
    """A network that says nowhere how many classes it has."""

    def __init__(self, classes):
        super().__init__(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, classes))


def test_classes_of_a_teacher_that_does_not_say():
    assert MODELS.build(student_config(Silent(CLASSES), None)).teacher[2].out_features == CLASSES
    with pytest.raises(ValueError, match=r'\(Silent\) tells 9 classes apart'):
        MODELS.build(student_config(Silent(9), None))
    with pytest.raises(TypeError, match=r'\(Conv2d\) must map images to logits'):
        MODELS.build(student_config(nn.Conv2d(3, 3, 1), None))


def test_missing_teacher_file():
    model = MODELS.build(student_config(teacher_config(), 'checkpoints/teacher.pth'))
    with pytest.raises(FileNotFoundError) as error:
        model.init_weights()
    for words in ("'checkpoints/teacher.pth'", 'regnety_160', 'model.teacher_checkpoint=FILE'):
        assert words in str(error.value)


@pytest.mark.parametrize('form', ['bare', 'model', 'module.'])
def test_forms_of_the_teacher_file(teacher_file, tmp_path, form):
    """As DeiT, timm and distributed scripts write them."""
    state = torch.load(teacher_file)['state_dict']
    prefix = 'module.' if form == 'module.' else ''
    content = {prefix + key: value for key, value in state.items()}
    torch.save(dict(model=content) if form == 'model' else content, tmp_path / 'file.pth')
    model = MODELS.build(student_config(teacher_config(), tmp_path / 'file.pth'))
    assert all(torch.equal(value, state[k]) for k, value in model.teacher.state_dict().items())


def test_teacher_file_of_another_network(teacher_file, tmp_path):
    state = torch.load(teacher_file)['state_dict']
    del state['head.fc.bias']
    torch.save(state, tmp_path / 'part.pth')
    model = MODELS.build(student_config(teacher_config(), tmp_path / 'part.pth'))
    with pytest.raises(CheckpointError, match=r'part\.pth[\s\S]*head\.fc\.bias'):
        model.init_weights()


def test_teacher_that_loads_itself(teacher_file):
    pretrained = dict(init_cfg=dict(type='Pretrained', checkpoint=str(teacher_file)))
    model = MODELS.build(student_config({**teacher_config(), **pretrained}, None))
    state = torch.load(teacher_file)['state_dict']
    assert torch.equal(model.teacher.head.fc.weight, state['head.fc.weight'])


@pytest.mark.parametrize(
    ('changes', 'error', 'words'),
    [
        (dict(alpha=1.5), ValueError, r'alpha must lie in \[0, 1\], got 1.5'),
        (dict(distillation='medium'), ValueError, "distillation must be one of .* got 'medium'"),
        (dict(alpha='0.5'), TypeError, "alpha must be a number, got '0.5'"),
        (dict(alpha=True), TypeError, 'alpha must be a number, got True'),
        (dict(temperature=0), ValueError, 'temperature must be greater than 0 .*, got 0'),
        (dict(temperature=float('inf')), ValueError, 'temperature must be .* finite, got inf'),
        (dict(temperature='2'), TypeError, "temperature must be a number, got '2'"),
        (dict(teacher_checkpoint=5), TypeError, 'teacher_checkpoint must be text, .* got 5'),
        (dict(teacher='resnet'), TypeError, "teacher must be the config .* got 'resnet'"),
        (dict(teacher_checkpoint=None), ValueError, 'the teacher would be random'),
        (dict(teacher=Fixed([[0.0] * 3])), ValueError, 'has its weights already'),
        (
            dict(head=dict(type='LinearClsHead', num_classes=3, in_channels=64)),
            TypeError,
            "needs head=dict\\(type='mmcare.CAREClsHead', .* got LinearClsHead",
        ),
    ],
)
def test_bad_arguments(changes, error, words):
    config = {**student_config(teacher_config(), 'teacher.pth'), **changes}
    config.pop('type')
    with pytest.raises(error, match=words):
        DistillationClassifier(**config)


def test_soft_distillation_trains(student):
    model = student(distillation='soft', temperature=3.0)
    data = model.data_preprocessor(batch())
    losses = model(**data, mode='loss')
    with torch.no_grad():
        teacher = F.softmax(model.teacher(data['inputs']) / 3, 1)
        _, logits = model.head.head_logits(model.extract_feat(data['inputs']))
        divergence = (teacher * (teacher.log() - F.log_softmax(logits / 3, 1))).sum(1).mean()
    torch.testing.assert_close(losses['loss_distill'].detach(), 0.5 * 9 * divergence)
