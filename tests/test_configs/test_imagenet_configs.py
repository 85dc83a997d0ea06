"""The shipped configs for ImageNet: recipe, runs at toy size, exact resume, loading, a teacher."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.analysis import get_model_complexity_info
from mmengine.config import Config
from mmengine.dataset import Compose
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS, RUNNERS, TRANSFORMS, DefaultScope, init_default_scope
from mmengine.runner import load_checkpoint
from PIL import Image
from published_reference import published_weights

from mmcare.checkpoint import CheckpointError, convert_checkpoint, read_checkpoint
from mmcare.models import CARE
from mmcare.sample_data import make_imagenet

pytest.importorskip('mmpretrain')

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / 'configs' / 'imagenet'
PARAMETERS = {'s0': 7_340_000, 's1': 9_602_424, 's2': 19_481_288}
GMACS = {'s0': 0.7206, 's1': 1.0324, 's2': 1.9275}
TOP1 = {'s0': '78.4', 's1': '80.1', 's2': '82.1'}
MODES = ('train', 'val', 'test')
SIZE = 64


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp('imagenet') / 'data'
    make_imagenet(folder, train=16, val=8, size=SIZE)
    return folder


@pytest.fixture(autouse=True)
def scope():
    init_default_scope('mmpretrain')
    yield
    DefaultScope._instance_dict.clear()


def overrides(data, epochs=2):
    """What a toy run changes in a shipped config, as --cfg-options take it."""
    return {
        **{f'{mode}_dataloader.dataset.data_root': str(data) for mode in MODES},
        **{f'{mode}_dataloader.batch_size': 4 for mode in MODES},
        'train_dataloader.num_workers': 2,
        **{f'{mode}_dataloader.num_workers': 0 for mode in ('val', 'test')},
        **{f'{mode}_dataloader.persistent_workers': False for mode in ('val', 'test')},
        'train_dataloader.dataset.pipeline.1.scale': SIZE,
        **{f'{mode}_dataloader.dataset.pipeline.1.scale': SIZE for mode in ('val', 'test')},
        **{f'{mode}_dataloader.dataset.pipeline.2.crop_size': SIZE for mode in ('val', 'test')},
        'train_cfg.max_epochs': epochs,
        'param_scheduler.0.end': 1,
        'param_scheduler.1.begin': 1,
        'param_scheduler.1.end': epochs,
    }


def build_runner(name, data, work_dir, **changes):
    config = Config.fromfile(CONFIGS / f'{name}.py')
    experiment = f'{work_dir.name}_{name}_{len(changes)}'
    config.merge_from_dict(
        {
            **overrides(data),
            'work_dir': str(work_dir),
            'experiment_name': experiment,
            'model.backbone.layer_scale_init_value': 1.0,  # else blocks hardly matter untrained
            **changes,
        }
    )
    return RUNNERS.build(config)


def teacher_changes(folder, **changes):
    """A small random teacher of mmpretrain, instead of one that is a large download."""
    teacher = dict(
        type='ImageClassifier',
        backbone=dict(type='ResNet', depth=18, base_channels=4, stem_channels=4),
        neck=dict(type='GlobalAveragePooling'),
        head=dict(type='LinearClsHead', num_classes=1000, in_channels=32),
    )
    torch.manual_seed(3)
    torch.save(MODELS.build(teacher).state_dict(), folder / 'teacher.pth')
    return {
        'model.teacher': dict(_delete_=True, **teacher),
        'model.teacher_checkpoint': str(folder / 'teacher.pth'),
        **changes,
    }


@pytest.fixture(scope='module')
def trained(data, tmp_path_factory):
    """CARE-S0 after two epochs, in the folder of its checkpoints."""
    runner = build_runner('care_s0_in1k', data, tmp_path_factory.mktemp('trained'))
    runner.train()
    return runner


def assert_equal(state, other):
    assert state.keys() == other.keys()
    for key, value in state.items():
        assert torch.equal(value, other[key]), key


# ------------------------------------------------------------ sizes and recipe


@pytest.mark.parametrize('kind', ['in1k', 'distill_in1k'])
@pytest.mark.parametrize('variant', PARAMETERS)
def test_parameters_and_cost(variant, kind):
    config = Config.fromfile(CONFIGS / f'care_{variant}_{kind}.py')
    model = MODELS.build(config.model).eval()
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[variant]
    assert model.head.in_channels == model.backbone.out_channels[-1]
    if kind == 'in1k':
        counted = get_model_complexity_info(model, (3, 224, 224), show_table=False, show_arch=False)
        assert counted['flops'] / 1e9 == pytest.approx(GMACS[variant], rel=5e-3)


def rows_of_the_table():
    lines = (CONFIGS / 'README.md').read_text().splitlines()
    rows = [
        [cell.strip() for cell in line.strip('|').split('|')] for line in lines if '.py) |' in line
    ]
    heads = next(line for line in lines if line.startswith('| Config'))
    heads = [cell.strip() for cell in heads.strip('|').split('|')]
    return {row[0][1:].split(']')[0]: dict(zip(heads, row, strict=True)) for row in rows}


@pytest.mark.parametrize('variant', PARAMETERS)
def test_figures_in_the_table(variant):
    rows = rows_of_the_table()
    assert rows[f'care_{variant}_in1k']['Top-1 (paper)'] == TOP1[variant]
    for kind in ('in1k', 'distill_in1k'):
        row = rows[f'care_{variant}_{kind}']
        assert row['GMACs at 224'] == f'{GMACS[variant]:.4f}'
        assert row['Top-1 (ours)'] == ''


@pytest.mark.parametrize('kind', ['in1k', 'distill_in1k'])
@pytest.mark.parametrize('variant', PARAMETERS)
def test_recipe(variant, kind):
    config = Config.fromfile(CONFIGS / f'care_{variant}_{kind}.py')
    assert config.optim_wrapper.optimizer == dict(type='AdamW', lr=2e-3, weight_decay=0.05)
    assert config.train_cfg.max_epochs == 300
    warm_up, cosine = config.param_scheduler
    assert (warm_up.type, warm_up.begin, warm_up.end) == ('LinearLR', 0, 20)
    assert (cosine.type, cosine.begin, cosine.end) == ('CosineAnnealingLR', 20, 300)
    assert config.auto_scale_lr == dict(enable=False, base_batch_size=1536)
    assert 8 * config.train_dataloader.batch_size == 1536
    assert not config.train_dataloader.persistent_workers  # for exact resume
    assert config.randomness == dict(seed=0)
    assert config.default_hooks.exact_resume.type == 'mmcare.ExactResumeHook'
    model = config.model
    assert model.backbone.drop_path_rate == 0.1 and 'init_cfg' not in model.backbone
    assert model.train_cfg.augments == [
        dict(type='Mixup', alpha=0.8),
        dict(type='CutMix', alpha=1.0),
    ]
    assert model.head.loss == dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original')
    steps = {step.type: step for step in config.train_dataloader.dataset.pipeline}
    augment, erase = steps['RandAugment'], steps['RandomErasing']
    assert (augment.magnitude_level, augment.magnitude_std, augment.num_policies) == (9, 0.5, 2)
    assert erase.erase_prob == 0.25 and 'ColorJitter' not in steps
    if kind == 'distill_in1k':
        assert (model.alpha, model.teacher.model_name) == (0.5, 'regnety_160')
        assert model.get('distillation', 'hard') == 'hard'


def test_no_weight_decay_on_norms_biases_and_layer_scales():
    config = Config.fromfile(CONFIGS / 'care_s0_in1k.py')
    model = MODELS.build(config.model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = build_optim_wrapper(model, config.optim_wrapper).param_groups
    decayed = {
        names[id(parameter)]
        for group in groups
        if group['weight_decay'] > 0
        for parameter in group['params']
        if id(parameter) in names  # mmengine adds an empty one with the base settings
    }
    weights = {
        f'{name}.weight'
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Conv2d | torch.nn.Linear)
    }
    assert decayed == weights and 'head.cls_head.fc.weight' in weights
    assert sum(name.endswith('.gamma') for name in names.values()) == 17


def test_evaluation_is_that_of_timm(tmp_path):
    """Short side 256, bicubic, centre crop 224, mean and deviation of ImageNet, by Pillow alone."""
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 256, (30, 45, 3), dtype=np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees, which timm does not
    coarse.resize((450, 301)).save(tmp_path / 'image.jpg', exif=exif)
    with Image.open(tmp_path / 'image.jpg') as image:
        resized = image.convert('RGB').resize((int(256 * 450 / 301), 256), Image.Resampling.BICUBIC)
    left, top = round((resized.width - 224) / 2), 16
    cropped = np.asarray(resized.crop((left, top, left + 224, top + 224)), np.float32) / 255
    expected = (cropped - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]

    config = Config.fromfile(CONFIGS / 'care_s0_in1k.py')
    steps = config.test_dataloader.dataset.pipeline
    pipeline = Compose([TRANSFORMS.build(step) for step in steps])
    packed = pipeline(dict(img_path=str(tmp_path / 'image.jpg')))
    preprocessor = MODELS.build(config.model).data_preprocessor
    batch = preprocessor(dict(inputs=packed['inputs'][None], data_samples=[packed['data_samples']]))
    assert batch['inputs'].shape == (1, 3, 224, 224)
    difference = batch['inputs'][0].permute(1, 2, 0).numpy() - expected
    assert np.abs(difference).max() < 1e-4


# ------------------------------------------------------------ runs at toy size


def resume_equals(name, data, whole, parts, **changes):
    """Resume from the first epoch in another folder; compare with the run that went on."""
    parts.mkdir()
    shutil.copy(whole / 'epoch_1.pth', parts)
    (parts / 'last_checkpoint').write_text(str(parts / 'epoch_1.pth'))
    resumed = build_runner(name, data, parts, resume=True, **changes)
    resumed.train()
    assert resumed.iter == 8
    first, last, again = (
        read_checkpoint(file)['state_dict']
        for file in (whole / 'epoch_1.pth', whole / 'epoch_2.pth', parts / 'epoch_2.pth')
    )
    assert not torch.equal(
        first['head.distill_head.fc.weight'], last['head.distill_head.fc.weight']
    )
    assert_equal(last, again)


def test_train_save_and_resume_exactly(trained, data, tmp_path):
    """Drop path, Mixup and CutMix here, augmentation in two worker processes."""
    assert trained.iter == 8
    resume_equals('care_s0_in1k', data, Path(trained.work_dir), tmp_path / 'parts')


def test_distil_save_and_resume_exactly(data, tmp_path):
    changes = teacher_changes(tmp_path)
    runner = build_runner('care_s0_distill_in1k', data, tmp_path / 'whole', **changes)
    runner.train()
    state = read_checkpoint(tmp_path / 'whole' / 'epoch_2.pth')['state_dict']
    assert {key.split('.')[0] for key in state} == {'backbone', 'head'}
    teacher = torch.load(tmp_path / 'teacher.pth')
    assert_equal(teacher, runner.model.teacher.state_dict())
    resume_equals('care_s0_distill_in1k', data, tmp_path / 'whole', tmp_path / 'parts', **changes)
    # What was distilled is tested without its teacher.
    os.remove(tmp_path / 'teacher.pth')
    load_from = str(tmp_path / 'parts' / 'epoch_2.pth')
    metrics = build_runner(
        'care_s0_distill_in1k', data, tmp_path / 'test', **changes, load_from=load_from
    ).test()
    assert 0 <= metrics['accuracy/top1'] <= metrics['accuracy/top5'] <= 100


def test_teacher_of_other_classes_stops_the_run(data, tmp_path):
    changes = teacher_changes(tmp_path)
    changes.update({'model.head.num_classes': 1001, 'model.data_preprocessor.num_classes': 1001})
    runner = build_runner('care_s0_distill_in1k', data, tmp_path / 'run', **changes)
    with pytest.raises(ValueError, match=r'tells 1000 classes apart.*num_classes=1001'):
        runner.train()
    assert runner.iter == 0


# ------------------------------------------------------------ the checkpoint of a training run


@pytest.mark.parametrize('prefix', [{}, dict(prefix='backbone'), dict(prefix='backbone.')])
def test_checkpoint_as_init_cfg(trained, data, tmp_path, prefix):
    file = Path(trained.work_dir) / 'epoch_2.pth'
    init_cfg = dict(type='Pretrained', checkpoint=str(file), **prefix)
    backbone = CARE('s0', init_cfg=init_cfg)
    backbone.init_weights()
    assert_equal(backbone.state_dict(), trained.model.backbone.state_dict())
    # In a classifier of other classes, as --cfg-options give it.
    changes = {f'model.backbone.init_cfg.{key}': value for key, value in init_cfg.items()}
    classes = {'model.head.num_classes': 1003, 'model.data_preprocessor.num_classes': 1003}
    model = build_runner('care_s0_in1k', data, tmp_path, **changes, **classes).model
    model.init_weights()
    assert_equal(model.backbone.state_dict(), trained.model.backbone.state_dict())
    with pytest.raises(CheckpointError, match='num_classes: the file has 1000, the head 1003'):
        load_checkpoint(model, str(file))


def test_load_checkpoint_into_classifier_and_backbone(trained):
    file = str(Path(trained.work_dir) / 'epoch_2.pth')
    model = MODELS.build(Config.fromfile(CONFIGS / 'care_s0_in1k.py').model)
    load_checkpoint(model, file, strict=True)
    assert_equal(model.state_dict(), trained.model.state_dict())
    backbone = CARE('s0')
    load_checkpoint(backbone, file)
    assert_equal(backbone.state_dict(), trained.model.backbone.state_dict())


def test_published_again(trained, tmp_path):
    """Export for the authors' script, and back."""
    file = Path(trained.work_dir) / 'epoch_2.pth'
    assert 'ImageNet heads' in convert_checkpoint(file, tmp_path / 'published.pth')
    published = read_checkpoint(tmp_path / 'published.pth')['state_dict']
    assert published.keys() == published_weights('s0').keys()
    convert_checkpoint(tmp_path / 'published.pth', tmp_path / 'ours.pth')
    assert_equal(read_checkpoint(tmp_path / 'ours.pth')['state_dict'], trained.model.state_dict())


