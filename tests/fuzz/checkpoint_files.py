"""Checkpoints: damaged, forged and nonsensical, for everything in mmcare that reads one."""

import argparse
import functools
import importlib
import json
import operator
import os
import pickle
import random
import runpy
import struct
import subprocess
import sys
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fuzz.harness import BYTE_DAMAGE, Kind, Made
from fuzz.isolation import CANARY
from fuzz.models import CONFIG, TINY, build_classifier, build_runner
from mmengine.infer import BaseInferencer
from mmengine.logging import HistoryBuffer
from mmengine.runner import load_checkpoint
from safetensors.torch import save_file

from mmcare.checkpoint import convert_checkpoint, read_checkpoint, to_published
from mmcare.deploy.source import load_source
from mmcare.models import CARE

TOOLS = Path(__file__).parents[2] / 'tools'
CONTAINERS = ('zip', 'legacy')
CODE = f'open({CANARY!r}, "w").close()'
COMMAND = f'touch {CANARY}'
# mmengine puts the first value in the place of the second, which is its own pattern.
SUBSTITUTED = """\
# {{'$NOT_SET:open("CANARY","w")'}}
b = {{'$NOT_SET:open"CANARY","w"'}}
""".replace('CANARY', CANARY)


class Sources:
    """Undamaged files of every format, written once."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.config = folder / 'config.py'
        self.config.write_text(CONFIG)
        runner = build_runner(folder / 'work', epochs=2)
        runner.train()
        runner.save_checkpoint(str(folder), 'trained.pth')
        self.trained = folder / 'trained.pth'
        state = runner.model.state_dict()
        published = to_published(
            {key.removeprefix('backbone.'): value for key, value in state.items()}
        )
        training = dict(epoch=3, args=argparse.Namespace(lr=1e-3), metric=np.float64(78.4))
        self.published = folder / 'published.pth.tar'
        torch.save(dict(training, state_dict=published), self.published)
        self.legacy = folder / 'legacy.pth'
        torch.save(dict(state_dict=published), self.legacy, _use_new_zipfile_serialization=False)
        self.converted = folder / 'converted.safetensors'
        convert_checkpoint(self.published, self.converted)
        self.foreign = folder / 'foreign.safetensors'
        save_file({key: value.clone() for key, value in published.items()}, self.foreign)
        # Read before forking, so that children do not have to import what reading needs.
        for file in (self.trained, self.published, self.legacy, self.converted, self.foreign):
            read_checkpoint(file)

    def any_weights(self, rng: random.Random) -> Path:
        """One of the files that every entry but resuming takes."""
        return rng.choice([self.published, self.trained, self.legacy, self.converted, self.foreign])


# ---------------------------------------------------------------- entries


def run_tool(name: str, *arguments: object) -> None:
    """Run a tool in this process, as its command line would be."""
    sys.argv = [name, *map(str, arguments)]
    runpy.run_path(str(TOOLS / f'{name}.py'), run_name='__main__')


class WholeInferencer(BaseInferencer):
    """Made of a checkpoint alone, with the config that lies in it."""

    def _init_pipeline(self, cfg: Any) -> None:
        pass

    def preprocess(self, *_: Any, **__: Any) -> None:
        """Nothing is inferred."""

    visualize = postprocess = preprocess


def make_entries(sources: Sources) -> dict[str, Callable[[Path], Any]]:
    """Everything that reads checkpoints, by name; each gives tensors and numbers by name."""

    def load_from(file: Path) -> dict[str, Any]:
        model = build_classifier()
        load_checkpoint(model, str(file))
        return dict(model.state_dict())

    def init_cfg(file: Path, **prefix: str) -> dict[str, Any]:
        backbone = CARE(TINY, init_cfg=dict(type='Pretrained', checkpoint=str(file), **prefix))
        backbone.init_weights()
        return dict(backbone.state_dict())

    def convert(file: Path) -> dict[str, Any]:
        run_tool('convert_checkpoint', file, 'out.pth')
        return read_checkpoint('out.pth')['state_dict']

    def reparameterize(file: Path) -> dict[str, Any]:
        run_tool('reparameterize_model', sources.config, file, 'out.pth')
        return read_checkpoint('out.pth')['state_dict']

    def export(file: Path) -> dict[str, Any]:
        return dict(load_source(sources.config, file).backbone.state_dict())

    def resume(file: Path) -> dict[str, Any]:
        runner = build_runner(file.parent / 'work', epochs=3, resume=True, load_from=str(file))
        runner.train()
        state = runner.optim_wrapper.state_dict()['state']
        moments = {
            f'{index} {name}': value
            for index, values in state.items()
            for name, value in values.items()
        }
        numbers = {
            'epoch': runner.epoch,
            'iter': runner.iter,
            'last step': runner.param_schedulers[0].last_step,
        }
        return {**runner.model.state_dict(), **moments, **numbers}

    def infer(file: Path) -> dict[str, Any]:
        made = WholeInferencer(weights=str(file), device='cpu', scope='mmpretrain')
        return dict(made.model.state_dict())

    return {
        'load_from': load_from,
        'init_cfg': init_cfg,
        'init_cfg with prefix': functools.partial(init_cfg, prefix='backbone.'),
        'convert_checkpoint': convert,
        'reparameterize_model': reparameterize,
        'export_backbone': export,
        'resume': resume,
        'inferencer': infer,
    }


WEIGHTS_ONLY = (
    'load_from',
    'init_cfg',
    'init_cfg with prefix',
    'convert_checkpoint',
    'reparameterize_model',
    'export_backbone',
)


def judge(made: Made, read: Callable[[Path], Any], found: dict[str, Any]) -> str | None:
    """Compare with what the reference gives through the same entry."""
    if made.reference is None:
        return 'accepted'
    expected = read(made.reference)
    if expected.keys() != found.keys():
        return f'other names: {sorted(expected.keys() ^ found.keys())[:3]}'
    for key, value in expected.items():
        other = found[key]
        if not torch.equal(torch.as_tensor(value).double(), torch.as_tensor(other).double()):
            return f'{key} differs'
    return None


# ---------------------------------------------------------------- damage to bytes


def damage_bytes(name: str, sources: Sources) -> Callable[[Path, random.Random], Made]:
    """A family: one kind of damage to the bytes of any file."""

    def make(folder: Path, rng: random.Random) -> Made:
        source = sources.any_weights(rng)
        content, what = BYTE_DAMAGE[name](source.read_bytes(), rng)
        file = folder / source.name
        file.write_bytes(content)
        entries = (*WEIGHTS_ONLY, 'resume') if source == sources.trained else WEIGHTS_ONLY
        reference = None if name == 'something else' else source
        return Made(file, f'{source.name}: {what}', reference, entries=entries)

    return make


# ---------------------------------------------------------------- code


class Call:
    """Pickles as a call, with a state if one is given."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> tuple:
        return self.reduced

    def __call__(self) -> None:
        """What is called must be callable when it is pickled; nobody calls this."""
        raise NotImplementedError


