"""Trainings that are killed and resumed; test_atomic_checkpoint.py runs this file.

    python tests/killed_training.py FOLDER

It prints one JSON object: what became of each run. All runs are forks of one process, which has
imported everything and computed nothing, so that a killed run costs little.
"""

import builtins
import io
import json
import os
import random
import signal
import sys
import traceback
from pathlib import Path

import matplotlib.pyplot  # noqa: F401 (what a runner would import in each fork)
import mmengine.fileio.backends.local_backend as mmengine_files
import mmengine.runner.runner as mmengine_runner
import numpy as np
import torch
import torch._dynamo
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.runner import Runner, ValLoop
from torch import nn
from torch.utils.data import Dataset

from mmcare.checkpoint import read_checkpoint
from mmcare.engine import atomic_files

EPOCHS, ITERATIONS, KEPT = 5, 4, 2  # iterations in each epoch; checkpoints to keep
ATOMIC, MMENGINE = 'mmcare.AtomicCheckpointHook', 'CheckpointHook'
SEED = 6


class Numbers(Dataset):
    def __len__(self):
        return 2 * ITERATIONS

    def __getitem__(self, index):
        return torch.full((4,), index + random.random() + np.random.rand())


class Model(BaseModel):
    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def forward(self, inputs, mode='tensor'):
        return dict(loss=self.layer(inputs).square().mean())


class Validation(ValLoop):
    """Metrics without images: those of the second and the fourth epoch are new bests."""

    def run(self):
        pairs = self.runner.iter // (2 * ITERATIONS)
        metrics = dict(acc=pairs, loss=-pairs)
        self.runner.call_hook('after_val_epoch', metrics=metrics)


def collate(batch):
    return dict(inputs=torch.stack(batch))


def names(work_dir):
    """Names of checkpoints and what is left of such, in order."""
    return sorted(path.name for path in Path(work_dir).iterdir() if '.pth' in path.name)


def train(work_dir, by_epoch=True, resume=False, load_from=None, hooks=(), **checkpoint):
    """Train for all epochs, or as many iterations; return the runner."""
    checkpoint = (
        dict(type=ATOMIC, max_keep_ckpts=KEPT, save_best='acc', rule='greater') | checkpoint
    )
    interval = 1 if by_epoch else ITERATIONS
    checkpoint = dict(by_epoch=by_epoch, interval=interval) | checkpoint
    length = dict(max_epochs=EPOCHS) if by_epoch else dict(max_iters=EPOCHS * ITERATIONS)
    loader = dict(dataset=Numbers(), batch_size=2, collate_fn=collate)
    sampler = dict(type='DefaultSampler' if by_epoch else 'InfiniteSampler', shuffle=True)
    torch.manual_seed(SEED)
    runner = Runner(
        model=Model(),
        work_dir=str(work_dir),
        experiment_name=f'{work_dir}_{len(os.listdir(work_dir)) if work_dir.exists() else 0}',
        train_dataloader=dict(**loader, sampler=sampler, num_workers=0 if by_epoch else 1),
        train_cfg=dict(by_epoch=by_epoch, val_interval=interval, **length),
        optim_wrapper=dict(optimizer=dict(type='AdamW', lr=0.05)),
        param_scheduler=dict(type='LinearLR', start_factor=0.1, end=12, by_epoch=False),
        val_dataloader=dict(**loader, sampler=dict(type='DefaultSampler', shuffle=False)),
        val_cfg=dict(type=Validation),
        val_evaluator=[],
        randomness=dict(seed=SEED),
        load_from=load_from,
        resume=resume,
        default_hooks=dict(checkpoint=checkpoint),
        custom_hooks=[dict(type='mmcare.ExactResumeHook'), *hooks],
    )
    runner.train()
    return runner


# ---------------------------------------------------------------- kills


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


class KillAtIteration(Hook):
    def __init__(self, iteration):
        self.iteration = iteration

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter == self.iteration:
            kill()


