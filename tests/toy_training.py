"""A training of seconds, to be killed and resumed: ``python tests/toy_training.py FOLDER``.

The command kills runs at many moments, resumes them and prints what became of them as JSON. All
runs are forks of one process that has imported everything and computed nothing.
"""

import json
import os
import random
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path

import matplotlib.backends.backend_agg  # noqa: F401 (this and mmcv.ops save time in each fork)
import mmengine.runner.runner as mmengine_runner
import numpy as np
import torch
import torch._dynamo
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.runner import Runner, ValLoop
from torch import nn
from torch.utils.data import Dataset

import mmcare.engine.safe_loading  # noqa: F401

with suppress(ImportError):  # mmcv-lite has none
    import mmcv.ops  # noqa: F401

mmengine_runner.collect_env = dict  # which starts compilers to ask for their versions
EPOCHS, ITERATIONS, KEPT = 4, 4, 2  # iterations in each epoch; checkpoints to keep
EVENTS = ('open', 'os.rename', 'os.remove')  # of sys.addaudithook


class Numbers(Dataset):
    """Every generator that an augmentation may use has a part in every sample."""

    def __init__(self):
        self.metainfo = dict(classes=('a', 'b'), palette=np.zeros((2, 3), np.uint8))

    def __len__(self):
        return 2 * ITERATIONS

    def __getitem__(self, index):
        return torch.full((4,), index + random.random() + np.random.rand() + torch.rand(()).item())


