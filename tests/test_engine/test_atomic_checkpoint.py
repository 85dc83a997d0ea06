"""Checkpoints survive a kill at any moment, and a resume finds the newest whole one."""

import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections import deque
from pathlib import Path
from threading import Timer

import numpy as np
import pytest
import torch
import toy_training
from helpers import run, warned
from mmengine.hooks import Hook
from mmengine.optim import OneCycleLR
from toy_training import EPOCHS, StopAt, names, saved, train

from mmcare.engine.hooks.atomic_checkpoint_hook import _plain
from mmcare.files import lock_directory
from mmcare.weights.reading import CheckpointError, read_checkpoint, readable_types
from mmcare_runtime.saving import host

FORK = multiprocessing.get_context('fork')
HOOK = 'mmcare.engine.hooks.atomic_checkpoint_hook'
NEWEST = f'epoch_{EPOCHS}.pth'


@pytest.fixture(scope='module')
def killed(tmp_path_factory):
    folder = tmp_path_factory.mktemp('killed')
    return json.loads(run(sys.executable, toy_training.__file__, folder).stdout)


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp('trained') / 'run'
    train(folder)
    return folder


@pytest.fixture
def work_dir(trained, tmp_path):
    """A copy of that folder, in another place; the path in ``last_checkpoint`` is the old one."""
    return shutil.copytree(trained, tmp_path / 'run')


@pytest.mark.parametrize('loop', ['epochs', 'iterations'])
def test_killed_runs_end_as_the_uninterrupted_one(killed, loop):
    """Weights and optimizer bit by bit, and the same files."""
    whole = killed[loop]['whole']
    for killed_run in killed[loop]['runs']:
        assert killed_run['killed'] == dict(signal=signal.SIGKILL)
        assert 'error' not in killed_run['resumed'], killed_run['resumed']['error']
        for key in ('files', 'last', 'values'):
            assert killed_run['resumed'][key] == whole[key], killed_run['moment']
    left = [name for killed_run in killed[loop]['runs'] for name in killed_run['left']]
    assert any(name.endswith('.tmp') for name in left)  # some were killed within a write


@pytest.mark.parametrize('backend_args', [None, dict(backend='local')])
def test_a_full_disk_costs_no_checkpoint(work_dir, monkeypatch, backend_args):
    """What is written cannot be finished; the newest checkpoint stays, even as the only one."""
    only = dict(max_keep_ckpts=1, save_best=None, backend_args=backend_args)

    def fail(*_):
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(os, 'fsync', fail)
    with pytest.raises(OSError, match='No space left'):
        train(work_dir, resume=True, checkpoint=only, train_cfg=dict(by_epoch=True, max_epochs=9))
    assert NEWEST in names(work_dir) and f'epoch_{EPOCHS + 1}.pth' not in names(work_dir)
    read_checkpoint(work_dir / NEWEST)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1000])


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    weight = torch.load(path, weights_only=True)['state_dict']['layer.0.weight']
    content[content.index(weight.numpy().tobytes())] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    'harm', [truncate, flip_a_bit, lambda path: path.unlink(), lambda path: path.write_bytes(b'')]
)
def test_damaged_checkpoint_is_skipped(work_dir, trained, logged, harm):
    harm(work_dir / NEWEST)
    train(work_dir, resume=True)
    (text,) = warned(logged, 'Not resuming from')
    assert str(work_dir / NEWEST) in text
    assert saved(work_dir) == saved(trained)


@pytest.mark.parametrize('pointer', ['', '\0junk', 'elsewhere/epoch_77.pth', None])
def test_a_pointer_that_points_nowhere(work_dir, pointer):
    """The newest in the folder is used, not the one of an earlier, longer run."""
    earlier = shutil.copy2(work_dir / 'epoch_3.pth', work_dir / 'epoch_900.pth')
    assert torch.load(earlier, weights_only=True)['meta']['epoch'] == 3
    path = work_dir / 'last_checkpoint'
    path.unlink() if pointer is None else path.write_text(pointer)
    assert train(work_dir, resume=True)._load_from == str(work_dir / NEWEST)


def test_no_whole_checkpoint_is_an_error(work_dir):
    """The run does not silently start from its beginning."""
    for path in work_dir.glob('epoch_*.pth'):
        truncate(path)
    with pytest.raises(CheckpointError, match=r'all of epoch_4\.pth, epoch_3\.pth in .* damaged'):
        train(work_dir, resume=True)
    with pytest.raises(CheckpointError, match=str(work_dir / NEWEST)):
        train(work_dir, resume=True, load_from=str(work_dir / NEWEST))


class Breaks(Hook):
    """Make a weight infinite in the third epoch."""

    def after_train_epoch(self, runner):
        if runner.epoch == 2:
            runner.model.layer[0].weight.data[0, 0] = float('inf')


