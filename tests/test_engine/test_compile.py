"""Compiled training: the same weights under the same names, from and to runs without it."""

from argparse import Namespace

import pytest
import torch
from helpers import Images, newer
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from toy_training import StopAt, train

from mmcare.engine import CompileHook

HOOK = dict(type='mmcare.CompileHook', backend='aot_eager', fullgraph=True)


def is_compiled(model):
    return model.backbone._compiled_call_impl is not None


@newer
@pytest.mark.parametrize('resumed', [[HOOK], []], ids=['with', 'without'])
def test_compiled_training_agrees_and_resumes(tmp_path, resumed):
    """The other way round than it began."""
    begun = [] if resumed else [HOOK]
    whole = train(tmp_path / 'whole', model=Images(), hooks=[]).model
    train(tmp_path / 'parts', model=Images(), hooks=[*begun, StopAt(9)])
    model = train(tmp_path / 'parts', model=Images(), hooks=resumed, resume=True).model
    torch._dynamo.reset()
    expected = whole.state_dict()
    assert list(model.state_dict()) == list(expected)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-4)
    assert is_compiled(model) is bool(resumed)


@newer
def test_validation_is_not_compiled():
    hook, model = CompileHook(), Images()
    hook.before_train(Namespace(model=torch.nn.ModuleDict(dict(module=model))))  # as in DDP
    assert is_compiled(model)
    hook.before_val(None)
    assert not is_compiled(model)
    hook.after_val(None)
    assert is_compiled(model)


def test_it_can_be_switched_off():
    assert type(HOOKS.build(dict(HOOK, enabled=False))) is Hook
