"""Checkpoints outlive a kill at any moment, and a resume finds the newest whole one."""

import errno
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import killed_training
import mmengine.runner.runner
import pytest
import torch
from killed_training import EPOCHS, MMENGINE, Disk, names, saved, train
from mmengine.config import Config
from mmengine.fileio import LocalBackend, get_file_backend
from mmengine.logging import MessageHub
from mmengine.registry import HOOKS
from mmengine.runner import FlexibleRunner

from mmcare.checkpoint import CheckpointError, read_checkpoint
from mmcare.engine import AtomicCheckpointHook
from mmcare.engine.atomic_files import AtomicLocalBackend
from mmcare.engine.hooks.atomic_checkpoint_hook import AWAITS_KEY
from mmcare.engine.resume_search import find_whole_checkpoint
from mmcare.shipped import shipped_configs

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / 'configs'
LAST = EPOCHS


@pytest.fixture(scope='module')
def killed(tmp_path_factory):
    """What became of the killed runs; see killed_training.py."""
    done = subprocess.run(
        [sys.executable, killed_training.__file__, tmp_path_factory.mktemp('killed')],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """The folder of an uninterrupted run, and what it saved."""
    folder = tmp_path_factory.mktemp('trained') / 'run'
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mmengine.runner.runner, 'collect_env', dict)
        train(folder)
    return folder, saved(folder)


@pytest.fixture
def work_dir(trained, tmp_path, monkeypatch):
    """A copy of that folder, in another place."""
    monkeypatch.setattr(mmengine.runner.runner, 'collect_env', dict)
    copy = tmp_path / 'run'
    shutil.copytree(trained[0], copy)
    (copy / 'last_checkpoint').write_text(str(copy / f'epoch_{LAST}.pth'))
    return copy


# ---------------------------------------------------------------- killed runs


@pytest.mark.parametrize('loop', ['epochs', 'iterations'])
def test_killed_runs_end_as_the_uninterrupted_one(killed, loop):
    """Weights and optimizer bit by bit, and the same files."""
    whole = killed[loop]['whole']
    for run in killed[loop]['runs']:
        assert run['killed'] == dict(signal=signal.SIGKILL), run
        assert 'error' not in run['resumed'], run['resumed']
        assert run['resumed']['saved'] == whole['saved'], run['moment']


def test_the_moments_are_what_they_should_be(killed):
    """Ten, in and between the writing of files."""
    runs = [run for loop in ('epochs', 'iterations') for run in killed[loop]['runs']]
    assert len(runs) == 10
    assert len({json.dumps(run['moment']) for run in runs}) == 10
    half_written = [run for run in runs if any('unfinished' in name for name in run['left'])]
    assert len(half_written) >= 4
    assert any(len(run['left']) > len(run['resumed']['saved']['files']) for run in runs)


def test_without_the_hook_they_do_not(killed):
    """The trap is there: else the tests above could not fail."""
    (run,) = killed['mmengine']
    assert run['killed'] == dict(signal=signal.SIGKILL)
    assert 'CheckpointError' in run['resumed']['error']


def test_order_on_the_disk(tmp_path, monkeypatch):
    """Write, sync, rename, sync the folder; the pointer; and only then delete."""
    monkeypatch.setattr(mmengine.runner.runner, 'collect_env', dict)
    with Disk() as disk:
        train(tmp_path, max_keep_ckpts=1, save_best=None)

    def put(name):
        return [f'write .{name}.unfinished', 'fsync', f'replace {name}', 'fsync']

    second = [*put('epoch_2.pth'), *put('last_checkpoint'), 'remove epoch_1.pth']
    start = len(put('epoch_1.pth') + put('last_checkpoint'))
    assert disk.calls[start : start + len(second)] == second
    assert names(tmp_path) == [f'epoch_{LAST}.pth']