def _dtype(code: str, *state: Any) -> Call:
    return Call(np.dtype, (code, False, True), state)


def _array(dtype: Any, data: Any, shape: tuple = (8,)) -> Call:
    reconstruct = np.empty(0).__reduce__()[0]
    return Call(reconstruct, (np.ndarray, (0,), b'b'), (1, shape, dtype, False, data))


def payloads() -> dict[str, Any]:
    """Objects whose unpickling runs code, reaches for what does, or forges memory."""
    module = Call(importlib.import_module, ('os',))
    pointers = b'\x41' * 64
    forged = '|', None, ('a',), {'a': (np.dtype('O'), 0)}, 8, 1
    scalar = np.float64(1).__reduce__()[0]
    called = Call(np.ndarray, ((1,), 'O', pointers[:8]))
    # A log buffer's method that hands on its argument, to set attributes of PyTorch's classes.
    hand_on, smallest = (Call(getattr, (HistoryBuffer, name)) for name in ('current', 'min'))
    inner = Call(argparse.Namespace, (), dict(as_subclass=hand_on))
    return {
        'os.system': Call(os.system, (COMMAND,)),
        'eval': Call(eval, (CODE,)),
        'exec': Call(exec, (CODE,)),
        'Popen': Call(subprocess.Popen, (COMMAND, -1, None, None, None, None, None, True, True)),
        'Path.touch': Call(Path.touch, (Path(CANARY),)),
        'open': Call(open, (CANARY, 'w')),
        'import, then getattr, then call': Call(Call(getattr, (module, 'system')), (COMMAND,)),
        '__import__': Call(__import__, ('antigravity',)),
        'getattr of builtins': Call(getattr, (Call(__import__, ('builtins',)), 'exec')),
        'getattr of globals': Call(getattr, (torch.save, '__globals__')),
        'getattr of HistoryBuffer': Call(getattr, (HistoryBuffer, '__init__')),
        'getattr of its globals': Call(
            getattr, (Call(getattr, (HistoryBuffer, 'mean')), '__globals__')
        ),
        'partial': Call(functools.partial, (os.system, COMMAND)),
        'map': Call(list, (Call(map, (eval, [CODE])),)),
        'attrgetter': Call(Call(operator.attrgetter, ('system',)), (module,)),
        'methodcaller': Call(Call(operator.methodcaller, ('system', COMMAND)), (module,)),
        'runpy': Call(runpy.run_path, (f'/tmp/{CANARY}.py',)),
        'pickle.loads': Call(pickle.loads, (pickle.dumps(Call(os.system, (COMMAND,))),)),
        'torch.load': Call(torch.load, ('other.pth', 'cpu', None)),
        'torch.hub': Call(torch.hub.load, ('nobody/nothing', 'nothing')),
        'state of a Namespace': Call(
            argparse.Namespace, (), {'__class__': Call(os.system, (COMMAND,))}
        ),
        'argument of a HistoryBuffer': Call(HistoryBuffer, (Call(eval, (CODE,)),)),
        'an object of a class': Path(CANARY),
        'bytes of a size': Call(bytes, (1 << 40,)),
        'a lambda': Call(eval, ('lambda: 0',)),
        'numpy.ndarray called': called,
        'numpy.ndarray called, in a set': Call(set, (called,)),
        'a class of numpy': np.dtype,
        'a numpy type': np.dtype('f8'),
        'attributes of PyTorch': Call(
            torch._tensor._rebuild_from_type_v2,
            (
                hand_on,
                Call(argparse.Namespace, (), dict(_log_history=[torch.Tensor])),
                (Call(argparse.Namespace, (), dict(_log_history=[inner])),),
                dict(copy_=set, isfinite=smallest),
            ),
        ),
        'statistics of all HistoryBuffers': Call(
            HistoryBuffer, (), dict(vars(HistoryBuffer()), statistics_methods={'mean': smallest})
        ),
        'numpy pointers': _array(_dtype('V8', 3, *forged, 5), pointers),
        'numpy pointers, unmarked': _array(_dtype('V8', 3, *forged, 0), pointers),
        'a numpy scalar with pointers': Call(scalar, (_dtype('V8', 3, *forged, 0), pointers[:8])),
        'numpy offsets': _array(
            _dtype('V8', 3, '|', None, ('a',), {'a': (np.dtype('f8'), 10**9)}, 8, 1, 0), pointers
        ),
        'numpy flags': _array(_dtype('f8', 3, '<', None, None, None, -1, -1, 63), pointers),
        'numpy objects': _array(_dtype('O8', 3, '|', None, None, None, -1, -1, 63), [1] * 8),
        'numpy shape': _array(_dtype('f8', 3, '<', None, None, None, -1, -1, 0), b'', (2**40,)),
        'negative numpy shape': _array(
            _dtype('f8', 3, '<', None, None, None, -1, -1, 0), pointers, (-2, -4)
        ),
    }


