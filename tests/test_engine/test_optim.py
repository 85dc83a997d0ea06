"""Few parameter groups: the same weights, the same resumes, and no parameter is forgotten."""

import re
from argparse import Namespace
from copy import deepcopy

import pytest
import torch
from helpers import Images, assert_equal, thin_backbone
from mmengine.config import ConfigDict
from mmengine.hooks import Hook
from mmengine.logging import MMLogger
from mmengine.model import BaseModel
from mmengine.optim import (
    DefaultOptimWrapperConstructor,
    OptimWrapper,
    OptimWrapperDict,
    build_optim_wrapper,
)
from toy_training import StopAt, train

from mmcare.compatibility import fuses_adam
from mmcare.engine import OptimizerCheckHook
from mmcare.engine.optim import fit_groups
from mmcare.weights.reading import CheckpointError

DEFAULT, OURS = 'DefaultOptimWrapperConstructor', 'mmcare.MergedGroupsConstructor'
ADAMW = dict(type='AdamW', lr=1e-3, weight_decay=0.05)
UNFUSED = dict(ADAMW, fused=False)
SGD = dict(type='SGD', lr=1e-2, momentum=0.9, weight_decay=1e-3)
PARAMWISE = dict(norm_decay_mult=0.0, custom_keys=dict(gamma=dict(lr_mult=3.0, decay_mult=0.0)))
KEYS = {
    'gamma': dict(decay_mult=0.0),
    'stages.1': dict(lr_mult=0.1),
    'head': dict(lr_mult=2.0, eps=0.1),
}
OTHER = dict(norm_decay_mult=0.5)
CASES = dict(
    norms=dict(paramwise_cfg=PARAMWISE),
    keys=dict(paramwise_cfg=dict(custom_keys=KEYS, bias_lr_mult=2.0)),
    duplicates=dict(paramwise_cfg=dict(bypass_duplicate=True, flat_decay_mult=0.0)),
    nothing=dict(),
    accumulated=dict(paramwise_cfg=PARAMWISE, accumulative_counts=3),
    clipped=dict(paramwise_cfg=PARAMWISE, clip_grad=dict(max_norm=1e-3)),
)


def config_of(constructor, optimizer=ADAMW, **options):
    return ConfigDict(constructor=constructor, optimizer=dict(optimizer), **options)


class Small(BaseModel):
    """The first two stages of a thin CARE, on images made of the samples of toy_training.py."""

    def __init__(self, **arguments):
        super().__init__()
        self.backbone = thin_backbone(out_indices=(1,), **arguments)
        self.head = torch.nn.Linear(16, 1)

    def forward(self, inputs, mode='tensor'):
        (features,) = self.backbone(inputs.sin()[:, :3, None, None].expand(-1, -1, 16, 16))
        return dict(loss=(self.head(features.mean((2, 3))) - inputs.mean()).square().mean())


