"""Weights load whole or raise, by every way that MM toolboxes have."""

import argparse

import numpy as np
import pytest
import torch
from helpers import KEYS, THIN, published_weights
from mmengine.model import BaseModel
from mmengine.registry import MODELS as ROOT_MODELS
from mmengine.runner import load_checkpoint
from torch import nn

from mmcare.models import CARE, CAREAblation
from mmcare.weights.published import as_classifier, from_published, to_published
from mmcare.weights.reading import CheckpointError, read_checkpoint, write_checkpoint


def random_backbone(kind=CARE, **arguments):
    """A thin backbone whose every tensor differs from its initial value."""
    model = kind(**dict(dict(arch=THIN), **arguments))
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand_like(tensor) + 0.5)
    return model


def published_state(backbone):
    """The backbone's weights, and two heads, under the published names."""
    shapes = {'norm.weight': 128, 'norm.bias': 128, 'fc.weight': (10, 128), 'fc.bias': 10}
    heads = {f'{h}.{n}': torch.rand(s) for h in ('head', 'dist_head') for n, s in shapes.items()}
    return {**to_published(backbone.state_dict()), **heads}


def equal(first, second):
    """Whether all weights and buffers of two backbones are equal."""
    first, second = first.state_dict(), second.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


class LoadingModel(BaseModel):
    """A model around a backbone, as detectors, segmentors and classifiers are."""

    def __init__(self, **arguments):
        super().__init__()
        self.backbone = CARE(THIN, **arguments)
        self.neck = nn.Linear(64, 4)

    def forward(self, inputs):
        return self.neck(self.backbone(inputs)[-1])


@pytest.fixture(scope='module')
def source():
    torch.manual_seed(1)
    return random_backbone()


@pytest.fixture(scope='module')
def files(source, tmp_path_factory):
    """Every kind of file that users have, with the source's weights."""
    folder = tmp_path_factory.mktemp('checkpoints')
    published = published_state(source)
    args = argparse.Namespace(model='CARE_S0', lr=2e-3, amp=True)
    training = dict(epoch=299, arch='CARE_S0', args=args, metric=np.float64(78.4))
    ema = {key: value + 1 for key, value in published.items()}
    wrapped = {f'module.{key}': value for key, value in published.items()}
    converted = as_classifier(from_published(published))
    model = LoadingModel()
    model.backbone.load_state_dict(source.state_dict())
    save = {
        'published.pth.tar': dict(training, state_dict=published),
        'published_alone.pth': published,
        'published_with_ema.pth.tar': dict(training, state_dict=published, state_dict_ema=ema),
        'wrapped.pth': wrapped,
        'converted.pth': dict(meta={}, state_dict=converted),
        'trained.pth': dict(meta=dict(epoch=1), state_dict=model.state_dict()),
    }
    for name, content in save.items():
        torch.save(content, folder / name)
    torch.save(save['converted.pth'], folder / 'old.pth', _use_new_zipfile_serialization=False)
    write_checkpoint(dict(meta={}, state_dict=published), folder / 'published.safetensors')
    write_checkpoint(dict(meta={}, state_dict=converted), folder / 'converted.safetensors')
    return folder


NAMES = [
    *('published.pth.tar', 'published_alone.pth', 'published_with_ema.pth.tar', 'wrapped.pth'),
    *('converted.pth', 'old.pth', 'trained.pth', 'published.safetensors', 'converted.safetensors'),
]


@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('prefix', [None, 'backbone', 'backbone.'])
def test_init_cfg(files, source, name, prefix):
    """Without any opt-in, on mmengine's own loaders."""
    extra = {} if prefix is None else dict(prefix=prefix)
    init_cfg = dict(type='Pretrained', checkpoint=str(files / name), **extra)
    backbone = CARE(THIN, init_cfg=init_cfg)
    backbone.init_weights()
    assert equal(backbone, source)
    model = LoadingModel(init_cfg=init_cfg)
    model.init_weights()
    assert equal(model.backbone, source)
    assert equal(ROOT_MODELS.build(dict(type='CARE', arch=THIN)), source) is False


def test_prefix_selects_a_part(source, tmp_path):
    both = dict(student=random_backbone().state_dict(), teacher=source.state_dict())
    state = {f'{name}.{key}': v for name, part in both.items() for key, v in part.items()}
    torch.save(dict(state_dict=state), tmp_path / 'both.pth')
    init_cfg = dict(type='Pretrained', checkpoint=str(tmp_path / 'both.pth'), prefix='teacher')
    backbone = CARE(THIN, init_cfg=init_cfg)
    backbone.init_weights()
    assert equal(backbone, source)
    with pytest.raises(CheckpointError, match=r"both\.pth has no weights under the prefix 'head'"):
        CARE(THIN, init_cfg={**init_cfg, 'prefix': 'head'}).init_weights()


@pytest.mark.parametrize('name', ['published_alone.pth', 'converted.pth', 'trained.pth'])
def test_mmengines_own_loading(files, source, name):
    """``load_checkpoint`` of files that mmengine can read itself, into a backbone alone."""
    backbone = CARE(THIN)
    load_checkpoint(backbone, str(files / name))
    assert equal(backbone, source)


@pytest.mark.parametrize('name', NAMES[:3])
def test_load_state_dict_of_torch(files, source, name):
    """Without any MM loader, as on a phone developer's machine."""
    checkpoint = read_checkpoint(files / name)
    backbone = CARE(THIN)
    backbone.load_state_dict(checkpoint.get('state_dict', checkpoint))
    assert equal(backbone, source)