# Refused: it holds something beyond what training files hold. These hold nothing of the kind.
HARMLESS_PAYLOADS = ('numpy flags', 'statistics of all HistoryBuffers')


def make_code(sources: Sources) -> Callable[[Path, random.Random], Made]:
    """A family: code in one of several places of one of several containers."""

    def make(folder: Path, rng: random.Random) -> Made:
        name, payload = rng.choice(list(payloads().items()))
        container = rng.choice(['zip', 'legacy', 'pickle', 'pickle, protocol 0', 'zip, by hand'])
        place = rng.choice(['metadata', 'beside', 'weight', 'key', 'whole'])
        state = OrderedDict(read_checkpoint(sources.published)['state_dict'])
        checkpoint: Any = dict(state_dict=state, meta={})
        if place == 'metadata':
            checkpoint['meta'] = dict(time=payload)
        elif place == 'beside':
            checkpoint['message_hub'] = payload
        elif place == 'weight':
            state['stem.0.bias'] = payload
        elif place == 'key':
            checkpoint['meta'] = [(payload, 1)]
        else:
            checkpoint = payload
        file = folder / 'crafted.pth'
        if container in CONTAINERS:
            torch.save(checkpoint, file, _use_new_zipfile_serialization=container == 'zip')
        elif container == 'zip, by hand':
            with zipfile.ZipFile(file, 'w') as archive:
                archive.writestr('a/data.pkl', pickle.dumps(payload, rng.choice([0, 2, 4])))
                archive.writestr('a/version', '3\n')
                archive.writestr('a/byteorder', 'little')
        else:
            file.write_bytes(pickle.dumps(payload, 0 if container.endswith('0') else 4))
        harmless = name in HARMLESS_PAYLOADS and place in ('metadata', 'beside', 'key')
        reference = sources.published if harmless else None
        return Made(file, f'{name} in {container}, {place}', reference, entries=WEIGHTS_ONLY)

    return make