class Twice(Small):
    """One layer has two names, as in RTMDet's heads."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.again = self.head


def train_steps(model, wrapper):
    """Train ten steps, also of each optimizer of several."""
    parts = [*wrapper.values()] if isinstance(wrapper, OptimWrapperDict) else [wrapper]
    model.train()
    for part in parts:
        part.initialize_count_status(model, 0, 10)
    torch.manual_seed(0)
    for _ in range(10):
        for part in parts:
            part.update_params(model(torch.rand(2, 4))['loss'])
    return model.state_dict()


@pytest.mark.parametrize('optimizer', [UNFUSED, SGD], ids=lambda each: each['type'])
@pytest.mark.parametrize('case', CASES)
def test_ten_steps_are_the_same(case, optimizer):
    states, groups = [], []
    for constructor in (DEFAULT, OURS):
        torch.manual_seed(0)
        model = (Twice if case == 'duplicates' else Small)(
            frozen_stages=1 if case == 'keys' else -1
        )
        wrapper = build_optim_wrapper(model, config_of(constructor, optimizer, **CASES[case]))
        states.append(train_steps(model, wrapper))
        groups.append(len(wrapper.optimizer.param_groups))
    # A clipped norm is a sum in the order of the groups.
    if case == 'clipped':
        torch.testing.assert_close(*states, rtol=1e-3, atol=1e-5)
    else:
        assert_equal(*states)
    assert groups[1] <= 5 and (case == 'nothing' or groups[0] > 20)


def test_ten_steps_of_several_optimizers():
    states = []
    for constructor in (DEFAULT, OURS):
        torch.manual_seed(0)
        model = Small()
        config = config_of(constructor, UNFUSED, paramwise_cfg=PARAMWISE)
        parts = {
            name: build_optim_wrapper(getattr(model, name), config) for name in ('backbone', 'head')
        }
        states.append(train_steps(model, OptimWrapperDict(**parts)))
    assert_equal(*states)


def test_ten_fused_steps_are_the_same():
    """Up to rounding, with the same gradients."""
    states = []
    for constructor in (DEFAULT, OURS):
        torch.manual_seed(0)
        model = Small()
        wrapper = build_optim_wrapper(model, config_of(constructor, paramwise_cfg=PARAMWISE))
        for _ in range(10):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            wrapper.step()
        states.append(model.state_dict())
    torch.testing.assert_close(*states)


@pytest.mark.parametrize(
    ('options', 'expected'),
    [
        (dict(), fuses_adam('cpu')),
        (dict(fused=False), False),
        (dict(foreach=True), None),
        (dict(type='SGD'), None),  # a fused one fails where gradients are missing at first
    ],
)
def test_only_adam_is_fused(options, expected):
    wrapper = build_optim_wrapper(Images(), config_of(OURS, dict(ADAMW, **options)))
    assert (wrapper.optimizer.param_groups[0].get('fused') or None) == (expected or None)


def test_log_has_a_line_for_each_group(capsys):
    MMLogger.get_instance('test_log_of_groups')
    model = Images(frozen_stages=1)
    wrapper = build_optim_wrapper(model, config_of(OURS, paramwise_cfg=PARAMWISE))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and '3 groups of parameters' in lines[0] and ' frozen' in lines[0]
    assert 'gamma' in lines[3] and 'lr=0.003, weight_decay=0' in lines[3]
    numbers = [len(group['params']) for group in wrapper.optimizer.param_groups]
    assert [int(line.split()[0]) for line in lines[1:]] == numbers


class Look(Hook):
    """Keep what the optimizer and the scheduler have for each parameter, before training."""

    def before_train(self, runner):
        wrapper, (scheduler,) = runner.optim_wrapper, runner.param_schedulers
        assert len(scheduler.base_values) == len(wrapper.param_groups)
        self.groups = wrapper.optimizer.param_groups
        self.found = {
            id(parameter): dict(
                deepcopy(wrapper.optimizer.state[parameter]), lr=group['lr'], base=base, last=last
            )
            for group, base, last in zip(self.groups, scheduler.base_values, scheduler._last_value)
            for parameter in group['params']
        }


def run(folder, constructor, *hooks, optimizer=ADAMW, paramwise_cfg=PARAMWISE, **options):
    config = config_of(constructor, optimizer, paramwise_cfg=paramwise_cfg)
    options.update(model=Small(), optim_wrapper=config, checkpoint=dict(save_best=None))
    return train(folder, hooks=hooks, **options)


def test_resume_with_fewer_groups(tmp_path):
    """From a checkpoint that has a group for each parameter, as those of mmcare 1.0.0."""
    options, look = dict(optimizer=UNFUSED), Look()
    whole = run(tmp_path / 'whole', DEFAULT, **options)
    run(tmp_path / 'parts', DEFAULT, StopAt(5), **options)
    saved = torch.load(tmp_path / 'parts/epoch_1.pth', weights_only=True)
    (schedule,) = saved['param_schedulers']
    resumed = run(tmp_path / 'parts', OURS, look, resume=True, **options)
    assert len(look.groups) == 3 and len(set(schedule['base_values'])) == 2
    for index, parameter in enumerate(resumed.model.parameters()):
        expected = dict(
            saved['optimizer']['state'][index],
            lr=saved['optimizer']['param_groups'][index]['lr'],
            base=schedule['base_values'][index],
            last=schedule['_last_value'][index],
        )
        assert_equal(look.found[id(parameter)], expected)
    assert_equal(resumed.model.state_dict(), whole.model.state_dict())


def test_resume_with_one_group(tmp_path):
    """MMEngine's wrapper then has no base rate, which schedulers take for a further group."""
    rate = dict(custom_keys=dict(backbone={}, head={}))
    run(tmp_path, DEFAULT, StopAt(5), paramwise_cfg=rate)
    look = Look()
    run(tmp_path, OURS, look, StopAt(4), paramwise_cfg=rate, resume=True)
    assert len(look.groups) == 1


@pytest.mark.parametrize(
    ('first', 'then', 'paramwise'), [(OURS, DEFAULT, PARAMWISE), (DEFAULT, OURS, OTHER)]
)
def test_resume_with_other_groups_is_refused(tmp_path, first, then, paramwise):
    """With another constructor, and where parameters of a group had different options."""
    run(tmp_path, first, StopAt(5))
    with pytest.raises(CheckpointError, match=r'groups of parameters, .*constructor'):
        run(tmp_path, then, paramwise_cfg=paramwise, resume=True)


def test_implementation_is_that_of_the_run(tmp_path):
    """PyTorch would take it from the checkpoint, whose device may be another."""
    run(tmp_path, OURS, StopAt(5), optimizer=dict(ADAMW, foreach=True))
    look = Look()
    run(tmp_path, OURS, look, StopAt(4), resume=True)
    assert {group['foreach'] for group in look.groups} == {None}
    assert {bool(group['fused']) for group in look.groups} == {fuses_adam('cpu')}


