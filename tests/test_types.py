"""Types may be names, classes or dotted names, and our code does the same with each."""

import json
import sys
from contextlib import suppress
from copy import deepcopy
from functools import cache

import pytest
import torch
from helpers import (
    IS_NEW,
    THIN,
    assert_equal,
    newer,
    published_state,
    randomise,
    thin_backbone,
    warned,
)
from mmengine import registry as mmengine_registry
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope, Registry
from mmengine.runner import Runner
from test_configs import NAMES, load
from toy_training import StopAt

from mmcare.engine import DataCheckHook
from mmcare.models import CARE
from mmcare.models.loading import strict_loading

toy_configs = pytest.importorskip('toy_configs')
pytest.importorskip('mmdet')
pytest.importorskip('mmseg')
REGISTRIES = [r for r in vars(mmengine_registry).values() if isinstance(r, Registry)]
FOLDERS = sorted({name.partition('/')[0] for name in NAMES})


@cache
def find_type(name, scope):
    for registry in REGISTRIES:
        for known_as in (f'{scope}.{name}', name):
            with suppress(KeyError, RuntimeError):
                kind = registry.get(known_as)
                if kind is not None:
                    return kind
    return name  # of a function, such as nms


def with_classes(part, scope, dotted):
    """Replace the types of a config, which are strings, as pure-Python configs have them.

    These have no default scope, and classes; dotted names once they have been dumped and read.
    """
    if isinstance(part, dict):
        changed = {key: with_classes(value, scope, dotted) for key, value in part.items()}
        kind = part.get('type')
        if isinstance(kind, str) and not isinstance(kind := find_type(kind, scope), str):
            package = kind.__module__.rpartition('.')[0]  # modules may be hidden by functions
            in_package = getattr(sys.modules[package], kind.__name__, None) is kind
            name = f'{package if in_package else kind.__module__}.{kind.__name__}'
            changed['type'] = name if dotted else kind
        if 'default_scope' in part:
            changed['default_scope'] = None
        return changed
    if isinstance(part, (list, tuple)):
        return type(part)(with_classes(entry, scope, dotted) for entry in part)
    return part


def forms(config):
    """Yield a config with names, classes and dotted names as types."""
    yield config
    for dotted in (False, True):
        content = with_classes(config.to_dict(), config.default_scope, dotted)
        yield Config(content, format_python_code=False)  # which takes long


def types_of(part, path=()):
    """Return the types of a config and where they are, but for their places in lists."""
    if isinstance(part, (list, tuple)):
        return frozenset().union(*(types_of(entry, path) for entry in part))
    if not isinstance(part, dict):
        return frozenset()
    inner = (types_of(value, (*path, key)) for key, value in part.items())
    return frozenset({(path, part.get('type'))}).union(*inner)


def recipes(folder):
    """Load the recipes of a folder, one of those with the same types; sizes have the same."""
    names = [name for name in NAMES if name.startswith(f'{folder}/') and '_s1_' not in name]
    configs = [load(name) for name in names if '_s2_' not in name]
    return [*{types_of(config._cfg_dict): deepcopy(config) for config in configs}.values()]


def prepare(config, folder):
    """Let a recipe read weights from a file, and damaged data; return the weights."""
    scope, backbone = config.default_scope, config.model.backbone
    file = str(folder / 'backbone.pth')
    backbone.update(arch=THIN, init_cfg=None)
    backbone.pop('from_scratch', None)  # which excludes a file
    with DefaultScope.overwrite_default_scope(scope), torch.no_grad():
        state = randomise(MODELS.build(backbone)).state_dict()
    torch.save({f'backbone.{name}': value for name, value in state.items()}, file)
    backbone.init_cfg = dict(type='Pretrained', checkpoint=file)
    dataset = config.train_dataloader.dataset
    dataset.data_root = str(folder)
    if dataset.type == 'CustomDataset':
        (folder / dataset.data_prefix / '__MACOSX').mkdir(parents=True)
    if dataset.get('ann_file', '').endswith('.json'):
        (folder / dataset.ann_file).parent.mkdir(exist_ok=True)
        (folder / dataset.ann_file).write_text(json.dumps(dict(images=[], annotations=[])))
    return state


def ask(config, logged):
    """Ask a recipe all that our code finds by types; return the answers by name."""
    answers = dict(data='')
    with DefaultScope.overwrite_default_scope(config.default_scope):
        model = torch.nn.Sequential()
        model.add_module('backbone', MODELS.build(config.model.backbone))
        model.backbone.init_weights()
        with strict_loading(model, (CARE,), 'file.pth'):
            model.load_state_dict({}, strict=False)  # it keeps what it has from init_cfg
        answers['kept'] = warned(logged, 'has no weights of backbone')
        logged.clear()
        answers['weights'] = model.backbone.state_dict()
        try:
            DataCheckHook().before_build(config.train_dataloader)
        except ValueError as error:
            answers['data'] = str(error)
    if IS_NEW:
        answers.update(ask_export(config))
    return answers