class Model(BaseModel):
    """Every generator that a model may use has a part in the loss; so has validation."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 1)
        )

    def forward(self, inputs, mode='tensor'):
        draws = random.random() + np.random.rand()
        for _ in range(int(os.environ.get('RANK', 0))):  # processes draw differently
            draws += torch.rand(()).item() + random.random()
        return dict(loss=(self.layer(inputs) + draws).square().mean())


class Validation(ValLoop):
    """Metrics without images: those of the second and the fourth epoch are new bests."""

    def run(self):
        torch.rand(7), np.random.rand(3), random.random()
        self.runner.call_hook('before_val_epoch')
        pairs = np.float64(self.runner.iter // (2 * ITERATIONS))
        self.runner.call_hook('after_val_epoch', metrics=dict(acc=pairs, loss=-pairs))


class StopAt(Hook):
    """Interrupt a run before an iteration, or kill it."""

    def __init__(self, iteration, kill=False):
        self.iteration, self.kill = iteration, kill

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter == self.iteration:
            if self.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyboardInterrupt  # not SIGINT, which shells let background jobs ignore


def collate(batch):
    return dict(inputs=torch.stack(batch))


def build(
    work_dir, by_epoch=True, checkpoint=(), hooks=(), exact=True, loader=(), kind=Runner, **options
):
    interval = 1 if by_epoch else ITERATIONS
    saving = dict(type='mmcare.AtomicCheckpointHook', by_epoch=by_epoch, interval=interval)
    saving.update(max_keep_ckpts=KEPT, save_best='acc', rule='greater')
    length = dict(max_epochs=EPOCHS) if by_epoch else dict(max_iters=EPOCHS * ITERATIONS)
    data = dict(dataset=Numbers(), batch_size=2, collate_fn=collate)
    sampler = dict(type='DefaultSampler' if by_epoch else 'InfiniteSampler', shuffle=True)
    training = dict(data, sampler=sampler, num_workers=not by_epoch)
    in_order = dict(data, sampler=dict(type='DefaultSampler', shuffle=False))
    torch.manual_seed(0)  # of the weights
    arguments = dict(
        work_dir=str(work_dir),
        experiment_name=f'toy_{build.count}',
        train_dataloader={**training, **dict(loader)},
        train_cfg=dict(by_epoch=by_epoch, val_interval=interval, **length),
        optim_wrapper=dict(optimizer=dict(type='AdamW', lr=0.05)),
        param_scheduler=dict(type='LinearLR', start_factor=0.1, end=12, by_epoch=False),
        randomness=dict(seed=3),
        default_hooks=dict(checkpoint={**saving, **dict(checkpoint)}),
        custom_hooks=[*[dict(type='mmcare.ExactResumeHook')] * exact, *hooks],
    )
    for mode in ('val', 'test'):
        evaluation = dict(dataloader=in_order, cfg=dict(type=Validation), evaluator=[])
        arguments.update({f'{mode}_{key}': value for key, value in evaluation.items()})
    build.count += 1
    return kind(**{'model': Model(), **arguments, **options})


build.count = 0


def train(work_dir, **arguments):
    """Train until the end, or until a hook interrupts it; return the runner."""
    runner = build(work_dir, **arguments)
    try:
        runner.train()
    except KeyboardInterrupt:
        assert arguments['hooks']
    return runner


def names(work_dir):
    return sorted(path.name for path in Path(work_dir).iterdir() if '.pth' in path.name)


def saved(work_dir):
    """The names of all checkpoints; iteration, weights and optimizer of the last one."""
    last = torch.load(Path(work_dir, 'last_checkpoint').read_text(), weights_only=True)
    momenta = {
        f'{index}.{name}': value
        for index, state in last['optimizer']['state'].items()
        for name, value in state.items()
    }
    values = {name: v.flatten().tolist() for name, v in {**last['state_dict'], **momenta}.items()}
    return dict(files=names(work_dir), last=last['meta']['iter'], values=values)


def watch(kill_at):
    """Count what this process does to files of checkpoints; kill it at one of these events.

    A file that is opened then is left half-written.
    """

    def audit(event, arguments):
        if event not in EVENTS or not any(
            part in str(arguments[0]) for part in ('.pth', 'last_checkpoint')
        ):
            return
        if event == 'open' and not str(arguments[1]).startswith('w'):
            return
        watch.count += 1
        if watch.count == kill_at:
            if event == 'open':
                Path(arguments[0]).write_bytes(b'PK\x03\x04 half of a file')
            os.kill(os.getpid(), signal.SIGKILL)

    watch.count = 0
    sys.addaudithook(audit)


def run(work_dir, kill_at=None, **arguments):
    """Train in a fork, and kill it at an event; return what became of it."""
    work_dir.mkdir(parents=True, exist_ok=True)
    outcome = work_dir / 'outcome.json'
    process = os.fork()
    if process == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            watch(kill_at)
            train(work_dir, **arguments)
            outcome.write_text(json.dumps(dict(saved(work_dir), events=watch.count)))
        except BaseException:
            outcome.write_text(json.dumps(dict(error=traceback.format_exc())))
        os._exit(0)
    _, status = os.waitpid(process, 0)
    if os.WIFSIGNALED(status):
        return dict(signal=os.WTERMSIG(status))
    return json.loads(outcome.read_text())


def kill_and_resume(work_dir, moment, **arguments):
    """Kill a run before an iteration or at an event; resume it."""
    hooks = [StopAt(moment['iteration'], kill=True)] if 'iteration' in moment else []
    killed = run(work_dir, moment.get('event'), hooks=hooks, **arguments)
    left = names(work_dir)
    resumed = run(work_dir, resume=True, **arguments)
    return dict(moment=moment, killed=killed, left=left, resumed=resumed)


def main(folder):
    torch.set_num_threads(1)
    report = {}
    for by_epoch, step in ((True, 4), (False, 10)):
        name = 'epochs' if by_epoch else 'iterations'
        whole = run(folder / name, by_epoch=by_epoch)
        moments = [dict(event=event) for event in range(whole['events'], 0, -step)]
        moments.append(dict(iteration=2 * ITERATIONS + 2))
        runs = [
            kill_and_resume(folder / f'{name}_{index}', moment, by_epoch=by_epoch)
            for index, moment in enumerate(moments)
        ]
        report[name] = dict(whole=whole, runs=runs)
    print(json.dumps(report))


if __name__ == '__main__':
    main(Path(sys.argv[1]))
