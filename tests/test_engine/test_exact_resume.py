"""A resumed run ends with the weights of an uninterrupted one, or says why it cannot."""

from contextlib import nullcontext

import pytest
import torch
from mmengine.hooks import Hook
from toy_training import EPOCHS, StopAt, build, saved, train

from mmcare.weights.reading import CheckpointError

HOOK = 'mmcare.engine.hooks.exact_resume_hook'
PLAIN_SGD = dict(state={}, param_groups=[dict(momentum=0)])
EMPTY_ADAM = dict(state={}, param_groups=[dict(betas=1)])


def test_exact_resume_with_workers(tmp_path):
    for exact in (True, False):
        options = dict(exact=exact, loader=dict(num_workers=2))
        train(tmp_path / f'whole_{exact}', **options)
        train(tmp_path / f'parts_{exact}', hooks=[StopAt(9)], **options)
        assert saved(tmp_path / f'parts_{exact}')['last'] == 8
        train(tmp_path / f'parts_{exact}', resume=True, **options)
        same = saved(tmp_path / f'parts_{exact}') == saved(tmp_path / f'whole_{exact}')
        assert same == exact


def test_workers_draw_other_numbers_in_each_epoch(tmp_path):
    """MMEngine seeds them alike in every epoch, so that augmentations would repeat."""
    seen, hook = [], Hook()
    hook.before_train_iter = lambda _, **given: seen.append(given['data_batch']['inputs'])
    loader = dict(num_workers=1, sampler=dict(type='DefaultSampler', shuffle=False))
    train(tmp_path, hooks=[hook], loader=loader)
    epochs = torch.stack(seen).unflatten(0, (EPOCHS, -1))
    assert not torch.equal(epochs[0], epochs[1])


def test_iterations_and_seeds_draw_other_numbers(tmp_path):
    """Iterations of runs with neighboring seeds do not share numbers either."""
    runner = train(tmp_path, hooks=[StopAt(0)])
    draws = []
    for runner._seed in (3, 4):
        for runner.train_loop._iter in (5, 6):
            runner.call_hook('before_train_iter', batch_idx=0)
            draws.append(torch.rand(()).item())
    assert len(set(draws)) == 4


@pytest.mark.parametrize(
    ('options', 'words'),
    [
        (dict(by_epoch=False, loader=dict(num_workers=0)), 'Set train_dataloader.num_workers'),
        (dict(randomness=dict(seed=None)), 'Set randomness.seed'),
        (dict(loader=dict(num_workers=1, persistent_workers=True)), 'persistent_workers=False'),
        (dict(by_epoch=False, loader=dict(num_workers=1, persistent_workers=True)), None),
        (dict(), None),
    ],
)
def test_warns_where_it_cannot_be_exact(tmp_path, monkeypatch, options, words):
    found = []
    monkeypatch.setattr(f'{HOOK}.print_log', lambda text, **_: found.append(text))
    train(tmp_path, hooks=[StopAt(0)], **options)
    assert len(found) == bool(words) and all(words in text for text in found)


def rename(checkpoint):
    checkpoint['state_dict']['layer.0.other'] = checkpoint['state_dict'].pop('layer.0.weight')


def reshape(checkpoint):  # as of a head with another number of classes
    checkpoint['state_dict']['layer.3.bias'] = torch.zeros(2)


def unwrap(checkpoint):
    for key in [*checkpoint['state_dict']]:
        checkpoint['state_dict'][f'module.{key}'] = checkpoint['state_dict'].pop(key)


@pytest.mark.parametrize(
    ('change', 'words'),
    [
        (rename, r'1 weights of the model .*: layer\.0\.weight'),
        (reshape, r'1 weights of the model .*: layer\.3\.bias'),
        (unwrap, None),
        (lambda checkpoint: checkpoint.pop('optimizer'), 'the state of the optimizer is missing'),
        (dict(optimizer=EMPTY_ADAM), 'the state of the optimizer is missing'),
        (dict(optimizer=dict(a=PLAIN_SGD, b=EMPTY_ADAM)), 'the state of the optimizer is missing'),
        (dict(param_schedulers=[]), 'it has 0 schedulers, the run has 1'),
        (dict(param_schedulers=[{}, {}]), 'it has 2 schedulers, the run has 1'),
    ],
)
def test_incomplete_resume_is_refused(tmp_path, change, words):
    train(tmp_path, hooks=[StopAt(5)])
    checkpoint = torch.load(tmp_path / 'epoch_1.pth', weights_only=True)
    checkpoint.update(change) if isinstance(change, dict) else change(checkpoint)
    torch.save(checkpoint, tmp_path / 'epoch_1.pth')
    refused = pytest.raises(CheckpointError, match=rf'epoch_1\.pth.*{words}.*load_from')
    with refused if words else nullcontext():
        train(tmp_path, resume=True, hooks=[StopAt(5)])


def test_another_schedule_is_a_warning(tmp_path, monkeypatch):
    """MMEngine keeps the checkpoint's, whose rate may have ended."""
    found = []
    monkeypatch.setattr(f'{HOOK}.print_log', lambda text, **_: found.append(text))
    for t_max in (EPOCHS, 9):
        schedule = dict(type='CosineAnnealingLR', T_max=t_max)
        train(tmp_path, resume=t_max == 9, hooks=[StopAt(5)], param_scheduler=schedule)
    assert len(found) == 1 and f'end at [{EPOCHS}], are kept' in found[0] and '[9]' in found[0]


def test_optimizers_without_state_resume(tmp_path):
    options = dict(optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.01)))
    train(tmp_path, hooks=[StopAt(5)], **options)
    assert train(tmp_path, resume=True, **options).epoch == EPOCHS


@pytest.mark.parametrize('evaluate', ['val', 'test'])
def test_a_config_of_a_resumed_run_evaluates(tmp_path, evaluate):
    """``resume=True`` with a best checkpoint, which has neither optimizer nor schedulers."""
    train(tmp_path, hooks=[StopAt(5)])
    best = tmp_path / 'best_acc_epoch_1.pth'
    assert 'optimizer' not in torch.load(best, weights_only=True)
    runner = build(tmp_path, resume=True, load_from=str(best))
    getattr(runner, evaluate)()
    assert runner._has_loaded