def make_config_code(sources: Sources) -> Callable[[Path, random.Random], Made]:
    """A family: programs in place of configs in a training checkpoint, which mmengine runs."""
    programs = (
        f'import os\nos.system({COMMAND!r})\n',
        CODE,
        f'model = [{CODE} for _ in (1,)]\n',
        f'gpu_ids = [__import__("os").system({COMMAND!r})]\n',
        f'gpu_ids = range(eval({CODE!r}) or 1)\n',
        f'a = dict(b=f"{{{CODE}}}")\n'.replace('"w"', "'w'"),
        "_base_ = './other.py'\n",
        'gpu_ids = (lambda: [0])()\n',
        'def f(): pass\n',
        'custom_imports = dict(imports="no_such_module_anywhere")\nx = y\n',
        'custom_imports = dict(imports=["antigravity"])\n',
        'custom_imports = {"imports": "antigravity"}\n',
        SUBSTITUTED,
        f'model = dict(type="os.system", command={COMMAND!r})\n',
        f'model = dict([("type", "os.system"), ("command", {COMMAND!r})])\n',
        f'model = dict(**dict(type="os.system"), command={COMMAND!r})\n',
        f'model = {{"type": "subprocess.Popen", "args": {COMMAND!r}, "shell": True}}\n',
        f'model = dict(type="mmengine.dist.utils.subprocess.Popen", args={COMMAND!r}, shell=1)\n',
        'model = dict(type="antigravity")\n',
        'model = dict(type="CARE", _scope_="antigravity")\n',
        'default_scope = "antigravity"\n',
        '\x00',
        'gpu_ids = [0',
        5,
        None,
        ['list'],
    )
    harmless = CONFIG, "default_scope = 'mmdet'\ngpu_ids = [0]\n"

    def make(folder: Path, rng: random.Random) -> Made:
        checkpoint = torch.load(sources.trained, weights_only=False)
        program = rng.choice([*programs, *harmless])
        place = rng.choice(['meta.config', 'meta.cfg', 'runtime_info.cfg'])
        runtime = checkpoint['message_hub']['runtime_info']
        entry = 'resume'
        if place != 'meta.config':
            entry = 'inferencer'
            del runtime['cfg'], checkpoint['meta']['cfg']
            if isinstance(program, str):  # what is built is described before it, unless it does
                program = CONFIG + program
        (runtime if 'runtime' in place else checkpoint['meta'])[place.rpartition('.')[2]] = program
        hidden = 'runtime' in place and rng.random() < 0.3
        if hidden:
            checkpoint['message_hub'] = _with_attribute(checkpoint['message_hub'], 'get', Counter)
        (folder / 'other.py').write_text(CODE)
        file = folder / 'crafted.pth'
        torch.save(checkpoint, file)
        # No config is handed on: a run resumes without it, an inferencer is refused.
        reference = sources.trained if entry == 'resume' else None
        words = file.name, 'Cannot find the config in the checkpoint'
        return Made(
            file, f'{place} = {program!r}{hidden * ", hidden"}'[-200:], reference, words, (entry,)
        )

    return make