def ask_export(config):
    from mmcare.export import pipelines
    from mmcare.export.loading import read_normalization
    from mmcare.export.tasks.base import describe_classes

    numbers = 2, 80, 150, 1000
    shape, reason = pipelines.choose_shape(config)
    fitted = deepcopy(config)
    steps = pipelines.fit_config(fitted, shape)
    return dict(
        shape=(shape, reason),
        steps={name: dict(step, type=name) for name, step in steps.items()},
        left=len(fitted.test_dataloader.dataset.pipeline),
        padding=pipelines.read_padding(config, 3),
        resizing=pipelines.describe_resizing(config, shape),
        normalization=read_normalization(config),
        classes=[describe_classes(config, number) for number in numbers],
    )


@pytest.mark.parametrize('folder', FOLDERS)
def test_recipes(folder, tmp_path, logged):
    """Weights, data checks and exports are the same."""
    for number, config in enumerate(recipes(folder)):
        (tmp_path / str(number)).mkdir()
        state = prepare(config, tmp_path / str(number))
        names, *others = (ask(form, logged) for form in forms(config))
        assert_equal(names['weights'], state)
        assert len(names['kept']) == 1
        dataset = config.train_dataloader.dataset.type
        assert bool(names['data']) == (dataset in ('CocoDataset', 'CustomDataset'))
        for answers in others:
            assert_equal(answers.pop('weights'), state)
            assert answers == {name: names[name] for name in answers}


def test_training_with_dotted_names(tmp_path):
    """It starts from the published weights, and does the same as with names."""
    toy_configs.make_data('detection', tmp_path / 'data')
    file = str(tmp_path / 'CARE.pth.tar')
    torch.save(published_state(thin_backbone()), file)
    weights = []
    for kind in ('names', 'dotted'):
        config = toy_configs.toy_config('detection', tmp_path / 'data', tmp_path / kind)
        config.model.backbone.init_cfg = dict(type='Pretrained', checkpoint=file)
        *_, dotted = forms(config)
        runner = Runner.from_cfg(dotted if kind == 'dotted' else config)
        runner.register_hook(StopAt(1))
        with pytest.raises(KeyboardInterrupt):
            runner.train()
        weights.append(runner.model.state_dict())
    assert_equal(*weights)
    assert all(weight.isfinite().all() for weight in weights[0].values())


def write_python(part, imports):
    """Write a part of a config with dotted names as a pure-Python config has it."""
    if isinstance(part, dict):
        entries = []
        for key, value in part.items():
            if key == 'type' and '.' in value:
                module, _, name = value.rpartition('.')
                alias = imports.setdefault(f'from {module} import {name}', f'Type{len(imports)}')
                entries.append(f"'type': {alias}")
            else:
                entries.append(f'{key!r}: {write_python(value, imports)}')
        return '{' + ', '.join(entries) + '}'
    if isinstance(part, (list, tuple)):
        entries = [f'{write_python(entry, imports)}, ' for entry in part]
        return f'({"".join(entries)})' if isinstance(part, tuple) else f'[{"".join(entries)}]'
    return repr(part)


@newer
@pytest.mark.slow
def test_a_pure_python_config(tmp_path):
    """Trained from published weights, dumped, resumed from the dump, and exported."""
    from mmcare.export import export_model, load_model

    toy_configs.make_data('detection', tmp_path / 'data')
    torch.save(published_state(thin_backbone()), tmp_path / 'CARE.pth.tar')
    config = toy_configs.toy_config('detection', tmp_path / 'data', tmp_path / 'whole')
    init_cfg = dict(type='Pretrained', checkpoint=str(tmp_path / 'CARE.pth.tar'))
    config.model.backbone.init_cfg = init_cfg
    Runner.from_cfg(config).train()
    config.work_dir = str(tmp_path / 'parts')
    imports = {}
    content = with_classes(config.to_dict(), 'mmdet', dotted=True)
    lines = [f'{key} = {write_python(value, imports)}' for key, value in content.items()]
    lines = [f'{line} as {alias}' for line, alias in imports.items()] + lines
    (tmp_path / 'python.py').write_text('\n'.join(lines))
    runner = Runner.from_cfg(Config.fromfile(tmp_path / 'python.py', lazy_import=True))
    runner.register_hook(StopAt(3))
    with pytest.raises(KeyboardInterrupt):
        runner.train()
    dumped = tmp_path / 'parts' / 'python.py'
    assert 'mmengine.model.PretrainedInit' in dumped.read_text().replace('weight_init.', '')
    config = Config.fromfile(dumped)
    config.resume = True
    Runner.from_cfg(config).train()
    files = [tmp_path / folder / 'epoch_2.pth' for folder in ('whole', 'parts')]
    assert_equal(*(torch.load(file, weights_only=True)['state_dict'] for file in files))
    model = load_model(dumped, files[1], part='model')
    shape = toy_configs.SIZE, toy_configs.SIZE
    assert export_model(model, tmp_path, shape, ('onnx',), outputs='decoded')['onnx']['outputs']
