"""Configs in checkpoints: those that MMEngine writes are handed on, programs are not."""

import pytest
from mmengine.config import Config
from mmengine.registry import MODELS

from mmcare.embedded_config import is_harmless_config
from mmcare.shipped import shipped_configs


@pytest.mark.parametrize('name', shipped_configs())
def test_shipped_configs_are_harmless(name):
    """As a run writes them into its checkpoints."""
    assert is_harmless_config(Config.fromfile(f'configs/{name}.py').pretty_text)


@pytest.mark.parametrize(
    'text',
    [
        '',
        "a = b = dict(type='A', sizes=[(1, 2)], bound=-1e9, options={'a': None}, kinds={1, 'b'})",
        "a = dict({'a b': dict(type='ReLU')})",
        "custom_imports = dict(imports=['mmcare.classification', 'json'])",
        "custom_imports = dict(imports='mmcare')\ndefault_scope = 'mmrotate'",
        "a = dict(type='mmdet.MaskRCNN', _scope_='mmseg')",
        "a = [dict(type='torchvision/Resize'), dict(type='default_collate'), dict(type=None)]",
        "a = dict(type='torch.optim.AdamW', b=dict(type='torch.nn.ReLU'))",
        "a = dict(type='mmengine.optim.OptimWrapper', b=dict(type='mmcare.models.CARE'))",
    ],
)
def test_harmless(text):
    assert is_harmless_config(text)


@pytest.mark.parametrize(
    'text',
    [
        None,
        b'a = 1',
        'a = ',
        '\0',
        'a' * 100_000 + '(' * 100_000,
        'import os',
        'a += 1',
        'a: int = 1',
        'a.b = 1',
        'a[0] = 1',
        'a = b',
        'a = inf',  # what MMEngine writes for infinity, and cannot read again
        'a = -b()',
        'a = 1 + 1',
        "a = f'{1}'",
        'a = [c for c in (1,)]',
        'a = {**{}}',
        'a = [*()]',
        "a = dict(**{'type': 'os.system'})",
        "a = dict([('type', 'os.system')])",
        'a = dict({}, {})',
        'dict = 3',
        "_base_ = 'other.py'",
        "a = '{{$X:1}}'",
        '# {{ fileDirname }}',
        "custom_imports = dict(imports=['antigravity'])",
        "custom_imports = dict(imports='mmcare_of_another')",
        "custom_imports = 'antigravity'",
        'custom_imports = dict(imports=[3])',
        "default_scope = 'antigravity'",
        "a = dict(type='A', _scope_='antigravity')",
        "a = dict(type='antigravity')",
        "a = dict(type='os')",
        "a = dict(type='os.system')",
        "a = {'type': 'os.system'}",
        "a = [({'b': {'type': 'os.system'}},)]",
        "a = dict(type='subprocess.Popen')",
        "a = dict(type='mmengine.rmtree')",
        "a = dict(type='mmengine.dist.utils.subprocess.Popen')",
        "a = dict(type='torch.hub.load')",
        "a = dict(type='torch.utils.data.DataLoader')",
        "a = dict(type='mmdet.../x.Y')",
        "a = dict(type='')",
    ],
)
def test_programs(text):
    assert not is_harmless_config(text)


def test_scopes_of_packages_that_are_imported():
    """A project of one's own is known once its registry is."""
    from mmengine.registry import Registry

    text = "a = dict(type='of_a_test.Net')"
    assert not is_harmless_config(text)
    Registry('of a test', scope='of_a_test', parent=MODELS)
    try:
        assert is_harmless_config(text)
    finally:
        del MODELS._children['of_a_test']
