"""Shipped configs at toy size: train, validate, resume exactly and test, with and without mim."""

import shutil
import sys

import pytest
import torch
from helpers import ROOT, published_weights, run
from mmengine.registry import DefaultScope, init_default_scope
from mmengine.runner import Runner
from toy_configs import changes_of, make_data, toy_config

pytest.importorskip('mmpretrain')
from mmpretrain.registry import MODELS

PLAIN, DISTILLED = (
    ROOT / f'configs/imagenet/care_s0_{kind}.py' for kind in ('in1k', 'distill_in1k')
)
TEACHER = dict(
    type='ImageClassifier',
    backbone=dict(type='ResNet', depth=18, base_channels=4, stem_channels=4),
    neck=dict(type='GlobalAveragePooling'),
    head=dict(type='LinearClsHead', num_classes=1000, in_channels=32),
)


@pytest.fixture(scope='module')
def toy(tmp_path_factory):
    """A folder with data and a random teacher."""
    folder = tmp_path_factory.mktemp('toy')
    make_data('distillation', folder / 'data')
    init_default_scope('mmpretrain')
    torch.save(MODELS.build(TEACHER).state_dict(), folder / 'teacher.pth')
    yield folder
    DefaultScope._instance_dict.clear()


def test_train_resume_and_test(toy, tmp_path):
    """Distilled, with drop path, recomputation, Mixup, CutMix and augmentation in a worker."""

    def build_runner(folder, teacher=toy / 'teacher.pth', **changes):
        changes['model.teacher_checkpoint'] = str(teacher)
        changes['model.backbone.with_cp'] = 'activations'
        config = toy_config('distillation', toy / 'data', tmp_path / folder, **changes)
        config.model.teacher = TEACHER
        return Runner.from_cfg(config)

    whole, parts = tmp_path / 'whole', tmp_path / 'parts'
    build_runner('whole').train()
    first, last = (torch.load(whole / f'epoch_{n}.pth')['state_dict'] for n in (1, 2))
    assert {key.split('.')[0] for key in last} == {'backbone', 'head'}
    for key in ('backbone.stem.conv.weight', 'head.distill_head.fc.weight'):
        assert not torch.equal(first[key], last[key])
    parts.mkdir()
    shutil.copy(whole / 'epoch_1.pth', parts)
    resumed = build_runner('parts', resume=True)
    resumed.train()
    again = torch.load(parts / 'epoch_2.pth')['state_dict']
    assert resumed.iter == 4
    torch.testing.assert_close(again, last, rtol=0, atol=0)
    # What was distilled is tested without its teacher.
    metrics = build_runner('test', 'nowhere.pth', load_from=str(whole / 'epoch_2.pth')).test()
    assert 0 <= metrics['accuracy/top1'] <= metrics['accuracy/top5'] <= 100


@pytest.mark.slow
def test_the_documented_commands(toy, tmp_path):
    """mim train, resume and test, with and without a teacher; mim test of a published file."""
    distilled = tmp_path / 'distilled.py'
    teacher = f"teacher={dict(TEACHER, _delete_=True)}, teacher_checkpoint='{toy}/teacher.pth'"
    distilled.write_text(f'_base_ = {str(DISTILLED)!r}\nmodel = dict({teacher})\n')

    def mim(task, config, *arguments, **changes):
        changes = {**changes_of('distillation', toy / 'data'), **changes}
        options = [f'{key}={value}' for key, value in changes.items()]
        command = [sys.executable, '-m', 'mim', task, 'mmpretrain', config, *arguments]
        done = run(*command, '--work-dir', tmp_path, '--cfg-options', *options, cwd=tmp_path)
        return done.stdout + done.stderr

    assert 'Epoch(val) [2][1/1]' in mim('train', PLAIN, '--auto-scale-lr')
    output = mim('train', PLAIN, '--resume', **{'train_cfg.max_epochs': 3})
    assert 'resumed epoch: 2, iter: 4' in output
    torch.save(dict(state_dict=published_weights('s0')), tmp_path / 'CARETrans_S0.pth.tar')
    for name in ('epoch_3.pth', 'CARETrans_S0.pth.tar'):
        assert 'accuracy/top1: ' in mim('test', PLAIN, '--checkpoint', tmp_path / name)
    code = 'import sys; from mmpretrain import get_model; get_model(*sys.argv[1:])'
    run(sys.executable, '-c', code, tmp_path / PLAIN.name, tmp_path / 'epoch_3.pth')
    assert 'loss_distill' in mim('train', distilled)