# ---------------------------------------------------------------- archives


def make_archive(sources: Sources) -> Callable[[Path, random.Random], Made]:
    """A family: zip archives that unpack to much, or say one thing and hold another."""

    def make(folder: Path, rng: random.Random) -> Made:
        how = rng.choice(
            [
                'deflated',
                'bomb',
                'two of a name',
                'sizes',
                'offsets',
                'directory',
                'renamed',
                'without',
                'prefix',
            ]
        )
        file = folder / 'crafted.pth'
        reference: Path | None = None
        with zipfile.ZipFile(sources.published) as archive:
            entries = [(entry.filename, archive.read(entry)) for entry in archive.infolist()]
        chosen = rng.randrange(len(entries))
        if how == 'bomb':
            with zipfile.ZipFile(file, 'w', zipfile.ZIP_DEFLATED) as archive:
                for name, content in entries:
                    archive.writestr(name, bytes(64 << 20) if '/data/' in name else content)
        elif how in ('sizes', 'offsets'):
            content = bytearray(sources.published.read_bytes())
            places = [
                place
                for place in range(len(content) - 46)
                if content[place : place + 4] == b'PK\x01\x02'
            ]
            place = rng.choice(places) + (24 if how == 'sizes' else 42)
            content[place : place + 4] = struct.pack('<I', rng.getrandbits(31))
            file.write_bytes(content)
            reference = sources.published
        elif how == 'directory':
            content = bytearray(sources.published.read_bytes())
            start = content.index(b'PK\x01\x02')
            content[rng.randrange(start, len(content))] ^= 1 << rng.randrange(8)
            file.write_bytes(content)
            reference = sources.published
        elif how == 'prefix':
            file.write_bytes(rng.randbytes(100) + sources.published.read_bytes())
        else:
            packing = zipfile.ZIP_DEFLATED if how == 'deflated' else zipfile.ZIP_STORED
            with zipfile.ZipFile(file, 'w', packing) as archive:
                for index, (name, content) in enumerate(entries):
                    if index == chosen and how == 'without':
                        continue
                    if index == chosen and how == 'renamed':
                        name = f'{name}x'
                    archive.writestr(name, content)
                    if index == chosen and how == 'two of a name':
                        archive.writestr(name, rng.randbytes(len(content)))
            if how in ('without', 'renamed'):
                reference = sources.published  # some entries are not needed
        return Made(file, f'{how}, {entries[chosen][0]}', reference, entries=WEIGHTS_ONLY)

    return make


