"""Configs: text that is broken, and arguments of backbone and head that make no sense.

Configs are programs and are run by whoever reads them: code in them is no finding here.
"""

import inspect
import pprint
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fuzz.checkpoint_files import Sources, run_tool
from fuzz.harness import Kind, Made
from fuzz.models import CONFIG, IN_CHANNELS, NUM_CLASSES, TINY
from mmengine.config import Config
from mmengine.registry import MODELS

from mmcare.analysis.counting import build_model
from mmcare.deploy.source import load_source
from mmcare.models import CARE

NAN = float('nan')
# Values that each argument of the backbone must refuse.
BAD_ARGUMENTS: dict[str, tuple] = {
    'arch': (
        *('s9', '', 3, None, [], {}, 'S0', dict(depths=(1, 1, 1, 1))),
        *(
            {**TINY, 'depths': value}
            for value in ((1, 1, 1), (1, 1, 1, 0), (1, 1, 1, 1.5), 4, 'abcd')
        ),
        *({**TINY, 'widths': value} for value in ((12, 12, 24, 25), (-12, 12, 24, 24), None)),
        *({**TINY, 'memory_widths': value} for value in ((4, 4, 8, -8), (NAN,) * 4, ('4',) * 4)),
        *({**TINY, 'expansions': value} for value in ((2, 2, 2, 2), ((2,),) * 4, ((2, 0),) * 4)),
        *({**TINY, 'head_channels': value} for value in ((1, 1, 3, 8), (1, 1, 4, 0), (True,) * 4)),
        {**TINY, 'more': 1},
    ),
    'in_channels': (0, -3, 2.5, '3', None, [3], NAN, True),
    'out_indices': ((), (4,), (-1,), (3, 2), (1, 1), 'abc', 3, None, (0.5,), ('0',), [[0]], {0: 1}),
    'drop_path_rate': (-0.1, 1, 1.5, NAN, 'x', None, [0.1], float('inf'), False),
    'layer_scale_init_value': (-1, NAN, float('inf'), 'x', None, [1], True),
    'frozen_stages': (-2, 5, 1.5, 'x', None, [1]),
    'norm_eval': ('False', 'x', 2, None, []),
    'norm_cfg': ('BN', dict(requires_grad=True), dict(type='NoSuch'), 3, dict(type=None), ['BN']),
    'act_cfg': ('GELU', dict(inplace=True), dict(type='NoSuch'), 3, dict(type=None), ['GELU']),
    'with_cp': ('False', 'x', 2, None),
    'out_norm_cfg': ('BN', dict(eps=1), dict(type='NoSuch'), 3),
    'expand_last': ('False', 2, None),
    'feature_map': ('relu', None, 3, [], ''),
    'decoupling': ('none', None, 3, [], ''),
    'inter1': ('False', 2, None),
    'inter2': ('False', 2, None),
    'memory': ('False', 2, None),
    'early_conv': ('False', 2, None),
    'multi_scale': ('False', 2, None),
    'deploy': ('False', 2, None),
    'init_cfg': (
        *('x', 3, dict(type='NoSuch'), dict(type='Pretrained'), dict(checkpoint='a.pth'), ['x']),
        *(dict(type='Pretrained', checkpoint=value) for value in ('nowhere.pth', None, 5, '')),
    ),
    'arc': ('s0',),
    'type': ('NoSuch', 'mmcare.NoSuch', None, 3, 'nowhere.CARE', ''),
}
# The same for the head.
BAD_HEAD_ARGUMENTS: dict[str, tuple] = {
    'num_classes': (0, -3, 2.5, '3', None, [3], NAN, True),
    'in_channels': (0, -3, 2.5, '3', None, [3], NAN, True),
    'topk': (0, -1, 2.5, '1', None, (), (1, 0), (1, '5'), (True,), NAN),
    'cal_acc': ('False', 2, None, []),
    'deploy': ('False', 2, None, []),
}
# Exporting sets these itself, whatever the config says.
NOT_EXPORTED = ('frozen_stages', 'with_cp', 'init_cfg', 'layer_scale_init_value', 'deploy')
COMPARED = (
    'in_channels',
    'out_indices',
    'drop_path_rate',
    'norm_eval',
    'feature_map',
    'decoupling',
)


def _arguments(backbone: CARE) -> dict[str, Any]:
    found = {name: getattr(backbone, name) for name in COMPARED}
    return {**found, 'arch': backbone.arch}


def make_entries(sources: Sources) -> dict[str, Callable[[Path], dict[str, Any]]]:
    """What builds a backbone from a config; each gives its arguments."""

    def build(file: Path) -> dict[str, Any]:
        backbone = MODELS.build(Config.fromfile(file).model.backbone)
        backbone.init_weights()
        return _arguments(backbone)

    def count(file: Path) -> dict[str, Any]:
        _, network = build_model(str(file))
        return _arguments(network.backbone)

    def export(file: Path) -> dict[str, Any]:
        return _arguments(load_source(file).backbone)

    def reparameterize(file: Path) -> dict[str, Any]:
        run_tool('reparameterize_model', file, sources.published, 'out.pth')
        return build(file)

    return dict(build=build, complexity=count, export=export, reparameterize_model=reparameterize)


