"""``import mmcare`` registers CARE and CAREAblation, and changes nothing else in the process."""

import json
import sys
from importlib import import_module

import pytest
from helpers import run

from mmcare.compatibility import check_versions

PROGRAM = """
import importlib, json, os, pkgutil, sys
import mmcv.transforms, mmengine.hooks, mmengine.model, mmengine.runner, mmengine.visualization
import mmengine.registry as registry
import torch
from mmengine.registry import Registry
from mmengine.runner import CheckpointLoader

NEW = tuple(map(int, torch.__version__.split('.')[:2])) >= (2, 6)
ROOTS = {n: v for n, v in vars(registry).items() if isinstance(v, Registry)}


def snapshot():
    return dict(
        registered=sorted(
            (name, key)
            for name, root in ROOTS.items()
            for key, kind in root.module_dict.items()
            if kind.__module__.startswith('mmcare')
        ),
        schemes={k: f'{f.__module__}.{f.__name__}' for k, f in CheckpointLoader._schemes.items()},
        allowed=[repr(each) for each in getattr(torch.serialization, 'get_safe_globals', list)()],
        load=f'{torch.load.__module__} {id(torch.load)}',
        environment=dict(os.environ),
    )


before = snapshot()
import mmcare

for root, name in ((registry.MODELS, 'CARE'), (registry.HOOKS, 'ExactResumeHook')):
    root.get(f'mmcare.{name}').__name__  # as configs name them, with custom_imports alone
toolboxes = sorted({'mmdet', 'mmseg', 'mmpretrain', 'timm', 'pycocotools'} & set(sys.modules))
imported = []
sys.modules['mmcare.classification'] = None  # imports mmpretrain, and that PyTorch's compiler
for module in pkgutil.walk_packages(mmcare.__path__, 'mmcare.'):
    if module.name in ('mmcare.engine.safe_loading', 'mmcare.classification', 'mmcare.timm'):
        continue
    if module.name == 'mmcare.mmcv_ext':  # torchvision imports PyTorch's compiler, too
        continue
    if NEW or not module.name.startswith('mmcare.export'):
        importlib.import_module(module.name)
        imported.append(module.name)
toolboxes += {'timm'} & set(sys.modules)
models = sorted(mmcare.registry.MODELS.module_dict)
hooks = sorted(mmcare.registry.HOOKS.module_dict)
after = snapshot()
print(json.dumps([before, after, imported, toolboxes, models, hooks]))
"""


def test_imports_register_two_models():
    done = run('python', '-c', PROGRAM)
    before, after, imported, toolboxes, models, hooks = json.loads(done.stdout.splitlines()[-1])
    assert {'mmcare.models', 'mmcare.engine', 'mmcare.weights.reading'} <= set(imported)
    assert toolboxes == [], 'import mmcare imports a toolbox'
    assert models == ['CARE', 'CAREAblation'] and 'ExactResumeHook' in hooks
    assert before.pop('registered') == []
    assert after.pop('registered') == [['MODELS', 'CARE'], ['MODELS', 'CAREAblation']]
    assert after == before


@pytest.mark.parametrize('package', ['torch', 'mmengine'])
def test_a_missing_package_is_named(package, monkeypatch):
    for name in [*sys.modules]:
        if name.partition('.')[0] == 'mmcare':
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=f'^{package} is not installed. mmcare needs {package}>='):
        import_module('mmcare.shipped')


def test_what_uninstalling_has_left_is_named(tmp_path, monkeypatch):
    """As ``pip uninstall mmcv-lite`` leaves mmcv/_ext.py, which it has not installed."""
    (tmp_path / 'mmcv').mkdir()
    (tmp_path / 'mmcv/_ext.py').touch()
    monkeypatch.delitem(sys.modules, 'mmcv')
    monkeypatch.setattr(sys, 'path', [str(tmp_path)])
    with pytest.raises(ImportError, match=rf'only {tmp_path}/mmcv is left: delete it. pip install'):
        check_versions('mmcv')
