"""Compiled and channels-last training: the same results, from and to runs without it."""

from argparse import Namespace

import pytest
import torch
from helpers import IS_NEW, Images, newer
from mmengine.registry import HOOKS
from toy_training import StopAt, train

from mmcare.engine import ChannelsLastHook, CompileHook

COMPILE = dict(type='mmcare.CompileHook', backend='aot_eager', fullgraph=True)
LAST = dict(type='mmcare.ChannelsLastHook')


def run(work_dir, hooks, **arguments):
    """Train with a fused optimizer, which would mix up layouts; CPUs have one in new versions."""
    optimizer = dict(type='SGD', lr=1e-3, momentum=0.9, **(dict(fused=True) if IS_NEW else {}))
    options = dict(model=Images(), hooks=hooks, optim_wrapper=dict(optimizer=optimizer))
    return train(work_dir, **options, **arguments).model


def is_compiled(model):
    return model.backbone._compiled_call_impl is not None


def is_last(model):
    return all(out.is_contiguous(memory_format=torch.channels_last) for out in model.maps)


@pytest.mark.parametrize('resumed', [True, False], ids=['with', 'without'])
@pytest.mark.parametrize(
    ('hook', 'is_on'), [pytest.param(COMPILE, is_compiled, marks=newer), (LAST, is_last)]
)
def test_training_agrees_and_resumes(tmp_path, hook, is_on, resumed):
    """The other way round than it began."""
    expected = run(tmp_path / 'whole', []).state_dict()
    run(tmp_path / 'parts', [*[hook] * (not resumed), StopAt(9)])
    model = run(tmp_path / 'parts', [hook] * resumed, resume=True)
    torch._dynamo.reset()
    torch.testing.assert_close(model.state_dict(), expected, rtol=1e-3, atol=1e-4)
    assert is_on(model) is resumed


@newer
def test_validation_and_test_are_not_compiled():
    hook, model = CompileHook(), Images()
    hook.before_train(Namespace(model=torch.nn.ModuleDict(dict(module=model))))  # as in DDP
    assert is_compiled(model)
    hook.before_val(None)
    assert not is_compiled(model)
    hook.after_val(None)
    assert is_compiled(model)
    hook.before_test(None)
    assert not is_compiled(model)


def test_compilation_can_be_switched_off():
    model = Images()
    HOOKS.build(dict(COMPILE, enabled=False)).before_train(Namespace(model=model))
    assert not hasattr(model.backbone, '_compiled_call_impl') or not is_compiled(model)


def test_roi_extractors_get_contiguous_maps():
    """mmcv's RoIAlign reads other maps as if they were contiguous."""
    SingleRoIExtractor = pytest.importorskip('mmdet.models').SingleRoIExtractor
    extractor = SingleRoIExtractor(dict(type='RoIAlign', output_size=7), 8, [4])
    maps, rois = torch.rand(1, 8, 16, 16), torch.tensor([[0, 4.0, 8.0, 40.0, 60.0]])
    expected = extractor((maps,), rois)
    ChannelsLastHook().before_train(Namespace(model=extractor))
    found = extractor((maps.to(memory_format=torch.channels_last),), rois)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize('name', ['ConvAWS2d', 'ConvWS2d'])
def test_standardized_weights_keep_their_layout(name):
    """mmcv takes views of them, which channels-last does not have."""
    model = torch.nn.Sequential(getattr(pytest.importorskip('mmcv.cnn'), name)(2, 4, 3))
    ChannelsLastHook().before_val(Namespace(model=model))
    assert model(torch.rand(1, 2, 8, 8)).shape == (1, 4, 6, 6)


class DeformConv2d(torch.nn.Conv2d):
    """The name of mmcv's, which misreads other layouts."""


class OwnDeformConv(DeformConv2d):
    """As mmcv's DeformConv2dPack."""


@pytest.mark.parametrize('kind', [DeformConv2d, OwnDeformConv])
def test_models_that_misread_the_layout_keep_theirs(kind, logged):
    """Also the optimizer's state, and with one line in the log for all validations."""
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3), kind(4, 4, 3))
    hook, runner = ChannelsLastHook(), Namespace(model=model)
    checkpoint = dict(optimizer=dict(state={0: torch.rand(4, 2, 3, 3)}))
    hook.after_load_checkpoint(runner, checkpoint)
    hook.before_train(runner)
    hook.before_val(runner)
    assert all(value.is_contiguous() for value in model.parameters())
    assert checkpoint['optimizer']['state'][0].is_contiguous()
    assert len(logged) == 1 and f'1 ({kind.__name__})' in logged[0][1]