def test_several_optimizers_are_fitted():
    model, saved, wrappers = Small(), {}, {}
    for name in ('backbone', 'head'):
        parts = [
            build_optim_wrapper(
                getattr(model, name), config_of(constructor, paramwise_cfg=PARAMWISE)
            )
            for constructor in (DEFAULT, OURS)
        ]
        saved[name], wrappers[name] = parts[0].state_dict(), parts[1]
    count = len(saved['backbone']['param_groups'])
    schedules = dict(backbone=[dict(base_values=[*range(count + 1)])], head=[])
    checkpoint = dict(optimizer=saved, param_schedulers=schedules)
    runner = Namespace(model=model, optim_wrapper=OptimWrapperDict(**wrappers))
    assert fit_groups(checkpoint, runner) == ''
    assert len(saved['backbone']['param_groups']) == 3
    kept = schedules['backbone'][0]['base_values']
    assert len(kept) == 4 and kept[0] == 0 and kept[-1] == count


class LeavesOut(DefaultOptimWrapperConstructor):
    """As mmyolo's, which take parameters that are named weight or bias."""

    def __call__(self, model):
        named = [v for k, v in model.named_parameters() if k.endswith(('weight', 'bias'))]
        return OptimWrapper(torch.optim.SGD(named, lr=0.1))


class OneRate(DefaultOptimWrapperConstructor):
    """As mmpose's, which has rates for layers of vision transformers only."""

    def __call__(self, model):
        groups = [dict(params=[v], weight_decay=0.0) for v in model.parameters() if v.dim() == 1]
        groups += [dict(params=[v]) for v in model.parameters() if v.dim() > 1]
        return OptimWrapper(torch.optim.AdamW(groups, lr=self.base_lr, weight_decay=self.base_wd))


def check(model=None, constructor=OURS, kind=None, resume=False, **options):
    """Run the hook on a model, whose optimizer a config describes; ``kind``: a class builds it."""
    model, config = model or Images(), config_of(constructor, **options)
    wrapper = build_optim_wrapper(model, config)
    if kind:
        wrapper = kind(dict(optimizer=config.optimizer), config.get('paramwise_cfg'))(model)
    runner = Namespace(
        model=model,
        optim_wrapper=wrapper,
        cfg=ConfigDict(optim_wrapper=config),
        auto_scale_lr=None,
        _resume=resume,
    )
    OptimizerCheckHook().before_train(runner)
    return wrapper


def test_parameters_in_no_group_are_named(warned):
    check(kind=LeavesOut)
    (text,) = warned
    assert text.startswith('3 parameters require gradients, but are in no group')
    assert 'backbone.stages.0.blocks.0.gamma' in text and OURS in text


def test_frozen_parameters_are_not_named(warned):
    """Neither frozen stages, nor what a user freezes: the constructors leave both out."""
    model = Images(frozen_stages=2)
    model.neck.requires_grad_(False)
    check(model, paramwise_cfg=PARAMWISE)
    check(torch.nn.Linear(2, 2))  # a model without layer scales
    assert warned == []


def test_copies_of_parameters_are_not_compared(warned):
    """DeepSpeed's optimizers have them."""
    runner = Namespace(model=Images(), optim_wrapper=OptimWrapper(torch.optim.SGD(
        [torch.zeros(1, requires_grad=True)], lr=0.1)), cfg={})  # fmt: skip
    OptimizerCheckHook().before_train(runner)
    assert warned == []


LONGER = dict(PARAMWISE['custom_keys'], backbone=dict(lr_mult=0.1))
SHORTER = {
    'gamma': dict(lr_mult=0.3, decay_mult=0.0),
    '.norm': dict(lr_mult=0.1, decay_mult=0.0),
    'back': dict(lr_mult=0.1),
}


@pytest.mark.parametrize(
    ('paramwise', 'options', 'parts'),
    [
        (PARAMWISE, {}, []),
        (dict(norm_decay_mult=None, flat_decay_mult=None, bias_lr_mult=2.0), {}, []),
        (dict(norm_decay_mult=0.0, custom_keys=SHORTER), {}, []),  # the way out on the page
        (
            dict(norm_decay_mult=0.0, custom_keys=LONGER),
            {},
            ['norm_decay_mult', "custom_keys.gamma says.*'backbone' takes precedence"],
        ),
        (
            dict(flat_decay_mult=0.0, custom_keys=dict(backbone=dict(lr_mult=0.1))),
            {},
            ["flat_decay_mult says.*'backbone' takes precedence"],
        ),
        (PARAMWISE, dict(kind=OneRate), ['custom_keys.gamma says.* does not follow it']),
    ],
)
def test_options_of_layer_scales(warned, paramwise, options, parts):
    """What they end up with, if it is not what the config says."""
    check(paramwise_cfg=paramwise, **options)
    assert len(warned) == len(parts)
    for text, part in zip(warned, parts):
        assert re.search(part, text)
        assert re.search(r'train with lr=\S+, weight_decay=\S+, not as', text)