@pytest.mark.parametrize('form', ['trained', 'published', 'converted'])
def test_load_from_and_test(trained, data, tmp_path, form):
    """What ``mim test`` does with any of the three files."""
    file = Path(trained.work_dir) / 'epoch_2.pth'
    expected = trained.model.state_dict()
    if form != 'trained':
        file = tmp_path / 'CARETrans_S0.pth.tar'
        expected = published_weights('s0')
        torch.save(dict(state_dict=expected), file)
        convert_checkpoint(file, tmp_path / 'converted.pth')
        if form == 'converted':
            file = tmp_path / 'converted.pth'
        expected = read_checkpoint(tmp_path / 'converted.pth')['state_dict']
    runner = build_runner('care_s0_in1k', data, tmp_path, load_from=str(file))
    metrics = runner.test()
    assert 0 <= metrics['accuracy/top1'] <= metrics['accuracy/top5'] <= 100
    assert_equal(runner.model.state_dict(), expected)


@pytest.mark.slow
def test_the_documented_commands(data, tmp_path):
    """mim train, resume and test, with and without a teacher; mim test of a published file."""

    def mim(*arguments, **changes):
        changes = {**overrides(data), 'work_dir': str(tmp_path), **changes}
        options = [f'{key}={value}'.replace(' ', '') for key, value in changes.items()]
        command = ['mim', *arguments, '--work-dir', str(tmp_path), '--cfg-options', *options]
        environment = {**os.environ, 'PATH': f'{Path(sys.executable).parent}:{os.environ["PATH"]}'}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout + done.stderr

    config = 'configs/imagenet/care_s0_in1k.py'
    assert 'Epoch(val) [2][2/2]' in mim('train', 'mmpretrain', config, '--auto-scale-lr')
    output = mim('train', 'mmpretrain', config, '--resume', **{'train_cfg.max_epochs': 3})
    assert 'resumed epoch: 2, iter: 8' in output
    torch.save(dict(state_dict=published_weights('s0')), tmp_path / 'CARETrans_S0.pth.tar')
    for name in ('epoch_3.pth', 'CARETrans_S0.pth.tar'):
        output = mim('test', 'mmpretrain', config, '--checkpoint', str(tmp_path / name))
        assert 'accuracy/top1: ' in output
    assert 'this is the whole classifier' in output
    changes = teacher_changes(tmp_path)
    distilled = str(ROOT / 'configs/imagenet/care_s0_distill_in1k.py')
    (tmp_path / 'distill.py').write_text(
        f'_base_ = {distilled!r}\nmodel = dict(teacher={changes.pop("model.teacher")!r})\n'
    )
    output = mim('train', 'mmpretrain', str(tmp_path / 'distill.py'), **changes)
    assert 'loss_distill' in output and 'The teacher is a ImageClassifier' in output