def judge(made: Made, read: Callable[[Path], Any], found: dict[str, Any]) -> str | None:
    """Compare with what the text says by itself; odd arguments are never accepted."""
    if made.words:
        return 'accepted'
    namespace: dict[str, Any] = {}
    exec(made.file.read_text(), namespace)
    given = {
        name: parameter.default for name, parameter in inspect.signature(CARE).parameters.items()
    }
    given |= namespace['model']['backbone']
    arch = given['arch']
    given['arch'] = CARE.arch_zoo[arch] if isinstance(arch, str) else arch
    for name, value in found.items():
        wanted = tuple(given[name]) if isinstance(value, tuple) else given[name]
        if repr(value) != repr(wanted):
            return f'{name} is {value!r}, not {given[name]!r}'
    return None


TOOLS_ONLY = ('complexity', 'export', 'reparameterize_model')  # building is MMEngine's there


def make_text(folder: Path, rng: random.Random) -> Made:
    """A family: the text is damaged."""
    text = CONFIG
    how = rng.choice(['cut', 'character', 'line gone', 'line doubled', 'indented', 'put', 'whole'])
    lines = text.splitlines(keepends=True)
    number = rng.randrange(len(lines))
    place = rng.randrange(len(text))
    what: Any = number
    if how == 'cut':
        text, what = text[:place], place
    elif how == 'character':
        what = place, rng.choice(list('()[]{}\'"=,:#\\\n\t\x00x'))
        text = text[:place] + what[1] + text[place + 1 :]
    elif how == 'line gone':
        text = ''.join(lines[:number] + lines[number + 1 :])
    elif how == 'line doubled':
        text = ''.join(lines[:number] + lines[number : number + 1] * 2 + lines[number + 1 :])
    elif how == 'indented':
        text = ''.join([*lines[:number], '  ', *lines[number:]])
    elif how == 'put':
        what = rng.choice(
            [
                'raise KeyError("x")\n',
                '1 / 0\n',
                'import no_such_module\n',
                'undefined\n',
                "_base_ = './missing.py'\n",
                "_base_ = './broken.py'\n",
                '_base_ = 5\n',
                "_base_ = ['./missing.py', None]\n",
                'x = {{_base_.no_such}}\n',
                "custom_imports = dict(imports=['no_such_module'])\n",
                'custom_imports = 5\n',
                'default_scope = "no_such"\n',
                'default_scope = 5\n',
                'import sys\nsys.exit("leaves")\n',
                'def f(): f()\nf()\n',
                'model = 5\n',
                'model = None\n',
                'model = []\n',
                'model = dict(backbone=5)\n',
                "model = dict(type='NoSuch')\n",
                'model = dict(backbone=dict(type="mmcare.CARE", arch=[1]))\n',
                'del model\n',
            ]
        )
        text += what
    else:
        text = rng.choice(
            ['', '\n', '\x00\x00', '\ufeff', 'é' * 30, '<html></html>', '{"model": 1}']
        )
        what = text
    (folder / 'broken.py').write_text('model = dict(\n')
    file = folder / 'broken_config.py'
    encoding = rng.choice(['utf-8', 'utf-8', 'utf-8', 'utf-16', 'latin-1'])
    file.write_bytes(text.encode(encoding, 'replace'))
    return Made(file, f'{how} {what!r}, {encoding}', entries=TOOLS_ONLY)


def make_argument(folder: Path, rng: random.Random) -> Made:
    """A family: an argument of the backbone has a value that makes no sense."""
    name = rng.choice(list(BAD_ARGUMENTS))
    value = rng.choice(BAD_ARGUMENTS[name])
    backbone = {'type': 'mmcare.CARE', 'arch': TINY, 'out_indices': (3,), name: value}
    file = _write_odd(folder, 'backbone', backbone)
    entries = ('build', 'complexity', 'export')
    if name in NOT_EXPORTED:
        entries = ('build',)
    elif name == 'type':  # what builds from any config says that a name is unknown
        entries = ('complexity', 'export')
    words = (file.name,) if name == 'type' else (name,)
    return Made(file, f'{name}={value!r}', words=words, entries=entries)


def make_head_argument(folder: Path, rng: random.Random) -> Made:
    """A family: an argument of the head has a value that makes no sense."""
    name = rng.choice(list(BAD_HEAD_ARGUMENTS))
    value = rng.choice(BAD_HEAD_ARGUMENTS[name])
    sizes = dict(num_classes=NUM_CLASSES, in_channels=IN_CHANNELS)
    file = _write_odd(folder, 'head', {'type': 'mmcare.CAREClsHead', **sizes, name: value})
    return Made(file, f'{name}={value!r}', words=(name,), entries=('complexity',))


def _write_odd(folder: Path, part: str, config: dict[str, Any]) -> Path:
    """Write the config with another backbone or head."""
    file = folder / 'odd_config.py'
    file.write_text(
        f"nan, inf = float('nan'), float('inf')\n{CONFIG}"
        f"model['{part}'] = {pprint.pformat(config, sort_dicts=False)}\n"
    )
    return file


def config_kind(folder: Path) -> Kind:
    """The kind, with undamaged files written to a folder."""
    entries = make_entries(Sources(folder))
    families = {'text': make_text, 'argument': make_argument, 'head argument': make_head_argument}
    return Kind('config', families, entries, judge)