def test_a_full_disk_costs_no_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(mmengine.runner.runner, 'collect_env', dict)
    before = train(tmp_path, max_keep_ckpts=1, save_best=None, interval=LAST - 1, save_last=False)
    assert names(tmp_path) == [f'epoch_{LAST - 1}.pth']

    class FullFile(killed_training.WatchedFile):
        def write(self, content):
            super().write(content[:100])
            raise OSError(28, 'No space left on device')

    monkeypatch.setattr(killed_training, 'WatchedFile', FullFile)
    with Disk(), pytest.raises(OSError, match='No space left'):
        train(tmp_path, resume=True, max_keep_ckpts=1, save_best=None)
    assert names(tmp_path) == [f'epoch_{LAST - 1}.pth']
    assert type(get_file_backend('.')) is LocalBackend
    weights = read_checkpoint(tmp_path / f'epoch_{LAST - 1}.pth')['state_dict']
    assert set(weights) == set(before.model.state_dict())


# ---------------------------------------------------------------- what a resume finds


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1000])


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    weight = read_checkpoint(path)['state_dict']['layer.0.weight']
    position = content.index(weight.numpy().tobytes())
    content[position] ^= 1
    path.write_bytes(content)


def damage_a_name(path):
    """In the directory at the end of the archive, which no checksum covers."""
    content = bytearray(path.read_bytes())
    content[content.rindex(b'/data/0')] ^= 0x80
    path.write_bytes(content)


def drop_the_counters(path):
    torch.save(dict(state_dict=read_checkpoint(path)['state_dict']), path)


DAMAGES = {
    'truncated': (truncate, 'damaged or incomplete'),
    'bit': (flip_a_bit, 'checksum'),
    'name': (damage_a_name, 'damaged or incomplete'),
    'empty': (lambda path: path.write_bytes(b''), 'cannot be read'),
    'deleted': (Path.unlink, 'is not a file'),
    'weights only': (drop_the_counters, 'holds no meta, message_hub'),
}


@pytest.mark.parametrize('damage', DAMAGES)
def test_the_one_before_a_damaged_checkpoint_is_used(work_dir, trained, damage, monkeypatch):
    """It is named, and the run ends as before."""
    messages = []
    monkeypatch.setattr(
        'mmcare.engine.hooks.atomic_checkpoint_hook.print_log',
        lambda text, **_: messages.append(text),
    )
    newest = work_dir / f'epoch_{LAST}.pth'
    harm, reason = DAMAGES[damage]
    harm(newest)
    train(work_dir, resume=True)
    assert len(messages) == 1 and str(newest) in messages[0] and reason in messages[0]
    assert saved(work_dir) == trained[1]


@pytest.mark.parametrize('pointer', ['', '\0junk', 'elsewhere/epoch_5.pth', None])
def test_a_pointer_that_points_nowhere(work_dir, trained, pointer):
    """Whatever last_checkpoint says, or if it is gone: the newest in the folder is used."""
    path = work_dir / 'last_checkpoint'
    path.unlink() if pointer is None else path.write_text(pointer)
    train(work_dir, resume=True)
    assert path.read_text() == str(work_dir / f'epoch_{LAST}.pth')
    assert saved(work_dir) == trained[1]


@pytest.mark.parametrize('pointer', [True, False])
def test_no_whole_checkpoint_is_an_error(work_dir, pointer):
    """Not a silent start from the beginning."""
    for path in work_dir.glob('epoch_*.pth'):
        truncate(path)
    if not pointer:
        (work_dir / 'last_checkpoint').unlink()
    before = names(work_dir)
    with pytest.raises(CheckpointError, match='nothing to resume from') as error:
        train(work_dir, resume=True)
    assert all(f'epoch_{epoch}.pth is damaged' in str(error.value) for epoch in (LAST - 1, LAST))
    assert names(work_dir) == before


def test_an_explicit_damaged_file_is_an_error(work_dir):
    """Who names a file gets that file or nothing."""
    newest = work_dir / f'epoch_{LAST}.pth'
    truncate(newest)
    with pytest.raises(CheckpointError, match=str(newest)):
        train(work_dir, resume=True, load_from=str(newest))


