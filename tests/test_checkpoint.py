"""Weights load whole or not at all, by every way MM toolboxes have; files are read safely."""

import argparse
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.logging import HistoryBuffer
from mmengine.model import BaseModel
from mmengine.registry import MODELS as ROOT_MODELS
from mmengine.runner import CheckpointLoader, Runner, load_checkpoint
from published_reference import KEYS, published_weights
from torch import nn

from mmcare.checkpoint import (
    ABLATION_DEFAULTS,
    CheckpointError,
    as_classifier,
    convert_checkpoint,
    describe_backbone,
    from_published,
    read_checkpoint,
    to_published,
    write_checkpoint,
)
from mmcare.models import CARE

TINY = dict(
    depths=(1, 1, 1, 2),
    widths=(12, 12, 24, 24),
    memory_widths=(4, 4, 8, 8),
    expansions=((2, 2),) * 4,
    head_channels=(1, 1, 4, 8),
)
TOOL = Path(__file__).parent.parent / 'tools' / 'convert_checkpoint.py'
# What a Pretrained init_cfg says besides the checkpoint.
PREFIXES = [{}, dict(prefix='backbone'), dict(prefix='backbone.')]


def random_backbone(**arguments):
    """A tiny backbone whose every tensor differs from its initial value."""
    model = CARE(arguments.pop('arch', TINY), **arguments)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand_like(tensor) + 0.5)
    return model


def published_state(backbone):
    """The backbone's weights, and two heads, under the published names."""
    heads = {
        f'{head}.{name}': torch.rand(shape)
        for head in ('head', 'dist_head')
        for name, shape in (
            ('norm.weight', 64),
            ('norm.bias', 64),
            ('fc.weight', (10, 64)),
            ('fc.bias', 10),
        )
    }
    return {**to_published(backbone.state_dict()), **heads}


def equal_backbones(first, second):
    """Whether all weights and buffers are equal."""
    first, second = first.state_dict(), second.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


@ROOT_MODELS.register_module()
class LoadingModel(BaseModel):
    """A model around a backbone, as detectors, segmentors and classifiers are."""

    def __init__(self, backbone, init_cfg=None):
        super().__init__(init_cfg=init_cfg)
        self.backbone = ROOT_MODELS.build(backbone)
        self.neck = nn.Linear(64, 4)

    def forward(self, inputs, mode='tensor'):
        features = self.neck(self.backbone(inputs)[-1].mean((2, 3)))
        return dict(loss=features.square().mean()) if mode == 'loss' else features


@pytest.fixture(scope='module')
def source():
    torch.manual_seed(1)
    return random_backbone()


@pytest.fixture(scope='module')
def files(source, tmp_path_factory):
    """Every kind of file that the loading table names, with the source's weights."""
    folder = tmp_path_factory.mktemp('checkpoints')
    published = published_state(source)
    timm_args = argparse.Namespace(model='CARE_S0', lr=2e-3, amp=True)
    training = dict(epoch=299, arch='CARE_S0', args=timm_args, metric=np.float64(78.4))
    torch.save(dict(training, state_dict=published), folder / 'published.pth.tar')
    torch.save(published, folder / 'published_alone.pth')
    other = {key: value + 1 for key, value in published.items()}
    torch.save(
        dict(training, state_dict=published, state_dict_ema=other),
        folder / 'published_with_ema.pth.tar',
    )
    torch.save(
        dict(training, state_dict=published),
        folder / 'legacy.pth',
        _use_new_zipfile_serialization=False,
    )
    write_checkpoint(dict(meta={}, state_dict=published), folder / 'published.safetensors')
    for ending in ('.pth', '.safetensors'):
        convert_checkpoint(folder / 'published.pth.tar', folder / f'converted{ending}')
    trained = dict(backbone=dict(type='mmcare.CARE', arch=TINY), type='LoadingModel')
    runner = run(folder / 'train', trained, train_batches=2, load_from=None, source=source)
    runner.model.backbone.load_state_dict(source.state_dict())
    runner.save_checkpoint(str(folder), 'trained.pth')
    return folder


NAMES = [
    'published.pth.tar',
    'published_alone.pth',
    'published_with_ema.pth.tar',
    'legacy.pth',
    'published.safetensors',
    'converted.pth',
    'converted.safetensors',
    'trained.pth',
]


