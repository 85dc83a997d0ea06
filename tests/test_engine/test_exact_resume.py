"""A resumed run ends with the weights of an uninterrupted one."""

import random

import numpy as np
import pytest
import torch
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.registry import HOOKS as ROOT_HOOKS
from mmengine.runner import Runner, ValLoop
from torch import nn
from torch.utils.data import Dataset

from mmcare.checkpoint import read_checkpoint


class NoisyDataset(Dataset):
    """Every generator that an augmentation may use has a part in every sample."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        noise = random.random() + np.random.rand() + torch.rand(()).item()
        return torch.full((4,), index + noise)


class NoisyModel(BaseModel):
    """Every generator that a model may use has a part in the loss; so has validation."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))

    def forward(self, inputs, mode='tensor'):
        if mode == 'predict':
            torch.rand(7), np.random.rand(3), random.random()
            return [0.0] * len(inputs)
        return dict(loss=self.layer(inputs).mean() * (1 + random.random() + np.random.rand()))


def collate(batch):
    return dict(inputs=torch.stack(batch))


@ROOT_HOOKS.register_module(force=True)
class StopAfter(Hook):
    """Interrupt a run, as a crash would, once some epochs or iterations are saved."""

    priority = 'LOWEST'

    def __init__(self, stop):
        self.stop = stop

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter == self.stop:
            raise KeyboardInterrupt


class Silent(ValLoop):
    """Validation without an evaluator; it moves the generators."""

    def run(self):
        for batch in self.dataloader:
            self.runner.model.val_step(batch)


def train(
    work_dir, by_epoch, workers=2, stop=None, resume=False, hook='mmcare.ExactResumeHook', **loader
):
    """Train 4 epochs or 16 iterations with checkpoints between; return the weights."""
    torch.manual_seed(0)
    dataloader = dict(
        dataset=NoisyDataset(),
        batch_size=2,
        num_workers=workers,
        collate_fn=collate,
        sampler=dict(type='DefaultSampler' if by_epoch else 'InfiniteSampler', shuffle=True),
        **loader,
    )
    interval = dict(by_epoch=by_epoch, interval=1 if by_epoch else 2)
    runner = Runner(
        model=NoisyModel(),
        work_dir=str(work_dir),
        experiment_name=f'{work_dir.name}_{stop}_{resume}_{workers}',
        train_dataloader=dataloader,
        train_cfg=dict(by_epoch=True, max_epochs=4, val_interval=1)
        if by_epoch
        else dict(by_epoch=False, max_iters=16, val_interval=2),
        optim_wrapper=dict(optimizer=dict(type='AdamW', lr=0.05)),
        param_scheduler=dict(type='LinearLR', start_factor=0.1, end=12, by_epoch=False),
        val_dataloader=dict(
            dataset=NoisyDataset(),
            batch_size=2,
            collate_fn=collate,
            sampler=dict(type='DefaultSampler', shuffle=False),
        ),
        val_cfg=dict(type=Silent),
        val_evaluator=[],
        randomness=dict(seed=3),
        resume=resume,
        default_hooks=dict(checkpoint=dict(type='CheckpointHook', **interval)),
        custom_hooks=[dict(type=hook)] * bool(hook) + [dict(type='StopAfter', stop=stop)],
    )
    try:
        runner.train()
    except KeyboardInterrupt:
        assert stop is not None
    return {name: value.clone() for name, value in runner.model.state_dict().items()}


