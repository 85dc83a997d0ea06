"""Checkpoints that are made to run code, to reach into NumPy and PyTorch, or to mislead."""

import functools
import pickle
import runpy
import warnings
import zipfile
from argparse import Namespace
from collections import Counter, OrderedDict
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch
from exploits import CODE, Call, array, dtype, exploits, method
from helpers import THIN, thin_backbone
from mmengine.logging import HistoryBuffer
from mmengine.runner import CheckpointLoader, load_checkpoint
from torch import nn

from mmcare.models import CARE
from mmcare.weights import reading
from mmcare.weights.convert import convert_checkpoint
from mmcare.weights.published import to_published
from mmcare.weights.reading import CheckpointError, read_checkpoint, write_checkpoint


def save(content, folder, **options):
    torch.save(content, folder / 'file.pth', **options)
    return folder / 'file.pth'


@pytest.fixture(autouse=True)
def nothing_else_is_allowed():
    """Importing ExecuTorch, as coremltools does, allows classes of its own in the process."""
    allowed = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    yield
    torch.serialization.add_safe_globals(allowed)


@pytest.mark.parametrize('name', exploits())
def test_exploits_are_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path('antigravity.py').write_text(CODE)
    payload = exploits()[name]
    before = torch.Tensor.copy_, torch.Tensor.isfinite
    allowed = set(torch.serialization.get_safe_globals())
    for content in (payload, dict(meta=[payload]), dict(state_dict={'stem.norm.bias': payload})):
        for legacy in (False, True):
            file = save(content, tmp_path, _use_new_zipfile_serialization=not legacy)
            with pytest.raises(CheckpointError, match=r'file\.pth'):
                read_checkpoint(file)
    for protocol in (0, 2, 4) if name != 'a storage' else ():
        file.write_bytes(pickle.dumps(payload, protocol))
        with pytest.raises(CheckpointError, match=r'file\.pth'):
            read_checkpoint(file)
    assert not Path('canary').exists()
    assert (torch.Tensor.copy_, torch.Tensor.isfinite) == before
    assert set(torch.serialization.get_safe_globals()) == allowed


@pytest.mark.parametrize(
    'value',
    [
        np.arange(6, dtype='>i4').reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array(['sky', 'floor']),
        np.zeros((0, 3)),
        np.array(2.5),
        np.float32(2.5),
        np.str_('sky'),
        np.str_(''),
    ],
)
def test_numpy_values_are_what_was_saved(tmp_path, value):
    loaded, _, shared = read_checkpoint(save([value, {np.int64(3): 1}, (value,)], tmp_path))
    assert np.array_equal(loaded, value) and type(loaded) is type(value) and shared[0] is loaded
    assert loaded.dtype.newbyteorder('=') == value.dtype.newbyteorder('=')
    assert loaded.flags.writeable == value.flags.writeable
    assert loaded.flags.f_contiguous == value.flags.f_contiguous


def test_numpys_layout_is_not_the_files(tmp_path):
    flags = array(dtype('f8', 3, '<', None, None, None, -1, -1, 63), np.arange(8.0).tobytes())
    loaded = read_checkpoint(save(flags, tmp_path))
    assert np.array_equal(loaded, np.arange(8.0)) and loaded.dtype.flags == np.dtype('f8').flags


def test_objects_of_training_files_are_what_was_saved(tmp_path):
    buffer = HistoryBuffer([1.0, 3.0], [1, 2], max_length=7)
    inner = Namespace(sizes=[1, (2,)], nothing=Namespace(), mean=np.array([1.5]))
    saved = dict(buffer=(buffer,), args=Namespace(lr=0.1, inner=inner), counts=Counter('aab'))
    saved['self'] = saved
    loaded = read_checkpoint(save(saved, tmp_path))
    assert loaded['args'] == saved['args'] and loaded['counts'] == saved['counts']
    assert loaded['self'] is loaded and type(loaded['args'].inner.mean) is np.ndarray
    (found,) = loaded['buffer']
    assert type(found) is HistoryBuffer and found.max_length == 7
    for ours, theirs in zip(found.data, buffer.data, strict=True):
        assert type(ours) is np.ndarray and np.array_equal(ours, theirs)
    found.update(8.0)
    assert found.mean() == pytest.approx(12 / 4) and found.current() == 8.0


def test_a_buffer_does_not_change_its_class(tmp_path):
    state = dict(vars(HistoryBuffer([1.0], [1])), statistics_methods={'mean': method('min')})
    read_checkpoint(save(Call(HistoryBuffer, (), state), tmp_path))
    assert HistoryBuffer([1.0, 3.0], [1, 1]).statistics('mean') == 2.0