def run(work_dir, model, train_batches=0, load_from=None, resume=False, source=None):
    """Build mmengine's runner around a model; train it for a few batches if asked to."""
    loader = dict(
        dataset=[torch.rand(3, 32, 32) for _ in range(max(train_batches, 1))],
        sampler=dict(type='DefaultSampler', shuffle=False),
        collate_fn=stack,
        batch_size=2,
    )
    train = dict(
        train_dataloader=loader,
        train_cfg=dict(by_epoch=True, max_epochs=1),
        optim_wrapper=dict(optimizer=dict(type='AdamW', lr=1e-3)),
    )
    runner = Runner(
        model=model,
        work_dir=str(work_dir),
        load_from=load_from and str(load_from),
        resume=resume,
        experiment_name=f'{work_dir.name}_{id(model)}',
        default_hooks=dict(exact_resume=dict(type='mmcare.ExactResumeHook')),
        **(train if train_batches else {}),
    )
    if train_batches:
        runner.train()
    return runner


def stack(batch):
    return dict(inputs=torch.stack(batch))


# ------------------------------------------------------------ every file by every way


@pytest.mark.parametrize('name', NAMES)
def test_init_cfg(files, source, name):
    for prefix in PREFIXES:
        init_cfg = dict(type='Pretrained', checkpoint=str(files / name), **prefix)
        backbone = CARE(TINY, init_cfg=init_cfg)
        backbone.init_weights()
        assert equal_backbones(backbone, source)
        model = LoadingModel(dict(type='CARE', arch=TINY, init_cfg=init_cfg))
        model.init_weights()
        assert equal_backbones(model.backbone, source)


@pytest.mark.parametrize('name', NAMES)
def test_load_checkpoint(files, source, name):
    backbone = CARE(TINY)
    load_checkpoint(backbone, str(files / name), strict=True)
    assert equal_backbones(backbone, source)
    model = LoadingModel(dict(type='mmcare.CARE', arch=TINY))
    load_checkpoint(model, str(files / name))
    assert equal_backbones(model.backbone, source)


@pytest.mark.parametrize('name', NAMES)
def test_load_from(files, source, name, tmp_path):
    runner = run(
        tmp_path,
        dict(type='LoadingModel', backbone=dict(type='CARE', arch=TINY)),
        load_from=files / name,
    )
    runner.load_or_resume()
    assert equal_backbones(runner.model.backbone, source)


@pytest.mark.parametrize('name', NAMES[:5])
def test_load_state_dict_of_torch(files, source, name):
    """Without any MM loader, as on a phone developer's machine."""
    checkpoint = read_checkpoint(files / name)
    backbone = CARE(TINY)
    backbone.load_state_dict(checkpoint.get('state_dict', checkpoint))
    assert equal_backbones(backbone, source)


@pytest.fixture
def messages(monkeypatch):
    """What mmcare and mmengine log while loading."""
    texts = []
    for module in ('mmcare.checkpoint', 'mmengine.runner.checkpoint'):
        monkeypatch.setattr(f'{module}.print_log', lambda text, **_: texts.append(text))
    return texts


def test_published_file_in_a_detector_warns(files, messages):
    for name, expected in (
        ('published.pth.tar', True),
        ('converted.pth', True),
        ('trained.pth', False),
    ):
        load_checkpoint(LoadingModel(dict(type='CARE', arch=TINY)), str(files / name))
        output = '\n'.join(messages)
        messages.clear()
        assert ('not in it and keep their initial values' in output) is expected
        assert ('neck.weight' in output) is expected


def test_ema_only_if_asked(files, tmp_path, messages):
    file = files / 'published_with_ema.pth.tar'
    plain = CheckpointLoader.load_checkpoint(str(file))['state_dict']
    assert 'took state_dict, left state_dict_ema aside' in '\n'.join(messages)
    assert 'took state_dict_ema, left state_dict aside' in convert_checkpoint(
        file, tmp_path / 'ema.pth', use_ema=True
    )
    ema = read_checkpoint(tmp_path / 'ema.pth')['state_dict']
    assert plain.keys() == ema.keys()
    assert all(torch.equal(plain[key] + 1, ema[key]) for key in plain)
    with pytest.raises(CheckpointError, match='no state_dict_ema'):
        convert_checkpoint(files / 'published.pth.tar', tmp_path / 'none.pth', use_ema=True)
    assert not (tmp_path / 'none.pth').exists()


def test_other_files_pass_untouched(tmp_path):
    state = {'layer1.weight': torch.rand(3), 'fc.bias': torch.rand(2)}
    torch.save(dict(state_dict=state, meta=dict(epoch=3)), tmp_path / 'resnet.pth')
    loaded = CheckpointLoader.load_checkpoint(str(tmp_path / 'resnet.pth'))
    assert loaded['meta'] == dict(epoch=3) and loaded['state_dict'].keys() == state.keys()


