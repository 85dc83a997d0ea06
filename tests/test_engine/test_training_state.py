"""A run resumes from a whole checkpoint, or says what is missing."""

import pytest
import torch
from mmengine.model import BaseModel
from torch import nn
from torch.utils.data import Dataset

from mmcare.checkpoint import CheckpointError, read_checkpoint
from mmcare.engine import CheckingRunner, training_state


class Numbers(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.full((4,), float(index))


class Model(BaseModel):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, inputs, mode='tensor'):
        return dict(loss=self.layer(inputs).square().mean())


def collate(batch):
    return dict(inputs=torch.stack(batch))


def build(folder, epochs, resume=False, optimizer='AdamW'):
    return CheckingRunner(
        model=Model(),
        work_dir=str(folder),
        experiment_name=f'{folder.name}_{epochs}_{optimizer}',
        train_dataloader=dict(
            dataset=Numbers(),
            batch_size=2,
            sampler=dict(type='DefaultSampler', shuffle=True),
            collate_fn=collate,
        ),
        train_cfg=dict(by_epoch=True, max_epochs=epochs),
        optim_wrapper=dict(optimizer=dict(type=optimizer, lr=0.01)),
        param_scheduler=dict(type='MultiStepLR', milestones=[1]),
        default_hooks=dict(
            exact_resume=dict(type='mmcare.ExactResumeHook'),
            data_check=dict(type='mmcare.DataCheckHook'),
        ),
        resume=resume,
    )


@pytest.mark.parametrize('optimizer', ['AdamW', 'SGD'])
def test_a_whole_checkpoint_passes(tmp_path, optimizer):
    """SGD without momentum has no state, which is no fault."""
    build(tmp_path, 1, optimizer=optimizer).train()
    runner = build(tmp_path, 2, resume=True, optimizer=optimizer)
    runner.train()
    assert runner.iter == 4


NOT_FINITE = {0: dict(step=torch.tensor(2.0), exp_avg=torch.full((1, 4), float('nan')))}


@pytest.mark.parametrize(
    ('place', 'value', 'words'),
    [
        (['optimizer'], None, 'optimizer is a NoneType'),
        (['optimizer'], 'gone', 'optimizer is missing'),
        (['optimizer'], {'a': 1}, r'optimizer\.state is missing'),
        (['optimizer', 'state'], {}, r'optimizer\.state is empty, after 2 iterations'),
        (['optimizer', 'state'], {99: {}}, 'the entry 99, which is no parameter'),
        (['optimizer', 'state'], NOT_FINITE, 'parameter 0: exp_avg is not finite'),
        (['optimizer', 'param_groups'], [3], 'param_groups does not hold groups'),
        (['meta', 'epoch'], 'gone', r'meta\.epoch is missing'),
        (['meta', 'iter'], 'two', r'meta\.iter is a str'),
        (['message_hub'], 'gone', 'message_hub is missing'),
        (['param_schedulers'], 3, 'param_schedulers is a int'),
        (['param_schedulers'], [3], 'param_schedulers does not hold states'),
        (['param_schedulers'], {}, 'param_schedulers does not hold states'),
        (['param_schedulers'], [], 'param_schedulers holds 0 states, and the run has 1 sched'),
        (['generator_states'], [{}], 'generator_states does not hold'),
    ],
)
def test_what_is_missing_is_named(tmp_path, place, value, words):
    build(tmp_path, 1).train()
    file = tmp_path / 'epoch_1.pth'
    checkpoint = read_checkpoint(file)
    values = checkpoint
    for key in place[:-1]:
        values = values[key]
    values[place[-1]] = value
    if value == 'gone':
        del values[place[-1]]
    torch.save(checkpoint, file)
    runner = build(tmp_path, 2, resume=True)
    with pytest.raises(CheckpointError, match=rf'epoch_1\.pth.*{words}'):
        runner.train()
    assert runner.iter == 0


def test_schedulers_by_name_of_their_optimizer():
    check = training_state._check_schedulers
    check('file', {'a': [{}], 'b': [{}, {}]}, {'a': [1], 'b': [1, 2]})
    with pytest.raises(CheckpointError, match=r"for the optimizers \['a'\]"):
        check('file', {'a': [{}]}, {'a': [1], 'b': [1]})
    with pytest.raises(CheckpointError, match='holds 1 states, and the run has 2'):
        check('file', {'a': [{}]}, {'a': [1, 2]})
