"""Folded classifiers: the head, the checkpoint tool, and what they refuse."""

import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import load_checkpoint
from mmpretrain.structures import DataSample
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import mmcare.classification  # noqa: F401 (registers the head)
from mmcare.checkpoint import CheckpointError, read_checkpoint
from mmcare.classification import CAREClsHead
from mmcare.deploy import fold_networks, reparameterize_checkpoint

TOOL = Path(__file__).resolve().parents[2] / 'tools' / 'reparameterize_model.py'
CHANNELS, CLASSES = 48, 5
CONFIG = f"""
custom_imports = dict(imports=['mmcare.classification'])
default_scope = 'mmpretrain'
model = dict(
    type='ImageClassifier',
    backbone=dict(
        type='mmcare.CARE',
        arch=dict(
            depths=(1, 1, 1, 2),
            widths=(6, 6, 12, 9),
            memory_widths=(2, 2, 4, 3),
            expansions=((2, 2), (2, 2), (2, 2), (2, 4)),
            head_channels=(2, 2, 2, 3)),
        out_indices=(3,)),
    neck=dict(type='GlobalAveragePooling'),
    head=dict(type='mmcare.CAREClsHead', num_classes={CLASSES}, in_channels={CHANNELS}))
"""


def randomise(model):
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


@pytest.fixture
def project(tmp_path):
    """A config, its model and a checkpoint."""
    config = tmp_path / 'classifier.py'
    config.write_text(CONFIG)
    init_default_scope('mmpretrain')
    model = randomise(MODELS.build(Config.fromfile(config).model)).eval()
    meta = dict(dataset_meta=dict(classes=('a', 'b')), epoch=3)
    torch.save(dict(meta=meta, state_dict=model.state_dict()), tmp_path / 'trained.pth')
    return config, model, tmp_path / 'trained.pth'


def test_two_heads_become_one():
    init_default_scope('mmpretrain')
    head = randomise(CAREClsHead(CLASSES, CHANNELS)).eval()
    folded = deepcopy(head)
    folded.switch_to_deploy()
    folded.switch_to_deploy()
    features = (torch.randn(4, CHANNELS, 3, 2),)
    with torch.no_grad():
        torch.testing.assert_close(folded(features), head(features), rtol=1e-5, atol=1e-5)
    assert sum(p.numel() for p in folded.parameters()) == (CHANNELS + 1) * CLASSES
    with pytest.raises(RuntimeError, match=r'is folded.* has no losses'):
        folded.loss(features, [DataSample().set_gt_label(0) for _ in range(4)])
    with pytest.raises(RuntimeError, match='this CAREClsHead is folded'):
        folded.train()
    with pytest.raises(RuntimeError, match='in training mode'):
        CAREClsHead(CLASSES, CHANNELS).switch_to_deploy()

    other = CAREClsHead(CLASSES, CHANNELS, deploy=True)
    other.load_state_dict(folded.state_dict())
    with pytest.raises(CheckpointError, match=r'not: build it with deploy=True .*model\.head'):
        CAREClsHead(CLASSES, CHANNELS).load_state_dict(folded.state_dict(), strict=False)
    with pytest.raises(CheckpointError, match='the weights are not: fold them first'):
        other.load_state_dict(head.state_dict(), strict=False)


def test_checkpoint_of_a_whole_model(project, tmp_path):
    config, model, checkpoint = project
    out = tmp_path / 'new' / 'folded.pth'
    command = [sys.executable, TOOL, config, checkpoint, out]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    options = '--cfg-options model.backbone.deploy=True model.head.deploy=True'
    assert options in done.stdout
    assert [path.name for path in out.parent.iterdir()] == ['folded.pth']
    meta = read_checkpoint(out)['meta']
    assert meta['dataset_meta'] == dict(classes=('a', 'b')) and meta['epoch'] == 3
    assert meta['folded_from'] == 'trained.pth'

    cfg = Config.fromfile(config)
    cfg.merge_from_dict({'model.backbone.deploy': True, 'model.head.deploy': True})
    folded = MODELS.build(cfg.model).eval()
    load_checkpoint(folded, str(out), strict=True)
    image = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        expected = model(image)
        assert (folded(image) - expected).abs().max() < 1e-4 * expected.abs().max()
        scores = torch.stack([sample.pred_score for sample in folded.predict(image)])
    torch.testing.assert_close(scores, expected.softmax(1), rtol=1e-3, atol=1e-4)


def test_what_the_tool_refuses(project, tmp_path):
    config, model, checkpoint = project
    out = tmp_path / 'folded.pth'
    (tmp_path / 'file').write_text('')
    with pytest.raises(NotADirectoryError, match='give another place'):
        reparameterize_checkpoint(config, checkpoint, tmp_path / 'file' / 'folded.pth')
    with pytest.raises(FileNotFoundError, match='give the config'):
        reparameterize_checkpoint(tmp_path / 'no.py', checkpoint, out)
    state = model.state_dict()
    del state['head.cls_head.fc.bias']
    torch.save(dict(state_dict=state), tmp_path / 'part.pth')
    with pytest.raises(
        CheckpointError, match=r'does not fill the model .*\n?.*classification heads'
    ):
        reparameterize_checkpoint(config, tmp_path / 'part.pth', out)
    state = model.state_dict()
    state['backbone.stem.norm.running_var'].fill_(float('nan'))
    torch.save(dict(state_dict=state), tmp_path / 'nan.pth')
    with pytest.raises(CheckpointError, match='not finite'):
        reparameterize_checkpoint(config, tmp_path / 'nan.pth', out)
    with pytest.raises(ValueError, match='nothing to fold'):
        fold_networks(nn.Linear(2, 2))
    assert not out.exists()
    done = subprocess.run(
        [sys.executable, TOOL, config, tmp_path / 'gone.pth', out], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith('error: ')
    assert 'gone.pth' in done.stderr
