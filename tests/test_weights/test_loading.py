"""Weights load whole or raise, by every way that MM toolboxes have."""

import argparse
import logging
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import (
    KEYS,
    THIN,
    Images,
    assert_equal,
    published_state,
    published_weights,
    random_backbone,
    thin_backbone,
)
from mmengine.model import PretrainedInit
from mmengine.runner import Runner

from mmcare.engine import SafeLoadingHook
from mmcare.models import CARE, CAREAblation
from mmcare.models.loading import read_state_dict
from mmcare.weights.names import from_published, to_classifier_keys, to_published
from mmcare.weights.reading import CheckpointError, write_checkpoint


def load_in_a_run(model, file):
    log = logging.getLogger()
    runner = SimpleNamespace(model=model, hooks=[], _load_from=str(file), logger=log)
    hook = SafeLoadingHook()
    runner.call_hook = lambda name, checkpoint: getattr(hook, name)(runner, checkpoint)
    runner.load_or_resume = lambda: Runner.load_checkpoint(runner, str(file))
    hook.before_run(runner)
    runner.load_or_resume()


@pytest.fixture(scope='module')
def source():
    torch.manual_seed(1)
    return random_backbone()


@pytest.fixture(scope='module')
def files(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp('checkpoints')
    published = published_state(source)
    args = argparse.Namespace(model='CARE_S0', lr=2e-3, amp=True)
    training = dict(epoch=299, arch='CARE_S0', args=args, metric=np.float64(78.4))
    ema = {key: value + 1 for key, value in published.items()}
    wrapped = {f'module.{key}': value for key, value in published.items()}
    converted = to_classifier_keys(published)
    model = Images()
    model.backbone.load_state_dict(source.state_dict())
    save = {
        'published.pth.tar': dict(training, state_dict=published),
        'published_alone.pth': published,
        'published_with_ema.pth.tar': dict(training, state_dict=ema, state_dict_ema=published),
        'published_without_ema.pth.tar': dict(training, state_dict=published, state_dict_ema=None),
        'wrapped.pth': wrapped,
        'converted.pth': dict(meta={}, state_dict=converted),
        'trained.pth': dict(meta=dict(epoch=1), state_dict=model.state_dict()),
    }
    for name, content in save.items():
        torch.save(content, folder / name)
    torch.save(save['converted.pth'], folder / 'old.pth', _use_new_zipfile_serialization=False)
    write_checkpoint(dict(meta={}, state_dict=published), folder / 'published.safetensors')
    write_checkpoint(dict(meta={}, state_dict=converted), folder / 'converted.safetensors')
    shutil.copy2(folder / 'converted.safetensors', folder / 'without_suffix')
    return folder


NAMES = [
    *('published.pth.tar', 'published_alone.pth', 'published_with_ema.pth.tar', 'wrapped.pth'),
    *('converted.pth', 'old.pth', 'trained.pth', 'published.safetensors', 'converted.safetensors'),
    *('without_suffix', 'published_without_ema.pth.tar'),  # as in caches
]


@pytest.mark.parametrize('name', NAMES)
def test_every_kind_of_file(files, source, name):
    """By init_cfg, on MMEngine's own loaders, and in a run with the hook."""
    for extra in ({}, dict(prefix='backbone'), dict(prefix='backbone.')):
        init_cfg = dict(type='Pretrained', checkpoint=str(files / name), **extra)
        backbone, model = CARE(THIN, init_cfg=init_cfg), Images(init_cfg=init_cfg)
        backbone.init_weights()
        model.init_weights()
        assert_equal(backbone.state_dict(), source.state_dict())
        assert_equal(model.backbone.state_dict(), source.state_dict())
    model = Images()
    load_in_a_run(model, files / name)
    assert_equal(model.backbone.state_dict(), source.state_dict())


@pytest.mark.parametrize(
    'kind',
    [
        *(PretrainedInit, 'mmengine.model.PretrainedInit'),  # as dumped pure-Python configs have it
        *('mmengine.model.weight_init.PretrainedInit', 'mmengine.Pretrained'),
    ],
)
def test_every_name_of_init_cfg(files, source, kind, tmp_path):
    """MMEngine would load these with ``strict=False``, and published names not at all."""
    init_cfg = dict(type=kind, checkpoint=str(files / 'published.pth.tar'))
    for cfg in (init_cfg, [dict(type='Constant', layer='Conv2d', val=1.0), init_cfg]):
        backbone = CARE(THIN, init_cfg=cfg)
        backbone.init_weights()
        assert_equal(backbone.state_dict(), source.state_dict())
    torch.save({'stem.conv.bias': torch.ones(16)}, tmp_path / 'part.pth')
    with pytest.raises(CheckpointError, match='missing'):
        CARE(THIN, init_cfg=dict(init_cfg, checkpoint=str(tmp_path / 'part.pth'))).init_weights()


@pytest.mark.parametrize('channels', [1, 2, 4, 5, 6])
def test_rgb_weights_for_other_channels(files, source, channels, logged, tmp_path):
    """Summed for gray images; else repeated, and scaled so that sums over channels stay."""
    rgb = source.stem.conv.weight
    expected = sum(rgb[:, i] for i in range(3))[:, None]
    if channels > 1:
        expected = torch.stack([rgb[:, i % 3] * 3 / channels for i in range(channels)], 1)
    file = files / 'published.pth.tar'
    init_cfg = dict(type='Pretrained', checkpoint=str(file))
    by_init_cfg = Images(in_channels=channels, init_cfg=init_cfg)
    by_init_cfg.init_weights()
    by_load_from = Images(in_channels=channels)
    load_in_a_run(by_load_from, file)
    for model in (by_init_cfg, by_load_from):
        state = model.backbone.state_dict()
        torch.testing.assert_close(state.pop('stem.conv.weight'), expected)
        assert_equal(state, {k: v for k, v in source.state_dict().items() if k in state})
    assert sum(f'in_channels={channels}' in text for _, text in logged) == 2
    torch.save(by_init_cfg.state_dict(), tmp_path / 'other.pth')
    words = rf'of another shape: .*stem.conv.weight[\s\S]*for {channels} channels.*in_channels=3'
    assert_refused(tmp_path / 'other.pth', words, arch=THIN)


@pytest.fixture
def teacher(source, tmp_path):
    """The ``init_cfg`` for a file of a student and a teacher, as DDP saves it."""
    both = {'student.backbone': random_backbone(), 'teacher.backbone': source}
    state = {f'module.{k}.{n}': v for k, part in both.items() for n, v in part.state_dict().items()}
    torch.save(dict(state_dict=state), tmp_path / 'both.pth')
    return dict(type='Pretrained', checkpoint=str(tmp_path / 'both.pth'))


@pytest.mark.parametrize('prefix', ['teacher.backbone', 'module.teacher.backbone.'])
def test_prefix_selects_a_part(source, teacher, prefix):
    backbone = CARE(THIN, init_cfg=(dict(teacher, prefix=prefix),))  # a tuple, too
    backbone.init_weights()
    assert_equal(backbone.state_dict(), source.state_dict())


@pytest.mark.parametrize('wrong', [dict(prefix='techer.backbone'), dict(prefix='backbone'), {}])
def test_a_wrong_prefix_names_those_of_the_file(teacher, wrong):
    with pytest.raises(CheckpointError) as error:
        CARE(THIN, init_cfg=dict(teacher, **wrong)).init_weights()
    given = wrong.get('prefix', '') and f'{wrong["prefix"]}.'
    for prefix in (given, 'student.backbone.', 'teacher.backbone.'):
        assert f'prefix {prefix!r}' in str(error.value)


@pytest.mark.parametrize('unknown', [dict(prefx='teacher.backbone'), dict(revise_keys=[])])
def test_unknown_arguments_of_init_cfg(teacher, unknown):
    with pytest.raises(TypeError, match=next(iter(unknown))):
        CARE(THIN, init_cfg=dict(teacher, **unknown)).init_weights()


@pytest.mark.parametrize('variant', ['s0', 's1', 's2'])
def test_names_are_those_of_the_published_files(variant):
    """The stored list of keys: parameter names never change between versions."""
    ours = from_published(published_weights(variant))
    with torch.device('meta'):
        backbone = CARE(variant).state_dict()
    heads = {key for key in ours if key.startswith('head.')}
    assert {k: v.shape for k, v in ours.items() if k not in heads} == {
        k: v.shape for k, v in backbone.items()
    }
    names = ('norm.weight', 'norm.bias', 'fc.weight', 'fc.bias')
    assert heads == {f'head.{h}.{n}' for h in ('cls_head', 'distill_head') for n in names}
    assert list(to_published(ours)) == list(KEYS[variant])


def ways_to_read(file, **arguments):
    init_cfg = dict(type='Pretrained', checkpoint=str(file))
    yield CARE(**arguments, init_cfg=init_cfg).init_weights
    yield CARE(**arguments, init_cfg=[dict(init_cfg, prefix='backbone')]).init_weights
    yield lambda: load_in_a_run(Images(**arguments), file)


def assert_refused(file, words, **arguments):
    for read in ways_to_read(file, **arguments):
        with pytest.raises(CheckpointError, match=rf'{file.name}[\s\S]*{words}'):
            read()


@pytest.mark.parametrize(
    ('given', 'wanted', 'words'),
    [
        (dict(arch='s1'), dict(arch='s0'), r"not in the model: [\s\S]*stages\.0\.[\s\S]*arch='s1'"),
        (dict(arch='s0'), dict(arch='s2'), r"missing: .* and \d+ more[\s\S]*arch='s0'"),
        (dict(), dict(expand_last=False), r'missing: .*stages\.3\.blocks\.0\.gamma'),
        (dict(expand_last=False), dict(), r'not in the model: .*stages\.3\.blocks\.0\.gamma'),
        (dict(out_indices=(0, 1)), dict(), r'missing: .*stages\.2\.'),
        (dict(kind=CAREAblation, memory=False), dict(), 'of another shape: .*stem'),
        (dict(), dict(norm_cfg=dict(type='GN', num_groups=4)), 'norm_cfg=.*GN.* of batch norms'),
    ],
    ids=str,
)
def test_wrong_variant(given, wanted, words, tmp_path):
    backbone = random_backbone(**given)
    for state in (to_published(backbone.state_dict()), to_classifier_keys(backbone.state_dict())):
        torch.save(dict(state_dict=state), tmp_path / 'wrong.pth')
        assert_refused(tmp_path / 'wrong.pth', words, **{'arch': THIN, **wanted})


@pytest.mark.parametrize(
    ('value', 'words'),
    [
        (torch.full((16, 3, 4, 4), float('nan')), 'not finite'),
        (torch.full((16, 3, 4, 4), 1e300, dtype=torch.float64), 'not finite'),  # once converted
        (torch.ones(16, 3, 4, 4, dtype=torch.int64), 'of another data type'),
        (torch.ones(16, 3, 4, 4).to_sparse(), 'not a dense tensor'),
        (torch.ones(16, 3, 4, 4, device='meta'), 'not a dense tensor'),
        ([1.0], 'not a dense tensor with values: .*stem.conv.weight'),
        (np.ones((16, 3, 4, 4)), 'not a dense tensor'),
        (np.array([None]), 'missing'),
    ],
    ids=['nan', 'too large', 'integers', 'sparse', 'meta', 'list', 'numpy', 'objects'],
)
def test_values_that_cannot_be_weights(source, value, words, tmp_path):
    state = {**to_classifier_keys(source.state_dict()), 'backbone.stem.conv.weight': value}
    torch.save(state, tmp_path / 'file.pth')
    assert_refused(tmp_path / 'file.pth', words, arch=THIN)


def test_fused_and_plain(tmp_path):
    fused = thin_backbone()
    torch.save(to_classifier_keys(fused.state_dict()), tmp_path / 'plain.pth')
    fused.switch_to_deploy()
    torch.save(to_classifier_keys(fused.state_dict()), tmp_path / 'fused.pth')
    assert_refused(tmp_path / 'fused.pth', 'weights are fused .* with deploy=True', arch=THIN)
    assert_refused(tmp_path / 'plain.pth', 'not: fuse them first', arch=THIN, deploy=True)
    backbone = CARE(THIN, deploy=True)
    backbone.load_state_dict(read_state_dict(backbone, tmp_path / 'fused.pth'))
    assert_equal(backbone.state_dict(), fused.state_dict())


def test_what_may_be_missing_or_left_over(source, tmp_path):
    """Output norms, stages that are not built, heads, and counters of batches."""
    state = published_state(source)
    torch.save({k: v for k, v in state.items() if 'num_batches' not in k}, tmp_path / 'file.pth')
    for arguments in (
        dict(out_norm_cfg=dict(type='BN')),
        dict(out_indices=(0, 1), out_norm_cfg=dict(type='LN')),
        dict(),
    ):
        for read in ways_to_read(tmp_path / 'file.pth', arch=THIN, **arguments):
            read()
    torch.save(CARE(THIN, out_norm_cfg=dict(type='LN')).state_dict(), tmp_path / 'norms.pth')
    CARE(THIN).load_state_dict(read_state_dict(CARE(THIN), tmp_path / 'norms.pth'))


def test_missing_pretrained_file():
    """The configs as they are shipped, before anybody has put weights there."""
    init_cfg = dict(type='Pretrained', checkpoint='checkpoints/care_s1_in1k.pth')
    with pytest.raises(FileNotFoundError) as error:
        Images(init_cfg=init_cfg).init_weights()
    for words in ('checkpoints/care_s1_in1k.pth', 'convert_checkpoint.py', 'init_cfg=None'):
        assert words in str(error.value)


NESTED = (
    *('detector.backbone.', 'student.backbone.', 'teacher.backbone.', 'image_encoder.0.'),
    *('backbone.context_path.backbone.', 'wrapped_model.backbone.'),
)


@pytest.mark.parametrize('prefix', NESTED)
def test_nested_models_name_their_prefixes(tmp_path, prefix):
    """As of QDTrack, SoftTeacher, retrieval, BiSeNet and mmocr's wrapper."""
    state, file = thin_backbone().state_dict(), tmp_path / 'file.pth'
    nested = {f'{prefix}{key}': value for key, value in state.items()}
    torch.save({**nested, 'backbone.neck.stem.conv.weight': torch.ones(1)}, file)
    with pytest.raises(CheckpointError) as error:
        read_state_dict(CARE(THIN), file)
    lines = [line for line in str(error.value).splitlines() if 'the weights of a CARE' in line]
    assert lines == [f'  It has the weights of a CARE with the prefix {prefix!r}.']
    read = read_state_dict(CARE(THIN), file, prefix)
    assert all(torch.equal(read[key], state[key]) for key in state)