def test_attributes_are_dropped_everywhere(tmp_path):
    """An OrderedDict could hide what is in it, a tensor that it is not finite."""
    hidden = Call(OrderedDict, (), dict(keys=set, get=torch.Size), None, iter([('lr', 0.1)]))
    hub = OrderedDict(log_scalars={})
    hub.get = Counter
    tensor = torch.ones(2)
    tensor.isfinite = Counter
    tensor._backward_hooks = OrderedDict({0: Counter})
    saved = dict(message_hub=hub, deep=[(hub, {'a': tensor})], args=Call(Namespace, (), hidden))
    loaded = read_checkpoint(save(saved, tmp_path))
    assert loaded['message_hub'] == dict(log_scalars={}) and loaded['args'] == Namespace(lr=0.1)
    found, tensors = loaded['deep'][0]
    assert not vars(found) and not vars(tensors['a']) and not tensors['a']._backward_hooks


def test_readers_in_several_threads(tmp_path):
    """What is allowed while a file is read is allowed in all threads."""
    file = save(dict(args=Namespace(lr=0.1), value=np.float64(1)), tmp_path)
    allowed = set(torch.serialization.get_safe_globals())
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(read_checkpoint, [file] * 16))
    assert all(one == dict(args=Namespace(lr=0.1), value=1.0) for one in found)
    assert set(torch.serialization.get_safe_globals()) == allowed


class Allowed:
    """Of the program's own."""


def test_what_the_program_allows_stays_allowed(tmp_path):
    """Except the classes that have a stand-in."""
    mine = Allowed()
    mine.values = [np.arange(3)]
    file = save(dict(place=Fraction(1, 3), args=Namespace(a=[1]), mine=mine), tmp_path)
    with pytest.raises(CheckpointError, match='Fraction') as error:
        read_checkpoint(file)
    assert 'Re-running' not in str(error.value)  # PyTorch's advice to read the file unsafely
    with torch.serialization.safe_globals([Fraction, Allowed, Namespace]):
        allowed = set(torch.serialization.get_safe_globals())
        loaded = read_checkpoint(file)
        assert loaded['place'] == Fraction(1, 3) and loaded['args'] == Namespace(a=[1])
        assert loaded['mine'].values[0].tolist() == [0, 1, 2]
        for content in (method('mro'), HistoryBuffer):
            with pytest.raises(CheckpointError, match='cannot hold'):
                read_checkpoint(save(content, tmp_path))
        assert set(torch.serialization.get_safe_globals()) == allowed


@pytest.mark.parametrize('name', ['torch.distributed connect', 'builtins getattr', 'numpy dtype'])
def test_what_is_allowed_elsewhere_is_not_called(tmp_path, name):
    """PyTorch allows its classes for distributed tensors by itself; some open connections."""
    file, called = tmp_path / 'file.pth', []
    file.write_bytes(f'\x80\x02c{name}\n)R.'.replace(' ', '\n').encode('latin1'))
    allowed = torch.serialization.safe_globals([(lambda: called.append(1), name.replace(' ', '.'))])
    with allowed, pytest.raises(CheckpointError, match=r'file\.pth'):
        read_checkpoint(file)
    assert not called


ARCHIVES = [('double', 'same name'), ('compress', 'is compressed'), ('remove', 'cannot be read')]


@pytest.mark.parametrize(('how', 'words'), ARCHIVES)
def test_archives_that_torch_save_does_not_write(tmp_path, how, words):
    """Two entries of a name, of which readers choose differently; few bytes that become many."""
    file = save({'a': torch.arange(500.0)}, tmp_path)
    with zipfile.ZipFile(file) as archive:
        entries = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    packing = zipfile.ZIP_DEFLATED if how == 'compress' else zipfile.ZIP_STORED
    with zipfile.ZipFile(file, 'w', packing) as archive, warnings.catch_warnings(action='ignore'):
        for name, content in entries.items():
            if how != 'remove' or not name.endswith('data/0'):
                archive.writestr(name, content)
            if how == 'double' and name.endswith('data/0'):
                archive.writestr(name, bytes(2000))
    with pytest.raises(CheckpointError, match=rf'file\.pth.*{words}'):
        read_checkpoint(file)


# ------------------------------------------------------------ loading through mmengine


@pytest.fixture
def safe_loading(monkeypatch):
    """The opt-in, for one test."""
    monkeypatch.setattr(CheckpointLoader, '_schemes', dict(CheckpointLoader._schemes))
    runpy.run_module('mmcare.engine.safe_loading')  # without leaving it in sys.modules


@pytest.fixture
def state():
    return thin_backbone().state_dict()


def test_the_config_that_mmengine_runs_is_dropped(tmp_path, safe_loading):
    """Others stay: inferencers need them. MMEngine runs ``meta.config`` when it resumes."""
    config = "model = dict(type='os.system', command='touch executed')"
    hub = dict(runtime_info=dict(cfg=config, iter=2))
    meta = dict(config=config, cfg=config, epoch=1)
    file = save(dict(state_dict={}, meta=meta, message_hub=hub), tmp_path)
    checkpoint = CheckpointLoader.load_checkpoint(str(file))
    assert checkpoint['meta'] == dict(cfg=config, epoch=1) and checkpoint['message_hub'] == hub


