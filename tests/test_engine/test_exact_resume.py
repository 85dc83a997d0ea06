"""A resumed run ends with the weights of an uninterrupted one, or says why it cannot."""

import pytest
import torch
from mmengine.hooks import Hook
from toy_training import EPOCHS, StopAt, build, saved, train

from mmcare.engine.hooks.exact_resume_hook import _holds_state
from mmcare.weights.reading import CheckpointError

HOOK = 'mmcare.engine.hooks.exact_resume_hook'


class Record(Hook):
    """Keep what the workers have loaded."""

    priority = 'LOWEST'

    def __init__(self):
        self.seen = []

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.seen.append(data_batch['inputs'].clone())


@pytest.fixture
def warnings(monkeypatch):
    """The warnings of the hook."""
    found = []
    monkeypatch.setattr(f'{HOOK}.print_log', lambda text, **_: found.append(text))
    return found


def test_resume_is_exact_with_workers_and_not_without_the_hook(tmp_path):
    """Runs in one process are those of test_atomic_checkpoint.py."""
    for exact in (True, False):
        options = dict(exact=exact, loader=dict(num_workers=2))
        train(tmp_path / f'whole_{exact}', **options)
        train(tmp_path / f'parts_{exact}', hooks=[StopAt(9)], **options)
        assert saved(tmp_path / f'parts_{exact}')['last'] == 8
        train(tmp_path / f'parts_{exact}', resume=True, **options)
        same = saved(tmp_path / f'parts_{exact}') == saved(tmp_path / f'whole_{exact}')
        assert same == exact


def test_a_checkpoint_to_start_from_sets_no_states(tmp_path):
    """The runs with and without load_from see the same images."""
    runs = []
    for load_from in (None, str(tmp_path / 'epoch_3.pth')):
        record = Record()
        train(tmp_path, hooks=[record], load_from=load_from)
        runs.append(record.seen)
    assert all(map(torch.equal, *runs))


def test_workers_draw_anew_in_each_epoch(tmp_path):
    """mmengine seeds them alike in every epoch, so that augmentations would repeat."""
    record = Record()
    loader = dict(num_workers=1, sampler=dict(type='DefaultSampler', shuffle=False))
    train(tmp_path, hooks=[record], loader=loader)
    epochs = torch.stack(record.seen).unflatten(0, (EPOCHS, -1))
    assert not torch.equal(epochs[0], epochs[1])


@pytest.mark.parametrize(
    ('options', 'words'),
    [
        (dict(loader=dict(num_workers=1, persistent_workers=True)), 'workers are persistent'),
        (dict(by_epoch=False, loader=dict(num_workers=0)), 'num_workers is 0'),
        (dict(randomness=dict(seed=None)), 'no seed'),
    ],
)
def test_warns_where_it_cannot_be_exact(tmp_path, warnings, options, words):
    train(tmp_path, hooks=[StopAt(0)], **options)
    assert len(warnings) == 1 and words in warnings[0]


def test_warns_of_a_checkpoint_without_states(tmp_path, warnings):
    train(tmp_path, exact=False, hooks=[StopAt(5)])
    train(tmp_path, resume=True)
    assert len(warnings) == 1 and 'generator states' in warnings[0]


@pytest.mark.parametrize(
    ('key', 'value', 'words'),
    [
        ('optimizer', None, 'the state of the optimizer is missing'),
        ('optimizer', dict(state={}, param_groups=[dict(betas=1)]), 'the state of the optimizer'),
        ('param_schedulers', [], 'it holds 0 schedulers, and the run has 1'),
        ('param_schedulers', [{}, {}], 'it holds 2 schedulers, and the run has 1'),
    ],
)
def test_what_mmengine_would_start_anew_is_refused(tmp_path, key, value, words):
    """The file is named, and nothing is trained."""
    train(tmp_path, hooks=[StopAt(5)])
    checkpoint = torch.load(tmp_path / 'epoch_1.pth', weights_only=True)
    checkpoint[key] = value
    if value is None:
        del checkpoint[key]
    torch.save(checkpoint, tmp_path / 'epoch_1.pth')
    runner = build(tmp_path, resume=True)
    with pytest.raises(CheckpointError, match=rf'epoch_1\.pth.*{words}.*load_from'):
        runner.train()
    assert runner.iter == 0


def test_several_optimizers():
    """By name; SGD without momentum has no state."""
    adam = dict(state={0: 1}, param_groups=[dict(betas=1)])
    plain = dict(state={}, param_groups=[dict(momentum=0)])
    assert _holds_state(dict(a=adam, b=plain)) and not _holds_state({})
    assert not _holds_state(dict(a=adam, b=dict(adam, state={})))
