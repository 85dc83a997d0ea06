"""Classifiers by mim, as documented; training at toy size is in tests/test_engine."""

import sys

import pytest
import torch
from helpers import ROOT, published_weights, run
from toy_configs import TEACHER, changes_of, make_data

pytest.importorskip('mmpretrain')

PLAIN, DISTILLED = (
    ROOT / f'configs/imagenet/care_s0_{kind}.py' for kind in ('in1k', 'distill_in1k')
)


@pytest.mark.slow
def test_the_documented_commands(tmp_path):
    """mim train, resume and test, with and without a teacher; mim test of a published file."""
    data, distilled = tmp_path / 'data', tmp_path / 'distilled.py'
    make_data('distillation', data)
    teacher = f"teacher={dict(TEACHER, _delete_=True)}, teacher_checkpoint='{data}/teacher.pth'"
    distilled.write_text(f'_base_ = {str(DISTILLED)!r}\nmodel = dict({teacher})\n')

    def mim(task, config, *arguments, **changes):
        changes = {**changes_of('distillation', data), **changes}
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