def test_weights_that_are_not_finite(tmp_path, logged):
    """They push out no other checkpoint, and are not resumed from."""
    train(tmp_path / 'whole')
    longer = dict(train_cfg=dict(by_epoch=True, max_epochs=6))
    train(tmp_path / 'run', hooks=[Breaks()], **longer)
    texts = warned(logged, 'are not finite, such as layer.0.weight. No other checkpoint')
    assert [text.split(' are')[0].rpartition('/')[2] for text in texts[:1]] == ['epoch_3.pth']
    files = {name for name in names(tmp_path / 'run') if name.startswith('epoch')}
    assert files == {f'epoch_{epoch}.pth' for epoch in (1, 2, 5, 6)}
    runner = train(tmp_path / 'run', resume=True)
    assert runner._load_from == str(tmp_path / 'run/epoch_2.pth')
    assert len(warned(logged, 'Not resuming from')) == 2
    found, expected = (saved(tmp_path / name) for name in ('run', 'whole'))
    assert found['values'] == expected['values'] and found['last'] == expected['last']
    for name in files - {'epoch_5.pth', 'epoch_6.pth'}:
        (tmp_path / 'run' / name).unlink(missing_ok=True)
    for path in (tmp_path / 'run').glob('epoch_[34].pth'):
        path.unlink()
    with pytest.raises(CheckpointError, match=r'all of .* are damaged, missing or have weights'):
        train(tmp_path / 'run', resume=True)


def test_another_run_in_the_same_folder_is_a_warning(work_dir, logged):
    train(work_dir, hooks=[StopAt(0)])
    (text,) = warned(logged, 'checkpoints of another run')
    assert all(words in text for words in (str(work_dir), NEWEST, '--resume', '--work-dir'))
    train(work_dir, resume=True)
    assert len(warned(logged, 'checkpoints of another run')) == 1


@pytest.mark.parametrize('hooks', [[], [dict(type='mmcare.SafeLoadingHook')]], ids=['', 'safe'])
def test_a_resume_reads_its_checkpoint_once(work_dir, trained, monkeypatch, hooks):
    load, read = torch.load, []

    def count(*arguments, **options):
        read.append(1)
        return load(*arguments, **options)

    monkeypatch.setattr(torch, 'load', count)
    train(work_dir, resume=True, hooks=hooks)
    assert len(read) == 1
    assert saved(work_dir) == saved(trained)


@pytest.fixture
def living(tmp_path):
    """Another run's process in the folder, in the midst of a write; and the file of that write."""
    written = tmp_path / f'run/.{NEWEST}.x7_.tmp/{NEWEST}'
    written.parent.mkdir(parents=True)
    written.touch()

    def hold(locked, seconds=60):
        lock = lock_directory(tmp_path / 'run')  # noqa: F841 (held)
        locked.set()
        time.sleep(seconds)

    locked = FORK.Event()
    process = FORK.Process(target=hold, args=(locked,))
    process.start()
    locked.wait()
    yield process, written
    process.kill()


def test_a_folder_has_one_run_at_a_time(living, tmp_path, monkeypatch):
    """What a living run writes stays. A test of its weights does not wait."""
    process, written = living
    monkeypatch.setattr(f'{HOOK}.WAIT', 0.2)
    with pytest.raises(RuntimeError, match=r'another run writes to .*run: end it, or choose'):
        train(tmp_path / 'run')
    toy_training.build(tmp_path / 'run').call_hook('before_run')
    assert written.exists() and not names(tmp_path / 'run')[1:]
    monkeypatch.setattr(f'{HOOK}.WAIT', 60)
    Timer(1, process.kill).start()
    train(tmp_path / 'run')  # waits
    assert not written.exists() and NEWEST in names(tmp_path / 'run')
    runner = train(tmp_path / 'run')  # the same process may start over
    (tmp_path / 'run/epoch_77.pth').mkdir()
    with pytest.raises(IsADirectoryError, match='epoch_77'):
        runner.train()  # the second time, the folder is checked as well