class Disk:
    """Watch the bytes of files and the calls that follow them; kill the process at one of them.

    A file is written as far as the byte, as by a process that is killed then.
    """

    def __init__(self, kill_at_byte=sys.maxsize, kill_at_call=sys.maxsize):
        self.bytes_left, self.calls_left = kill_at_byte, kill_at_call
        self.calls = []  # 'write epoch_1.pth', 'remove epoch_1.pth' and so on
        self.num_bytes = 0

    def __enter__(self):
        self.functions = {name: getattr(os, name) for name in ('fsync', 'replace', 'remove')}
        for name, function in self.functions.items():
            setattr(os, name, self.watch(name, function))
        for module in (atomic_files, mmengine_files):
            module.open = self.open
        return self

    def __exit__(self, *error):
        for name, function in self.functions.items():
            setattr(os, name, function)
        for module in (atomic_files, mmengine_files):
            del module.open

    def called(self, name, path=''):
        if self.calls_left == 0:
            kill()
        self.calls_left -= 1
        self.calls.append(f'{name} {Path(path).name}'.strip())

    def watch(self, name, function):
        def watched(*arguments):
            self.called(name, '' if name == 'fsync' else arguments[-1])
            return function(*arguments)

        return watched

    def open(self, path, mode='r', **options):
        if mode != 'wb':
            return builtins.open(path, mode, **options)
        self.called('write', path)
        return WatchedFile(self, path)


class WatchedFile(io.FileIO):
    def __init__(self, disk, path):
        super().__init__(path, 'w')
        self.disk = disk

    def write(self, content):
        if self.disk.bytes_left < len(content):
            super().write(content[: self.disk.bytes_left])
            kill()
        self.disk.bytes_left -= len(content)
        self.disk.num_bytes += len(content)
        return super().write(content)


# ---------------------------------------------------------------- runs in processes


def run(work_dir, kill_at=None, **arguments):
    """Train in a fork; return what became of it."""
    sys.stdout.flush()
    work_dir.mkdir(parents=True, exist_ok=True)
    outcome = work_dir / 'outcome.json'
    outcome.unlink(missing_ok=True)
    process = os.fork()
    if process == 0:
        try:
            with open(work_dir / 'output.txt', 'a') as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            outcome.write_text(json.dumps(run_here(work_dir, kill_at or {}, arguments)))
        except BaseException:
            outcome.write_text(json.dumps(dict(error=traceback.format_exc())))
        os._exit(0)
    _, status = os.waitpid(process, 0)
    if os.WIFSIGNALED(status):
        return dict(signal=os.WTERMSIG(status))
    return json.loads(outcome.read_text())


def run_here(work_dir, kill_at, arguments):
    torch.set_num_threads(1)
    hooks = [KillAtIteration(kill_at['iteration'])] if 'iteration' in kill_at else []
    with Disk(kill_at.get('byte', sys.maxsize), kill_at.get('call', sys.maxsize)) as disk:
        train(work_dir, hooks=hooks, **arguments)
    return dict(num_bytes=disk.num_bytes, calls=disk.calls, saved=saved(work_dir))


def saved(work_dir):
    """The names of all checkpoints, and weights and optimizer of the last one."""
    last = read_checkpoint((work_dir / 'last_checkpoint').read_text())
    momenta = {
        f'{index}.{name}': value
        for index, state in last['optimizer']['state'].items()
        for name, value in state.items()
    }
    return dict(
        files=names(work_dir),
        last=last['meta']['iter'],
        weights={
            name: value.flatten().tolist()
            for name, value in {**last['state_dict'], **momenta}.items()
        },
    )


def kill_and_resume(folder, moments, **arguments):
    """Kill a run at each of the moments and resume it."""
    results = []
    for index, moment in enumerate(moments):
        work_dir = folder / str(index)
        killed = run(work_dir, moment, **arguments)
        left = names(work_dir)
        resumed = run(work_dir, resume=True, **arguments)
        results.append(dict(moment=moment, killed=killed, left=left, resumed=resumed))
    return results


def main(folder):
    mmengine_runner.collect_env = dict  # which starts compilers to ask for their versions
    generator = random.Random(SEED)
    report = {}
    for by_epoch, counts in ((True, (2, 3, 2)), (False, (1, 1, 1))):
        name = 'epochs' if by_epoch else 'iterations'
        whole = run(folder / name / 'whole', by_epoch=by_epoch)
        limits = dict(
            iteration=EPOCHS * ITERATIONS,
            byte=whole['num_bytes'],
            call=len(whole['calls']),
        )
        moments = [
            {key: generator.randrange(1, limits[key])}
            for key, count in zip(limits, counts, strict=True)
            for _ in range(count)
        ]
        report[name] = dict(
            whole=whole, runs=kill_and_resume(folder / name, moments, by_epoch=by_epoch)
        )
    half = run(folder / 'mmengine' / 'whole', type=MMENGINE)['num_bytes'] // 2
    report['mmengine'] = kill_and_resume(folder / 'mmengine', [dict(byte=half)], type=MMENGINE)
    print(json.dumps(report))


if __name__ == '__main__':
    main(Path(sys.argv[1]))