def equal(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(('by_epoch', 'workers'), [(True, 2), (True, 0), (False, 2)])
def test_resume_is_exact(tmp_path, by_epoch, workers):
    uninterrupted = train(tmp_path / 'whole', by_epoch, workers)
    stopped = train(tmp_path / 'parts', by_epoch, workers, stop=9)
    assert not equal(uninterrupted, stopped)
    assert equal(uninterrupted, train(tmp_path / 'parts', by_epoch, workers, resume=True))


def test_without_the_hook_it_is_not(tmp_path):
    """The trap is there: else the test above could not fail."""
    uninterrupted = train(tmp_path / 'whole', True, hook=None)
    train(tmp_path / 'parts', True, hook=None, stop=9)
    assert not equal(uninterrupted, train(tmp_path / 'parts', True, hook=None, resume=True))


def test_states_in_the_checkpoint(tmp_path):
    train(tmp_path, True, workers=0)
    checkpoint = read_checkpoint(tmp_path / 'epoch_4.pth')
    (states,) = checkpoint['generator_states']
    assert set(states) == {'python', 'numpy', 'torch', 'cuda'}
    assert states['torch'].dtype == torch.uint8 and states['cuda'] is None


def test_a_checkpoint_to_start_from_sets_no_states(tmp_path):
    """load_from is no resume: the run is that of its own seed."""
    train(tmp_path / 'first', True, workers=0)
    runs = []
    for load_from in (None, str(tmp_path / 'first' / 'epoch_2.pth')):
        seen = []

        class Record(Hook):
            priority = 'LOWEST'

            def before_train_iter(self, runner, batch_idx, data_batch=None, seen=seen):
                seen.append(data_batch['inputs'].clone())

        runner = Runner(
            model=NoisyModel(),
            work_dir=str(tmp_path / 'second'),
            experiment_name=f'second_{load_from is None}',
            load_from=load_from,
            train_dataloader=dict(
                dataset=NoisyDataset(),
                batch_size=2,
                collate_fn=collate,
                sampler=dict(type='DefaultSampler', shuffle=True),
            ),
            train_cfg=dict(by_epoch=True, max_epochs=1),
            randomness=dict(seed=3),
            optim_wrapper=dict(optimizer=dict(type='AdamW', lr=0.05)),
            custom_hooks=[dict(type='mmcare.ExactResumeHook'), Record()],
        )
        runner.train()
        runs.append(seen)
    assert all(torch.equal(first, second) for first, second in zip(*runs, strict=True))


def test_workers_draw_anew_in_each_epoch(tmp_path):
    """mmengine seeds workers alike in every epoch, so augmentations would repeat."""
    drawn = []

    class Record(Hook):
        def before_train_iter(self, runner, batch_idx, data_batch=None):
            drawn.append(data_batch['inputs'] % 1)

    runner = Runner(
        model=NoisyModel(),
        work_dir=str(tmp_path),
        randomness=dict(seed=3),
        experiment_name='drawn',
        train_dataloader=dict(
            dataset=NoisyDataset(),
            batch_size=8,
            num_workers=1,
            collate_fn=collate,
            sampler=dict(type='DefaultSampler', shuffle=False),
        ),
        train_cfg=dict(by_epoch=True, max_epochs=2),
        optim_wrapper=dict(optimizer=dict(type='AdamW', lr=0.05)),
        custom_hooks=[dict(type='mmcare.ExactResumeHook'), Record()],
    )
    runner.train()
    assert not torch.equal(*drawn)


@pytest.mark.parametrize(
    ('by_epoch', 'workers', 'words'),
    [(True, 1, 'persistent_workers'), (False, 0, 'num_workers is 0')],
)
def test_warns_where_it_cannot_be_exact(tmp_path, monkeypatch, by_epoch, workers, words):
    messages = []
    monkeypatch.setattr(
        'mmcare.engine.hooks.exact_resume_hook.print_log', lambda text, **_: messages.append(text)
    )
    loader = dict(persistent_workers=True) if workers else {}
    train(tmp_path, by_epoch, workers, stop=0, **loader)
    assert len(messages) == 1 and words in messages[0]


@pytest.mark.parametrize('case', ['no states', 'mid-epoch', 'accumulated', 'no seed', 'skips'])
def test_warns_of_checkpoints_that_cannot_be_exact(tmp_path, monkeypatch, case):
    messages = []
    monkeypatch.setattr(
        'mmcare.engine.hooks.exact_resume_hook.print_log', lambda text, **_: messages.append(text)
    )
    loader = dict(
        dataset=NoisyDataset(),
        batch_size=2,
        collate_fn=collate,
        sampler=dict(type='DefaultSampler', shuffle=True),
    )

    def build(hooks, epochs, resume=False):
        optimizer = dict(type='AdamW', lr=0.05)
        return Runner(
            model=NoisyModel(),
            work_dir=str(tmp_path),
            experiment_name=f'{case}_{epochs}',
            train_dataloader=loader,
            train_cfg=dict(by_epoch=True, max_epochs=epochs),
            optim_wrapper=dict(
                optimizer=optimizer, accumulative_counts=3 if case == 'accumulated' else 1
            ),
            default_hooks=dict(
                checkpoint=dict(type='CheckpointHook', interval=1, by_epoch=case != 'mid-epoch')
            ),
            custom_hooks=hooks,
            resume=resume,
            randomness=dict(seed=None if case == 'no seed' else 0),
        )

    hooks = [dict(type='mmcare.ExactResumeHook')]
    if case == 'no states':
        build([], 1).train()
        build(hooks, 2, resume=True).train()
    else:
        runner = build(hooks, 1)
        if case == 'skips':  # an argument of onedl-mmengine's loops
            runner.train_loop.fast_forward_on_resume = True
        runner.train()
    words = {
        'no states': 'no generator states',
        'mid-epoch': 'middle of epochs',
        'accumulated': 'over 3 iterations',
        'no seed': 'no seed is set',
        'skips': 'fast_forward_on_resume',
    }
    assert len(messages) == 1 and words[case] in messages[0]


def test_best_checkpoint_of_validation_holds_states(tmp_path):
    """In an iteration-based loop the best checkpoint is written between the regular ones."""
    states = []

    class SaveAfterValidation(Hook):
        priority = 'LOWEST'

        def before_val(self, runner):
            runner.save_checkpoint(str(tmp_path), f'best_{runner.iter}.pth', by_epoch=False)
            states.append(read_checkpoint(tmp_path / f'best_{runner.iter}.pth'))

    class ValidateSilently(ValLoop):
        def run(self):
            self.runner.call_hook('before_val')

    runner = Runner(
        model=NoisyModel(),
        work_dir=str(tmp_path),
        experiment_name='best',
        train_dataloader=dict(
            dataset=NoisyDataset(),
            batch_size=2,
            num_workers=1,
            collate_fn=collate,
            sampler=dict(type='InfiniteSampler', shuffle=True),
        ),
        train_cfg=dict(by_epoch=False, max_iters=4, val_interval=3),
        optim_wrapper=dict(optimizer=dict(type='AdamW', lr=0.05)),
        val_dataloader=dict(
            dataset=NoisyDataset(), batch_size=2, sampler=dict(type='DefaultSampler', shuffle=False)
        ),
        val_cfg=dict(type=ValidateSilently),
        val_evaluator=[],
        default_hooks=dict(checkpoint=dict(type='CheckpointHook', interval=4, by_epoch=False)),
        custom_hooks=[dict(type='mmcare.ExactResumeHook'), SaveAfterValidation()],
    )
    runner.train()
    assert states and all('generator_states' in state for state in states)