def write(folder, *steps, last=None):
    """Write small files that look like checkpoints, and a pointer."""
    folder.mkdir(exist_ok=True)
    for step in steps:
        torch.save(dict(meta={}, state_dict={}, message_hub={}), folder / f'iter_{step}.pth')
    if last is not None:
        (folder / 'last_checkpoint').write_text(str(folder / f'iter_{last}.pth'))


def find(folder):
    warnings = []
    found = find_whole_checkpoint(
        folder / 'last_checkpoint', folder, 'iter_{}.pth', warnings.append
    )
    return found and found.name, len(warnings)


def test_search(tmp_path):
    assert find(tmp_path / 'not_there') == (None, 0)
    assert find(tmp_path) == (None, 0)
    write(tmp_path, 9, 10, 200)
    assert find(tmp_path) == ('iter_200.pth', 0)  # by number, not by name
    write(tmp_path, last=10)
    assert find(tmp_path) == ('iter_10.pth', 0)
    truncate_to_half = tmp_path / 'iter_10.pth'
    truncate_to_half.write_bytes(truncate_to_half.read_bytes()[:200])
    assert find(tmp_path) == ('iter_9.pth', 1)  # iter_200 is an earlier run's
    torch.save({}, tmp_path / 'best_acc_iter_10.pth')
    (tmp_path / 'iter_9.pth').unlink()
    with pytest.raises(CheckpointError, match=r'iter_10\.pth is damaged'):
        find(tmp_path)


def test_a_pointer_without_any_file(tmp_path):
    (tmp_path / 'last_checkpoint').touch()
    with pytest.raises(CheckpointError, match='names no file'):
        find(tmp_path)


def test_a_flexible_runner_looks_first(trained, tmp_path, monkeypatch):
    """What its resume has missed is an error before any work, and found by the next run."""
    monkeypatch.setattr(FlexibleRunner, '_log_env', lambda *_: None)
    shutil.copytree(trained[0], tmp_path / 'run')
    pointer = tmp_path / 'run' / 'last_checkpoint'
    pointer.unlink()

    def resume():
        runner = FlexibleRunner(
            model=killed_training.Model(),
            work_dir=str(tmp_path / 'run'),
            experiment_name=f'flexible {pointer.exists()}',
            train_dataloader=dict(
                dataset=killed_training.Numbers(),
                batch_size=2,
                sampler=dict(type='DefaultSampler', shuffle=True),
                collate_fn=killed_training.collate,
            ),
            train_cfg=dict(by_epoch=True, max_epochs=LAST),
            optim_wrapper=dict(optimizer=dict(type='AdamW', lr=0.05)),
            param_scheduler=dict(type='LinearLR', start_factor=0.1, end=12, by_epoch=False),
            default_hooks=dict(checkpoint=dict(type='mmcare.AtomicCheckpointHook', interval=1)),
            resume=True,
        )
        runner.train()
        return runner

    with pytest.raises(CheckpointError, match=f'epoch_{LAST}.pth.*start the run again'):
        resume()
    assert resume().epoch == LAST