@pytest.mark.parametrize('name', ['last_checkpoint', 'epoch_77.pth'])
def test_folders_in_place_of_files(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(IsADirectoryError, match=f'{name} is a directory, where the run writes'):
        train(tmp_path)


def test_a_file_cannot_name_what_is_deleted(work_dir, tmp_path):
    """Paths in a checkpoint are taken for checkpoints of this folder, or for nothing."""
    strangers = [tmp_path / 'outside.pth', work_dir / 'notes.txt']
    for stranger in strangers:
        stranger.touch()
    checkpoint = torch.load(work_dir / NEWEST, weights_only=True)
    hub = checkpoint['message_hub']['runtime_info']
    hub['outdated_ckpts'] = [*map(str, strangers), '', '.', '..', str(work_dir)]
    hub.update(best_ckpt=str(strangers[0]), best_score=-1.0)
    hub['keep_ckpt_ids'] = [f'/../../{strangers[0].stem}', True, EPOCHS - 1, EPOCHS]
    (work_dir / 'epoch_').mkdir()  # through which that path would lead
    torch.save(checkpoint, work_dir / NEWEST)
    train(work_dir, resume=True, train_cfg=dict(by_epoch=True, max_epochs=EPOCHS + 2))
    assert all(stranger.is_file() for stranger in strangers)


def test_published_keys(work_dir):
    """A resumed run publishes the last and the best, as one that was not killed."""
    train(work_dir, resume=True, checkpoint=dict(published_keys=['meta', 'state_dict']))
    published = [name for name in names(work_dir) if '-' in name]
    assert [name.split('-')[0] for name in published] == ['best_acc_epoch_4', 'epoch_4']
    for name in published:
        assert set(torch.load(work_dir / name, weights_only=True)) == {'meta', 'state_dict'}


def test_it_is_mmengines_hook_otherwise(tmp_path):
    """The same files with the same weights; ours hold tensors and plain values only."""
    options = dict(save_best=['acc', 'loss'], rule=['greater', 'less'], interval=2)
    for kind in ('mmcare.AtomicCheckpointHook', 'CheckpointHook'):
        own = dict(options, type=kind, out_dir=str(tmp_path / f'out_{kind}'))
        train(tmp_path / kind, checkpoint=own)
    ours, theirs = (
        tmp_path / f'out_{kind}' / kind
        for kind in ('mmcare.AtomicCheckpointHook', 'CheckpointHook')
    )
    assert names(ours) == names(theirs) and len(names(ours)) == 4
    for name in names(ours):
        first = torch.load(ours / name, weights_only=True)
        second = torch.load(theirs / name, weights_only=False)
        assert first.keys() == second.keys()
        assert all(map(torch.equal, first['state_dict'].values(), second['state_dict'].values()))
        assert first['meta']['dataset_meta']['palette'] == [[0, 0, 0]] * 2
    assert type(first['message_hub']['runtime_info']['best_score_acc']) is float


def test_a_scheduler_with_a_function(tmp_path):
    """OneCycleLR's state has one, which plain values leave out; others' files are read, too."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
    state = OneCycleLR(optimizer, eta_max=0.1, total_steps=9).state_dict()
    torch.save(dict(param_schedulers=[state]), tmp_path / 'theirs.pth')
    assert 'anneal_func' in state
    (read,) = read_checkpoint(tmp_path / 'theirs.pth')['param_schedulers']
    assert 'anneal_func' not in read and read['total_steps'] == 9
    dropped = []
    plain = _plain(dict(param_schedulers=[state]), '', readable_types(), dropped)
    torch.save(plain, tmp_path / 'ours.pth')
    assert torch.load(tmp_path / 'ours.pth', weights_only=True)['param_schedulers'] == [read]
    assert not dropped


class Keeper(Hook):
    """A hook that saves what it holds, after all other hooks."""

    priority = 'LOWEST'

    def before_save_checkpoint(self, runner, checkpoint):
        checkpoint['keeper'] = dict(
            last=deque([1]), lists=[[Path('a')]], seen={1, np.int64(2)}, best=0.5
        )
        checkpoint['bad'] = dict(paths={Path('a')}, bytes=bytearray(1), calls=[print])


def test_values_that_could_not_be_read_again(tmp_path, logged):
    """They are left out with a warning, and the run resumes from the checkpoint."""
    train(tmp_path, hooks=[Keeper()])
    path, text = type(Path('a')).__name__, warned(logged, 'Not in the checkpoint')[0]
    assert f'again: keeper.last (deque), keeper.lists ({path}), bad.paths ({path})' in text
    logged.clear()
    train(tmp_path, resume=True, hooks=[Keeper()])
    assert not warned(logged, 'Not resuming') and not warned(logged, 'dataset metainfo')
    checkpoint = read_checkpoint(tmp_path / NEWEST)
    assert checkpoint['keeper'] == dict(seen={1, 2}, best=0.5) and checkpoint['bad'] == {}


def test_a_test_after_training(tmp_path):
    """It makes no folder."""
    runner = train(tmp_path / 'run', checkpoint=dict(out_dir=str(tmp_path / 'out')))
    runner.test()
    assert not [path for path in (tmp_path / 'out/run').iterdir() if path.is_dir()]


@pytest.mark.parametrize('locks', [True, False])
def test_folders_of_killed_runs(tmp_path, monkeypatch, locks):
    """Those of living processes stay; without locks, also those of other machines."""
    if not locks:
        monkeypatch.setattr(f'{HOOK}.lock_directory', lambda *_: None)
    dead = os.fork()
    if dead == 0:
        os._exit(0)
    os.waitpid(dead, 0)
    owners = {f'{host()}~{dead}.': True, f'{host()}~{os.getpid()}.': False, 'node9~1.': locks}
    owners['elsewhere'] = locks  # of mmcare 1.0.0
    folders = {tmp_path / f'.epoch_1.pth.{owner}x.tmp': gone for owner, gone in owners.items()}
    for folder in folders:
        folder.mkdir()
    train(tmp_path, hooks=[StopAt(0)])
    assert {folder: not folder.exists() for folder in folders} == folders