def test_downloads(files, source, monkeypatch, tmp_path):
    def download(address, destination, progress):
        assert address == 'https://somewhere.org/a/published.pth.tar?download=true'
        (tmp_path / 'checkpoints' / 'published.pth.tar').write_bytes(
            (files / 'published.pth.tar').read_bytes()
        )
        assert destination == str(tmp_path / 'checkpoints' / 'published.pth.tar')

    monkeypatch.setattr(torch.hub, 'get_dir', lambda: str(tmp_path))
    monkeypatch.setattr(torch.hub, 'download_url_to_file', download)
    address = 'https://somewhere.org/a/published.pth.tar?download=true'
    backbone = CARE(THIN, init_cfg=dict(type='Pretrained', checkpoint=address))
    backbone.init_weights()
    assert equal(backbone, source)


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


# ------------------------------------------------------------ weights that do not fit


@pytest.mark.parametrize(
    ('given', 'wanted', 'words'),
    [
        (dict(arch='s1'), dict(arch='s0'), r"not in the model: stages\.0\.[\s\S]*arch='s1'"),
        (dict(arch='s0'), dict(arch='s2'), r"and \d+ more[\s\S]*arch='s0'"),
        (dict(), dict(expand_last=False), r'missing: stages\.3\.blocks\.0\.gamma'),
        (dict(expand_last=False), dict(), r'not in the model: stages\.3\.blocks\.0\.gamma'),
        (dict(in_channels=4), dict(), r'stem\.conv\.weight \(16, 4, 4, 4\) instead of \(16, 3'),
        (dict(out_indices=(0, 1)), dict(), r'missing: stages\.2\.'),
        (dict(kind=CAREAblation, memory=False), dict(), 'of another shape'),
    ],
    ids=str,
)
def test_wrong_variant(given, wanted, words, tmp_path):
    """By each way, whatever ``strict`` says; with the file's name where CARE reads it itself."""
    file = tmp_path / 'wrong.pth'
    backbone = random_backbone(**given)
    wanted = {'arch': THIN, **wanted}
    for state in (to_published(backbone.state_dict()), as_classifier(backbone.state_dict())):
        torch.save(dict(state_dict=state), file)
        init_cfg = dict(type='Pretrained', checkpoint=str(file))
        with pytest.raises(CheckpointError, match=rf'wrong\.pth[\s\S]*{words}'):
            CARE(**wanted, init_cfg=init_cfg).init_weights()
        for load in (
            lambda: load_checkpoint(CARE(**wanted), str(file), strict=False),
            lambda state=state: CARE(**wanted).load_state_dict(state, strict=False),
        ):
            with pytest.raises(CheckpointError, match=words):
                load()


@pytest.mark.parametrize(
    ('value', 'words'),
    [
        (torch.full((16, 3, 4, 4), float('nan')), 'not finite'),
        (torch.ones(16, 3, 4, 4, dtype=torch.int64), 'values of torch.int64'),
        (torch.ones(16, 3, 4, 4).to_sparse(), 'sparse'),
        (torch.ones(16, 3, 4, 4, device='meta'), 'a shape only'),
        ([1.0], 'is a list, not a tensor'),
    ],
)
def test_values_that_cannot_be_weights(source, value, words):
    state = {**source.state_dict(), 'stem.conv.weight': value}
    with pytest.raises(CheckpointError, match=rf'not usable: stem\.conv\.weight .*{words}'):
        CARE(THIN).load_state_dict(state, strict=False)


@pytest.mark.parametrize('given', ['alone', 'resnet'])
def test_a_model_without_any_of_the_backbones_keys(source, given, tmp_path):
    """mmengine would hand the backbone nothing and go on with random weights."""
    state = dict(alone=source.state_dict(), resnet={'backbone.conv1.weight': torch.rand(3)})[given]
    words = dict(alone="No key begins with 'backbone.'", resnet='not in the model: conv1.weight')
    torch.save(dict(state_dict=state), tmp_path / 'file.pth')
    with pytest.raises(CheckpointError, match=words[given]):
        load_checkpoint(LoadingModel(), str(tmp_path / 'file.pth'), strict=False)


def test_what_may_be_missing_or_left_over(source):
    """Output norms, stages that are not built, and counters of batches."""
    state = published_state(source)
    CARE(THIN, out_norm_cfg=dict(type='BN')).load_state_dict(state, strict=False)
    CARE(THIN, out_indices=(0, 1)).load_state_dict(state)
    uncounted = {k: v for k, v in state.items() if not k.endswith('num_batches_tracked')}
    backbone = CARE(THIN)
    backbone.load_state_dict(uncounted, strict=False)
    assert torch.equal(backbone.stem.norm.running_var, source.stem.norm.running_var)


def test_missing_pretrained_file():
    """The configs as they are shipped, before anybody has put weights there."""
    init_cfg = dict(type='Pretrained', checkpoint='checkpoints/care_s1_in1k.pth')
    with pytest.raises(FileNotFoundError) as error:
        LoadingModel(init_cfg=init_cfg).init_weights()
    for words in (
        'checkpoints/care_s1_in1k.pth',
        'zhouyuan888888/CARE-Transformer',
        'convert_checkpoint.py',
        'model.backbone.init_cfg=None model.backbone.norm_eval=False',
    ):
        assert words in str(error.value)