def test_folders_that_cannot_be_synced(tmp_path, monkeypatch):
    """As on some network file systems; other errors are raised."""
    error = OSError(errno.EINVAL, 'no')
    sync = os.fsync

    def refuse(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise error
        sync(descriptor)

    monkeypatch.setattr(os, 'fsync', refuse)
    AtomicLocalBackend().put(b'content', tmp_path / 'file')
    assert (tmp_path / 'file').read_bytes() == b'content'
    error = OSError(errno.EIO, 'no')
    with pytest.raises(OSError, match='no'):
        AtomicLocalBackend().put(b'more', tmp_path / 'file')


def test_one_name_for_all(work_dir, trained):
    """A template without a number: each checkpoint takes the place of the one before it."""
    shutil.rmtree(work_dir)
    train(work_dir, filename_tmpl='latest.pth', save_best=None)
    train(work_dir, filename_tmpl='latest.pth', save_best=None, resume=True)
    assert names(work_dir) == ['latest.pth']
    assert saved(work_dir)['weights'] == trained[1]['weights']


# ---------------------------------------------------------------- the rest of mmengine's hook


def test_a_file_of_another_cannot_name_what_is_deleted(work_dir, tmp_path):
    """Paths in a checkpoint are taken for checkpoints of this folder, or for nothing."""
    strangers = [tmp_path / 'outside.pth', work_dir / 'notes.txt']
    for stranger in strangers:
        stranger.touch()
    newest = work_dir / f'epoch_{LAST}.pth'
    checkpoint = read_checkpoint(work_dir / f'epoch_{LAST - 1}.pth')
    hub = checkpoint['message_hub']['runtime_info']
    hub['outdated_ckpts'] = [*map(str, strangers), '', '.', '..', 'x/..', str(work_dir)]
    hub.update(best_ckpt=str(strangers[0]), best_score=-1.0)
    hub['keep_ckpt_ids'] = [f'/../../{strangers[0].stem}', True, LAST - 2, LAST - 1]
    (work_dir / 'epoch_').mkdir()  # through which that path would lead
    torch.save(checkpoint, newest)
    train(work_dir, resume=True)
    assert all(stranger.is_file() for stranger in strangers)
    assert read_checkpoint(newest)['meta']['epoch'] == LAST


@pytest.mark.parametrize('killed_before_publishing', [False, True])
def test_published_keys(work_dir, trained, killed_before_publishing):
    """The last and the best are published, by a resumed run as well."""
    if not killed_before_publishing:
        shutil.rmtree(work_dir)
    with Disk() as disk:
        train(work_dir, resume=True, published_keys=['meta', 'state_dict'])
    published = sorted(set(names(work_dir)) - set(trained[1]['files']))
    assert [name.split('-')[0] for name in published] == ['best_acc_epoch_4', f'epoch_{LAST}']
    for name in published:
        assert f'write .{name}.unfinished' in disk.calls
        content = torch.load(work_dir / name, weights_only=False)
        assert set(content) == {'meta', 'state_dict'}
        assert str(work_dir) not in str(content['state_dict']._metadata)
        assert 'cfg' in content['meta']


@pytest.mark.parametrize('name', shipped_configs())
def test_shipped_configs_use_it(name):
    """With mmengine's arguments, as --cfg-options and derived configs set them."""
    config = Config.fromfile(CONFIGS / f'{name}.py')
    config.merge_from_dict({'default_hooks.checkpoint.save_best': 'auto'})
    hook = HOOKS.build(config.default_hooks.checkpoint)
    assert type(hook) is AtomicCheckpointHook
    loop = config.train_cfg
    by_epoch = loop.get('by_epoch', loop.get('type') == 'EpochBasedTrainLoop')
    assert hook.by_epoch == by_epoch and hook.save_best == ['auto'] and hook.max_keep_ckpts == 3


def test_it_is_mmengines_hook_otherwise(tmp_path, monkeypatch):
    """The same files with the same weights, whatever is asked for."""
    monkeypatch.setattr(mmengine.runner.runner, 'collect_env', dict)
    options = dict(save_best=['acc', 'loss'], rule=['greater', 'less'], out_dir=None, interval=2)
    for folder, kind in (('ours', killed_training.ATOMIC), ('mmengines', MMENGINE)):
        options['out_dir'] = str(tmp_path / f'out_{folder}')
        train(tmp_path / folder, type=kind, **options)
    ours, theirs = tmp_path / 'out_ours' / 'ours', tmp_path / 'out_mmengines' / 'mmengines'
    assert names(ours) == names(theirs) and len(names(ours)) == 4
    for name in names(ours):
        first, second = (read_checkpoint(folder / name) for folder in (ours, theirs))
        assert first.keys() == second.keys()
        for key, value in first['state_dict'].items():
            assert torch.equal(value, second['state_dict'][key])


def test_a_validation_without_training():
    """As `runner.val()` has it: nothing is to be saved, and `before_train` was not called."""
    runner = SimpleNamespace(message_hub=MessageHub('a validation without training'))
    AtomicCheckpointHook(interval=1).after_val_epoch(runner, {'accuracy': 0.5})
    assert not runner.message_hub.get_info(AWAITS_KEY)