# ------------------------------------------------------------ names and conversion


@pytest.mark.parametrize('variant', ['s0', 's1', 's2'])
def test_names_of_the_published_files(variant):
    published = published_weights(variant)
    ours = from_published(published)
    backbone = CARE(variant).state_dict()
    heads = {key for key in ours if key.startswith('head.')}
    assert ours.keys() - heads == backbone.keys()
    assert heads == {
        f'head.{head}.{name}'
        for head in ('cls_head', 'distill_head')
        for name in ('norm.weight', 'norm.bias', 'fc.weight', 'fc.bias')
    }
    assert list(to_published(ours)) == list(KEYS[variant])
    assert describe_backbone(ours, CARE.arch_zoo) == dict(
        arch=variant, in_channels=3, num_stages=4, expand_last=True, **ABLATION_DEFAULTS
    )


@pytest.mark.parametrize('ending', ['.pth', '.safetensors'])
def test_convert_both_ways(files, tmp_path, ending):
    there, back = tmp_path / f'ours{ending}', tmp_path / f'published{ending}'
    done = subprocess.run(
        [sys.executable, TOOL, files / 'published.pth.tar', there], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert 'took state_dict' in done.stdout and 'arch=' in done.stdout
    assert 'in the published format' in convert_checkpoint(there, back)
    first = read_checkpoint(files / 'published.pth.tar')['state_dict']
    second = read_checkpoint(back)['state_dict']
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_convert_a_whole_model(files, source, tmp_path):
    """A checkpoint of training becomes a published file: its backbone only."""
    assert 'took the backbone.' in convert_checkpoint(files / 'trained.pth', tmp_path / 'out.pth')
    state = read_checkpoint(tmp_path / 'out.pth')['state_dict']
    assert state.keys() == to_published(source.state_dict()).keys()


@pytest.mark.parametrize('to_convert', ['published.pth.tar', 'converted.pth'])
def test_convert_refuses_a_part(files, tmp_path, to_convert):
    checkpoint = read_checkpoint(files / to_convert)
    state = checkpoint['state_dict']
    del state[next(key for key in state if key.endswith('stages.2.blocks.0.gamma'))]
    torch.save(dict(state_dict=state), tmp_path / 'part.pth')
    with pytest.raises(CheckpointError, match=r'no whole CARE backbone[\s\S]*blocks\.0\.gamma'):
        convert_checkpoint(tmp_path / 'part.pth', tmp_path / 'out.pth')
    assert not (tmp_path / 'out.pth').exists()


def test_names_of_distributed_wrappers(files, source, tmp_path):
    published = read_checkpoint(files / 'published.pth.tar')['state_dict']
    wrapped = {f'module.{key}': value for key, value in published.items()}
    torch.save(wrapped, tmp_path / 'wrapped.pth')
    for prefix in PREFIXES:
        init_cfg = dict(type='Pretrained', checkpoint=str(tmp_path / 'wrapped.pth'), **prefix)
        backbone = CARE(TINY, init_cfg=init_cfg)
        backbone.init_weights()
        assert equal_backbones(backbone, source)


def test_pretrained_without_a_file():
    with pytest.raises(ValueError, match=r'init_cfg\.checkpoint'):
        CARE(TINY, init_cfg=dict(type='Pretrained')).init_weights()


def test_convert_refuses(files, tmp_path):
    torch.save(dict(state_dict={'conv1.weight': torch.rand(3)}), tmp_path / 'resnet.pth')
    with pytest.raises(CheckpointError, match='no CARE backbone'):
        convert_checkpoint(tmp_path / 'resnet.pth', tmp_path / 'out.pth')
    done = subprocess.run(
        [sys.executable, TOOL, 'missing.pth', tmp_path / 'out.pth'], capture_output=True, text=True
    )
    assert done.returncode == 2 and 'missing.pth is not a file' in done.stderr
    assert 'Traceback' not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ['resnet.pth']


# ------------------------------------------------------------ files that do not fit


@pytest.mark.parametrize(
    ('given', 'wanted', 'words'),
    [
        (
            dict(arch='s1'),
            dict(arch='s0'),
            [r"arch: the file has 's1', the model 's0'", r'stages\.0\.blocks\.2\.'],
        ),
        (
            dict(arch='s0'),
            dict(arch='s2'),
            [r"arch: the file has 's0', the model 's2'", 'and .* more'],
        ),
        (dict(), dict(expand_last=False), ['expand_last: the file has True, the model False']),
        (dict(expand_last=False), dict(), ['expand_last: the file has False, the model True']),
        (
            dict(in_channels=4),
            dict(),
            [
                'in_channels: the file has 4, the model 3',
                r'stem\.conv\.weight \(16, 4, 4, 4\) instead of',
            ],
        ),
        (dict(out_indices=(0, 1)), dict(), ['num_stages: the file has 2, the model 4']),
        *(
            (
                {name: value},
                dict(),
                [
                    rf'CARE\(.*{name}={value!r}\)',
                    f'{name}: the file has {value!r}, the model {ABLATION_DEFAULTS[name]!r}',
                ],
            )
            for name, value in (
                ('decoupling', 'symmetric'),
                ('decoupling', 'stacked'),
                ('decoupling', 'global_only'),
                ('inter1', False),
                ('inter2', False),
                ('memory', False),
                ('early_conv', False),
                ('multi_scale', False),
            )
        ),
    ],
)
def test_wrong_variant(given, wanted, words, tmp_path):
    file = tmp_path / 'wrong.pth'
    backbone = random_backbone(**given)
    wanted = {'arch': TINY, **wanted}
    published = published_state(backbone)
    for state in (published, as_classifier(backbone.state_dict()), backbone.state_dict()):
        torch.save(dict(state_dict=state), file)
        for load in (
            lambda: load_checkpoint(CARE(**wanted), str(file)),
            lambda: CARE(
                **wanted, init_cfg=dict(type='Pretrained', checkpoint=str(file))
            ).init_weights(),
            lambda: CARE(**wanted).load_state_dict(read_checkpoint(file)['state_dict'], False),
        ):
            with pytest.raises(CheckpointError) as error:
                load()
            for word in words:
                assert error.match(word)


def test_backbone_without_any_of_its_keys(source, tmp_path):
    """mmengine would hand the backbone nothing and go on with random weights."""
    torch.save(dict(state_dict=source.state_dict()), tmp_path / 'alone.pth')
    torch.save(dict(state_dict={'backbone.conv1.weight': torch.rand(3)}), tmp_path / 'resnet.pth')
    for name, words in (
        ('alone.pth', "None of the weights has the prefix 'backbone.'"),
        ('resnet.pth', 'does not look like a CARE checkpoint'),
    ):
        with pytest.raises(CheckpointError, match=words):
            load_checkpoint(
                LoadingModel(dict(type='CARE', arch=TINY)), str(tmp_path / name), strict=False
            )


def test_exempt_from_completeness(source, tmp_path):
    """Output norms, stages that are not built, and counters of batches."""
    torch.save(dict(state_dict=published_state(source)), tmp_path / 'file.pth')
    normed = CARE(TINY, out_norm_cfg=dict(type='BN'))
    load_checkpoint(normed, str(tmp_path / 'file.pth'))
    assert torch.equal(normed.stem.conv.weight, source.stem.conv.weight)
    load_checkpoint(CARE(TINY, out_indices=(0, 1)), str(tmp_path / 'file.pth'), strict=True)
    plain = CARE(TINY)
    plain.load_state_dict(normed.state_dict())
    assert equal_backbones(plain, source)
    uncounted = {
        key: value
        for key, value in source.state_dict().items()
        if not key.endswith('num_batches_tracked')
    }
    load_checkpoint(plain, save(uncounted, tmp_path / 'uncounted.pth'))


def save(state, path):
    torch.save(state, path)
    return str(path)


def test_missing_pretrained_file(tmp_path):
    model = LoadingModel(
        dict(
            type='CARE',
            arch=TINY,
            init_cfg=dict(type='Pretrained', checkpoint='checkpoints/care_s1_in1k.pth'),
        )
    )
    with pytest.raises(FileNotFoundError) as error:
        model.init_weights()
    for words in (
        'checkpoints/care_s1_in1k.pth',
        'zhouyuan888888/CARE-Transformer',
        'convert_checkpoint.py',
        'model.backbone.init_cfg=None model.backbone.norm_eval=False',
    ):
        assert words in str(error.value)


# ------------------------------------------------------------ damaged and hostile files


@pytest.mark.parametrize('name', ['published.pth.tar', 'converted.pth', 'converted.safetensors'])
@pytest.mark.parametrize('damage', ['empty', 'truncated', 'flipped bit', 'text'])
def test_damaged_files(files, tmp_path, name, damage):
    content = bytearray((files / name).read_bytes())
    if damage == 'flipped bit':
        # In the middle of the file is tensor data.
        content[len(content) // 2] ^= 4
    content = {
        'empty': b'',
        'truncated': content[: len(content) // 2],
        'flipped bit': content,
        'text': b'<html>not found</html>' * 50,
    }[damage]
    file = tmp_path / name
    file.write_bytes(content)
    for load in (
        lambda: load_checkpoint(CARE(TINY), str(file)),
        lambda: CARE(TINY, init_cfg=dict(type='Pretrained', checkpoint=str(file))).init_weights(),
        lambda: convert_checkpoint(file, tmp_path / 'out.pth'),
    ):
        with pytest.raises(CheckpointError, match=name):
            load()
    assert [path.name for path in tmp_path.iterdir()] == [name]


class Foreign:
    """A class that no checkpoint needs."""


class RunsACommand:
    """Unpickling this calls a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def test_foreign_and_hostile_objects(tmp_path):
    flag = tmp_path / 'executed'
    hostile = {
        'a class': Foreign(),
        'a call': RunsACommand(Path.touch, flag),
        'getattr of a function': RunsACommand(getattr, torch.save, '__globals__'),
        'getattr of a builtin': RunsACommand(getattr, dict, 'update'),
        'private attribute': RunsACommand(getattr, HistoryBuffer, '__init__'),
        'inherited attribute': RunsACommand(getattr, HistoryBuffer, '__class__'),
        'eval': RunsACommand(eval, f'open({str(flag)!r}, "w")'),
    }
    for name, crafted in hostile.items():
        file = tmp_path / 'crafted.pth'
        torch.save(dict(state_dict={}, meta=crafted), file)
        with pytest.raises(CheckpointError, match='cannot be read as a checkpoint'):
            CheckpointLoader.load_checkpoint(str(file))
        assert not flag.exists(), name
    for code in (
        b'cbuiltins\ngetattr\n(cbuiltins\ndict\nVupdate\ntR.',
        b'cbuiltins\nexec\n(Vopen("executed", "w")\ntR.',
    ):
        (tmp_path / 'crafted.pth').write_bytes(code)
        with pytest.raises(CheckpointError):
            read_checkpoint(tmp_path / 'crafted.pth')
    assert getattr(dict, 'update') is dict.update  # noqa: B009 (builtins are as they were)


def test_log_buffers_and_numpy_values_are_read(tmp_path):
    buffer = HistoryBuffer([1.0, 3.0], [1, 1])
    values = dict(buffer=buffer, scalar=np.float32(2.5), array=np.arange(3), flag=np.bool_(True))
    torch.save(values, tmp_path / 'values.pth')
    loaded = read_checkpoint(tmp_path / 'values.pth')
    assert loaded['buffer'].mean() == 2.0 and loaded['scalar'] == np.float32(2.5)
    assert loaded['array'].tolist() == [0, 1, 2] and loaded['flag']
    old_names = pickle.dumps(values, protocol=2).replace(b'numpy._core', b'numpy.core')
    (tmp_path / 'data.pkl').write_bytes(old_names)
    with (
        zipfile.ZipFile(tmp_path / 'values.pth') as new,
        zipfile.ZipFile(tmp_path / 'old.pth', 'w') as old,
    ):
        for entry in new.infolist():
            content = new.read(entry)
            old.writestr(entry, old_names if entry.filename.endswith('data.pkl') else content)
    assert read_checkpoint(tmp_path / 'old.pth')['array'].tolist() == [0, 1, 2]


def test_compressed_archive_is_refused(files, tmp_path):
    with (
        zipfile.ZipFile(files / 'converted.pth') as plain,
        zipfile.ZipFile(tmp_path / 'bomb.pth', 'w', zipfile.ZIP_DEFLATED) as packed,
    ):
        for entry in plain.infolist():
            packed.writestr(entry.filename, plain.read(entry))
    with pytest.raises(CheckpointError, match='compressed'):
        read_checkpoint(tmp_path / 'bomb.pth')


def test_write_leaves_nothing_behind_on_failure(tmp_path):
    (tmp_path / 'kept.pth').write_bytes(b'before')
    with pytest.raises(Exception, match='pickle'):
        write_checkpoint(dict(meta={}, state_dict={}, extra=lambda: 0), tmp_path / 'kept.pth')
    assert (tmp_path / 'kept.pth').read_bytes() == b'before'
    assert [path.name for path in tmp_path.iterdir()] == ['kept.pth']


def test_protection_is_not_switched_off():
    """Outside our loader torch.load refuses what it refuses by default."""
    allowed = str(torch.serialization.get_safe_globals())
    assert 'HistoryBuffer' not in allowed and 'Namespace' not in allowed