# ---------------------------------------------------------------- values


def odd_values(value: torch.Tensor) -> dict[str, Any]:
    """What may stand in place of a weight, and is none."""
    spoiled = value.clone().float().reshape(-1)
    nan, infinite = spoiled.clone(), spoiled.clone()
    nan[len(nan) // 2], infinite[-1] = float('nan'), float('-inf')
    shape = value.shape
    return {
        'NaN': nan.reshape(shape),
        'infinite': infinite.reshape(shape),
        'another shape': torch.zeros(*shape, 2),
        'transposed': torch.zeros(2, 3, 5),
        'no axes': torch.tensor(1.0),
        'empty': torch.zeros(0),
        'huge, repeated': torch.zeros(1).expand(1 << 40),
        'huge, 4 axes': torch.zeros(1, 1, 1, 1).expand(1 << 20, 1 << 20, 4, 4),
        'windows': torch.zeros(2000).as_strided((1000, 1000), (1, 1)),
        'integers': torch.ones(shape, dtype=torch.int64),
        'truth values': torch.ones(shape, dtype=torch.bool),
        'complex': torch.ones(shape, dtype=torch.complex64),
        'sparse': torch.ones(shape).to_sparse(),
        'quantized': torch.quantize_per_tensor(torch.ones(shape), 0.1, 0, torch.qint8),
        'without values': torch.empty(shape, device='meta'),
        'a list': [1.0, 2.0],
        'a number': 3,
        'text': 'weight',
        'None': None,
        'a dict': {'weight': torch.ones(shape)},
        'an array': np.ones(3),
        'a nested dict': functools.reduce(lambda inner, _: {'a': inner}, range(200), 1),
    }


def make_values(sources: Sources) -> Callable[[Path, random.Random], Made]:
    """A family: files that are whole, with values that no network can use."""

    def make(folder: Path, rng: random.Random) -> Made:
        source = rng.choice([sources.published, sources.trained])
        checkpoint = torch.load(source, weights_only=False)
        state = checkpoint['state_dict']
        keys = [key for key in state if not key.endswith('num_batches_tracked')]
        key = rng.choice([*keys, *[key for key in keys if 'stem' in key]])
        name, value = rng.choice(list(odd_values(state[key]).items()))
        state[key] = value
        file = folder / 'odd.pth'
        torch.save(checkpoint, file)
        heads = ('head.', 'dist_head.')
        of_head = key.startswith(heads)
        # Only entries that load the heads can say that a weight of theirs is unusable.
        entries = ('load_from', 'convert_checkpoint', 'reparameterize_model')
        return Made(file, f'{key}: {name}', entries=entries if of_head else WEIGHTS_ONLY)

    return make


ODD_KEYS = (
    *('stages', 'stages.', 'stem', 'stem.more', 'stages.0.blocks', 'stages.0.blocks.0'),
    *('stages.\u00b2.blocks.0.gamma', 'stages.0.blocks.\u00b2.x', f'stages.{"9" * 5000}.x'),
    *('stages.-1.blocks.0.gamma', 'stages.0.blocks.99.gamma'),
)
ODD_METADATA = (
    *(3, 'text', [1], {'': 5}, {'backbone': 'x'}, {'': {'version': 'new'}}, {5: {'version': 1}}),
    {part: {'assign_to_params_buffers': True} for part in ('', 'backbone')},
    {'': {'version': -(10**30)}},
)


def _with_attribute(state: dict[str, Any], name: str, value: Any) -> Call:
    """A pickled OrderedDict with an attribute, which may hide its methods."""
    return Call(OrderedDict, (), {name: value}, None, iter(list(state.items())))


def make_structure(sources: Sources) -> Callable[[Path, random.Random], Made]:
    """A family: files whose structure is another than expected."""
    odd = (None, 3, 'text', [1, 2], {}, (), torch.zeros(2), {'a': 1}, {3: torch.zeros(2)})

    def make(folder: Path, rng: random.Random) -> Made:
        source = rng.choice([sources.published, sources.trained])
        checkpoint = torch.load(source, weights_only=False)
        state = checkpoint['state_dict'] = OrderedDict(checkpoint['state_dict'])
        keys = list(state)
        file = folder / 'odd.pth'
        reference: Path | None = None
        entries = WEIGHTS_ONLY
        how = rng.choice(
            [
                'top',
                'state_dict',
                'key gone',
                'key more',
                'key',
                'attributes',
                'attributes elsewhere',
                'metadata',
                'half',
            ]
        )
        what: Any = ''
        if how == 'top':
            # A tensor may be a file of embeddings, which MM toolboxes read through the same loader.
            what = checkpoint = rng.choice([*odd[:6], *odd[7:]])
        elif how == 'state_dict':
            what = checkpoint['state_dict'] = rng.choice(odd)
        elif how == 'key gone':
            what = rng.choice([key for key in keys if 'head' not in key and 'num_' not in key])
            del state[what]
        elif how in ('key more', 'key'):
            prefix = 'backbone.' if source == sources.trained else ''
            what = rng.choice(ODD_KEYS)
            value = torch.zeros(2)
            if how == 'key':
                value = state.pop(rng.choice([key for key in keys if 'stem' in key]))
            what = rng.choice([prefix + what, 5, None, (1, 2), 2.5, b'stem.0.weight'])
            state[what] = value
        elif how == 'attributes':
            what = rng.choice(['items', 'keys', 'get', 'copy', 'pop', '__class__x', 'values'])
            checkpoint['state_dict'] = _with_attribute(state, what, rng.choice([3, 'text', [1]]))
            reference = source
        elif how == 'attributes elsewhere':
            # What is read through a method of its own is hidden from whoever calls that.
            checkpoint = torch.load(sources.trained, weights_only=False)
            what = rng.choice(['message_hub', 'meta', 'optimizer', 'runtime_info'])
            name = rng.choice(['get', 'items', 'keys', '__getitem__', 'setdefault'])
            owner = checkpoint['message_hub'] if what == 'runtime_info' else checkpoint
            owner[what] = _with_attribute(owner[what], name, rng.choice([Counter, 3, [1]]))
            reference, entries = sources.trained, ('resume',)
        elif how == 'metadata':
            what = rng.choice(ODD_METADATA)
            checkpoint['state_dict'] = _with_attribute(state, '_metadata', what)
            reference = source
        else:
            kind = rng.choice([torch.float64, torch.float16, torch.bfloat16])
            what = kind
            for key in keys:
                if state[key].is_floating_point():
                    state[key] = state[key].to(kind)
            if kind == torch.float64:
                reference = source
            else:  # rounded, as the file says
                reference = folder / 'reference.pth'
                rounded = torch.load(source, weights_only=False)
                rounded['state_dict'] = OrderedDict(
                    (key, value.float() if value.is_floating_point() else value)
                    for key, value in state.items()
                )
                torch.save(rounded, reference)
        torch.save(checkpoint, file)
        return Made(file, f'{how}: {what!r}'[:200], reference, entries=entries)

    return make


def make_safetensors(sources: Sources) -> Callable[[Path, random.Random], Made]:
    """A family: headers of .safetensors that lie."""

    def make(folder: Path, rng: random.Random) -> Made:
        source = rng.choice([sources.converted, sources.foreign])
        content = source.read_bytes()
        size = int.from_bytes(content[:8], 'little')
        header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
        keys = [key for key in header if key != '__metadata__']
        key = rng.choice(keys)
        entry = header[key]
        text: str | None = None
        length: int | None = None
        reference: Path | None = source
        how = rng.choice(
            [
                'length',
                'offsets',
                'shape',
                'dtype',
                'metadata',
                'JSON',
                'swapped',
                'gone',
                'checksum',
            ]
        )
        if how == 'length':
            length = rng.choice([0, 1, size - 1, size + 1, len(content), 1 << 40, (1 << 64) - 1])
        elif how == 'offsets':
            entry['data_offsets'] = rng.choice(
                [
                    [0, 1 << 50],
                    [-4, 0],
                    [8, 4],
                    [0, 0],
                    ['a', 'b'],
                    [0],
                    entry['data_offsets'][::-1],
                ]
            )
        elif how == 'shape':
            entry['shape'] = rng.choice(
                [[1 << 62, 4], [-1], [0], ['a'], None, [*entry['shape'], 2], [1 << 40, 1 << 40]]
            )
        elif how == 'dtype':
            entry['dtype'] = rng.choice(['F8_E4M3', 'I32', 'BF16', 'U8', 'X', None, 3, 'F64'])
        elif how == 'metadata':
            header['__metadata__'] = rng.choice(
                [3, {'a': 1}, ['x'], 'x', {'mmcare_checksum': '00'}, {'mmcare_sha256': '00'}]
            )
        elif how == 'JSON':
            text = rng.choice(
                ['', '{', '[]', 'null', '{"a": NaN}', '{"a": ' * 3000, '\ud800', '{}', '"x"']
            )
        elif how == 'swapped':
            others = [
                other for other in keys if header[other]['shape'] == entry['shape'] and other != key
            ]
            if others:
                other = header[rng.choice(others)]
                entry['data_offsets'], other['data_offsets'] = (
                    other['data_offsets'],
                    entry['data_offsets'],
                )
        elif how == 'gone':
            del header[key]
        else:
            header.get('__metadata__', {}).pop('mmcare_checksum', None)
        packed = (json.dumps(header) if text is None else text).encode('utf-8', 'surrogatepass')
        file = folder / source.name
        file.write_bytes(
            (len(packed) if length is None else length).to_bytes(8, 'little') + packed + data
        )
        return Made(file, f'{how}, {key}', reference, entries=WEIGHTS_ONLY)

    return make


def make_training_state(sources: Sources) -> Callable[[Path, random.Random], Made]:
    """A family: what a run resumes from besides weights is missing or odd."""
    odd = (None, -1, 'text', [], {}, [1], torch.zeros(2), {'a': 1})

    def make(folder: Path, rng: random.Random) -> Made:
        checkpoint = torch.load(sources.trained, weights_only=False)
        places = [(key,) for key in ('meta', 'message_hub', 'optimizer', 'param_schedulers')]
        places += [('meta', 'epoch'), ('meta', 'iter'), ('optimizer', 'state'), ('optimizer',)]
        places += [
            ('optimizer', 'param_groups'),
            ('generator_states',),
            ('message_hub', 'log_scalars'),
        ]
        place = rng.choice(places)
        values = checkpoint
        for part in place[:-1]:
            values = values[part]
        if rng.random() < 0.3:
            del values[place[-1]]
            what: Any = 'gone'
        else:
            what = values[place[-1]] = rng.choice(odd)
        file = folder / 'odd.pth'
        torch.save(checkpoint, file)
        return Made(file, f'{".".join(place)}: {what!r}', sources.trained, entries=('resume',))

    return make


def checkpoint_kind(folder: Path) -> Kind:
    """The kind, with undamaged files written to a folder."""
    sources = Sources(folder)
    families = {name: damage_bytes(name, sources) for name in BYTE_DAMAGE}
    families |= {
        'code': make_code(sources),
        'code in a config': make_config_code(sources),
        'archive': make_archive(sources),
        'values': make_values(sources),
        'structure': make_structure(sources),
        'safetensors header': make_safetensors(sources),
        'training state': make_training_state(sources),
    }
    return Kind('checkpoint', families, make_entries(sources), judge)