def test_downloads_are_read_as_local_files(tmp_path, monkeypatch, state, safe_loading):
    """MMEngine's own loader for addresses runs what code a file brings."""
    served = tmp_path / 'served'
    served.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.hub, 'get_dir', lambda: str(tmp_path / 'kept'))
    monkeypatch.setattr(SimpleHTTPRequestHandler, 'log_message', lambda *_: None)
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(served))
    with ThreadingHTTPServer(('127.0.0.1', 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f'http://127.0.0.1:{server.server_port}'
        file = save(dict(state_dict=state), served)
        backbone = CARE(THIN)
        load_checkpoint(backbone, f'{address}/file.pth?download=1')
        assert torch.equal(backbone.stem.conv.weight, state['stem.conv.weight'])
        file.rename(served / 'other.pth')  # it is downloaded once
        load_checkpoint(CARE(THIN), f'{address}/file.pth')
        torch.save(exploits()['os.system'], served / 'code.pth')
        with pytest.raises(CheckpointError, match=r'code\.pth'):
            CheckpointLoader.load_checkpoint(f'{address}/code.pth')
        assert not Path('canary').exists()
        monkeypatch.setattr(reading, 'is_main_process', lambda: False)  # on another machine
        assert CheckpointLoader.load_checkpoint(f'{address}/other.pth')['state_dict']
        with pytest.raises(OSError, match='404'):
            CheckpointLoader.load_checkpoint(f'{address}/missing.pth')
        server.shutdown()


def test_metadata_cannot_change_how_weights_are_loaded(tmp_path, state, safe_loading):
    """PyTorch would put the file's own tensor, of its type, in place of the parameter."""
    state['stem.conv.weight'] = state['stem.conv.weight'].double()
    metadata = {'stem.conv': {'assign_to_params_buffers': True, 'version': 1}}
    crafted = Call(OrderedDict, (), {'_metadata': metadata, 'items': 3}, None, iter(state.items()))
    file = str(save(dict(state_dict=crafted), tmp_path))
    pretrained = CARE(THIN, init_cfg=dict(type='Pretrained', checkpoint=file))
    pretrained.init_weights()
    loaded = CARE(THIN)
    load_checkpoint(loaded, file)
    for weight in (pretrained.stem.conv.weight, loaded.stem.conv.weight):
        assert weight.dtype == torch.float32 and isinstance(weight, nn.Parameter)


@pytest.mark.parametrize(
    'content',
    [None, [1], {}, dict(state_dict=[1]), dict(state_dict={3: torch.ones(1)})],
    ids=str,
)
def test_files_without_weights(tmp_path, safe_loading, content):
    file = str(save(content, tmp_path))
    for load in (
        lambda: load_checkpoint(CARE(THIN), file),
        lambda: CARE(THIN, init_cfg=dict(type='Pretrained', checkpoint=file)).init_weights(),
        lambda: convert_checkpoint(file, tmp_path / 'out.pth'),
    ):
        with pytest.raises(CheckpointError, match=r'file\.pth'):
            load()


@pytest.mark.parametrize('key', ['stages', 'stages.', 'stages.²', 'stages.4.x', 'stem'])
def test_odd_keys(state, key):
    with pytest.raises(CheckpointError, match='not in the model'):
        CARE(THIN).load_state_dict({**state, key: torch.zeros(2)})


def test_a_network_larger_than_memory(tmp_path, state):
    """Of many TB, stored as single values: conversion compares shapes and allocates nothing."""
    huge = {k: torch.zeros(()).expand([n << 7 for n in v.shape]) for k, v in state.items()}
    for weights in (huge, to_published(huge)):
        with pytest.raises(CheckpointError, match=r'file\.pth does not hold the whole backbone'):
            convert_checkpoint(save(dict(state_dict=weights), tmp_path), tmp_path / 'out.pth')


def test_files_without_checksums_are_told(tmp_path, state, monkeypatch):
    messages = []
    monkeypatch.setattr(reading, 'print_log', lambda text, **_: messages.append(text))
    read_checkpoint(save(state, tmp_path, _use_new_zipfile_serialization=False))
    assert len(messages) == 1 and 'file.pth has no checksums' in messages[0]
    write_checkpoint(dict(meta=dict(epoch=1), state_dict=state), tmp_path / 'new.safetensors')
    read_checkpoint(tmp_path / 'new.safetensors')
    read_checkpoint(save(state, tmp_path))
    assert len(messages) == 1


def test_metadata_of_safetensors_is_under_the_checksum(tmp_path, state):
    file = tmp_path / 'file.safetensors'
    write_checkpoint(dict(meta=dict(source='original'), state_dict=state), file)
    file.write_bytes(file.read_bytes().replace(b'"original"', b'"otherone"'))
    with pytest.raises(CheckpointError, match=r'file\.safetensors is damaged'):
        read_checkpoint(file)
