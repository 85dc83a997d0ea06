"""The two tools that rewrite checkpoints: conversion both ways, and fusing whole models."""

import sys

import pytest
import torch
from helpers import (
    ROOT,
    THIN,
    assert_equal,
    published_state,
    random_backbone,
    run,
    thin_backbone,
    warned,
)
from mmengine.registry import MODELS, init_default_scope
from toy_configs import toy_config

from mmcare.convert import convert_checkpoint, fuse_checkpoint
from mmcare.models import CARE
from mmcare.models.loading import check_state_dict
from mmcare.weights.reading import CheckpointError, read_checkpoint, runs_of

RUNS = [dict(iteration=3)]


@pytest.fixture(autouse=True)
def thin_arch(monkeypatch):
    """Conversion knows published archs only; here there is a small one."""
    monkeypatch.setitem(CARE.arch_zoo, 'thin', THIN)


@pytest.fixture
def published(tmp_path):
    torch.manual_seed(1)
    state = published_state(random_backbone())
    torch.save(dict(state_dict=state, meta=dict(mmcare_runs=RUNS)), tmp_path / 'published.pth.tar')
    return tmp_path / 'published.pth.tar'


@pytest.mark.parametrize('ending', ['.pth', '.safetensors'])
def test_both_ways(published, tmp_path, monkeypatch, ending):
    there, back = tmp_path / f'ours{ending}', tmp_path / f'published{ending}'
    monkeypatch.setenv('HOME', str(tmp_path))
    text = convert_checkpoint(f'~/{published.name}', there)
    assert "checkpoint of an MM classifier: CARE('thin')" in text
    assert "in the published format: CARE('thin')" in convert_checkpoint(there, back)
    first, second = (read_checkpoint(file)['state_dict'] for file in (published, back))
    assert_equal(second, first)
    if ending == '.pth':  # the other format holds no records
        assert runs_of(read_checkpoint(there)) == runs_of(read_checkpoint(back)) == RUNS


def test_norms_that_published_files_lack(tmp_path, logged):
    """They are not dropped from a file, and a network without them says so."""
    trained = CARE('thin', from_scratch=True)
    torch.save(trained.state_dict(), tmp_path / 'trained.pth')
    with pytest.raises(CheckpointError, match='norms on output maps'):
        convert_checkpoint(tmp_path / 'trained.pth', tmp_path / 'published.pth')
    check_state_dict(CARE('thin'), trained.state_dict(), '', 'trained.pth')
    assert len(warned(logged, 'its maps differ')) == 1


def test_tools_say_what_is_wrong_in_one_line(tmp_path):
    for tool, arguments in (
        ('convert_checkpoint.py', ['missing.pth', tmp_path / 'out.pth']),
        ('reparameterize_model.py', ['missing.py', 'missing.pth', '/proc/out.pth']),
    ):
        done = run(sys.executable, ROOT / 'tools' / tool, *arguments, check=False)
        assert done.returncode == 2 and done.stderr.startswith('error: ')
        assert 'Traceback' not in done.stderr
    assert not list(tmp_path.iterdir())


def test_fuse_a_whole_model(tmp_path, monkeypatch):
    file, trained, fused = (tmp_path / name for name in ('config.py', 'trained.pth', 'fused.pth'))
    config = toy_config('segmentation', tmp_path, tmp_path / 'run')
    config.dump(file)
    pytest.importorskip('mmseg')
    init_default_scope('mmseg')
    model = MODELS.build(config.model).eval()
    model.backbone.load_state_dict(thin_backbone().state_dict())
    state = model.state_dict()
    wrapped = {f'module.{key}': value for key, value in state.items()}
    torch.save(dict(meta=dict(epoch=3), state_dict=wrapped), trained)
    said = fuse_checkpoint(file, trained, fused)
    assert '--cfg-options model.backbone.deploy=True' in said
    written = read_checkpoint(fused)
    assert written['meta']['epoch'] == 3 and written['meta']['fused_from'] == 'trained.pth'
    config.model.backbone.deploy = True
    other = MODELS.build(config.model).eval()
    other.load_state_dict(written['state_dict'])
    image = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        expected, found = model(image), other(image)
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()

    monkeypatch.setattr(CARE, 'switch_to_deploy', lambda self: self.stem.norm.reset_parameters())
    with pytest.raises(RuntimeError, match='changes outputs of backbone'):
        fuse_checkpoint(file, trained, tmp_path / 'out.pth')
    state['backbone.stem.norm.running_var'].fill_(float('nan'))
    torch.save(dict(state_dict=state), trained)
    with pytest.raises(CheckpointError, match='not finite'):
        fuse_checkpoint(file, trained, tmp_path / 'out.pth')
    state['backbone.stem.norm.running_var'].fill_(1)
    torch.save(dict(state_dict={**state, 'head\x1b': torch.ones(1)}), trained)
    with pytest.raises(CheckpointError, match=r'(?s)trained.pth does not fit.*head\\x1b'):
        fuse_checkpoint(file, trained, tmp_path / 'out.pth')
    assert not (tmp_path / 'out.pth').exists()
    with pytest.raises(ValueError, match='would replace its own source'):
        fuse_checkpoint(file, trained, trained)
    with pytest.raises(ValueError, match='would replace its own source'):
        convert_checkpoint(trained, f'{tmp_path}/../{tmp_path.name}/trained.pth')
