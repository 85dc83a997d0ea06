"""What the fuzz run found in checkpoints, each by itself."""

import copy
import os
import pickle
from argparse import Namespace
from collections import Counter, OrderedDict
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import numpy as np
import pytest
import torch
from fuzz.checkpoint_files import Call, payloads
from fuzz.models import TINY
from mmengine.logging import HistoryBuffer
from mmengine.runner import CheckpointLoader, load_checkpoint
from torch import nn
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from mmcare import unpickling
from mmcare.checkpoint import (
    CheckpointError,
    convert_checkpoint,
    load_from_local_checked,
    read_checkpoint,
    to_published,
    trusting_configs,
    write_checkpoint,
)
from mmcare.models import CARE


@pytest.fixture
def messages(monkeypatch):
    texts = []
    monkeypatch.setattr('mmcare.checkpoint.print_log', lambda text, **_: texts.append(text))
    return texts


@pytest.fixture
def state():
    return OrderedDict(CARE(TINY).state_dict())


def save(content, folder):
    torch.save(content, folder / 'file.pth')
    return str(folder / 'file.pth')


@pytest.mark.parametrize(
    'value',
    [
        np.arange(6, dtype='>i4').reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array(['sky', 'floor']),
        np.array([True, False]),
        np.zeros((0, 3)),
        np.array(2.5),
        np.float32(2.5),
        np.str_('sky'),
        np.str_(''),
        np.complex128(1 + 2j),
    ],
)
def test_numpy_values_are_what_was_saved(tmp_path, value):
    loaded = read_checkpoint(save(dict(value=value), tmp_path))['value']
    assert np.array_equal(loaded, value)
    assert loaded.dtype.newbyteorder('=') == value.dtype.newbyteorder('=')
    # What was read is written as numpy's own, and needs no mmcare to be read.
    assert b'mmcare' not in pickle.dumps(loaded)
    assert np.array_equal(pickle.loads(pickle.dumps(loaded)), value)
    assert np.array_equal(copy.deepcopy(loaded), value)


def test_objects_of_training_files_are_what_was_saved(tmp_path):
    buffer = HistoryBuffer([1.0, 3.0], [1, 2], max_length=7)
    inner = Namespace(sizes=[1, (2,)], nothing=Namespace())
    saved = dict(buffer=buffer, args=Namespace(lr=0.1, inner=inner), counts=Counter('aab'))
    loaded = read_checkpoint(save(saved, tmp_path))
    assert loaded['args'] == saved['args'] and loaded['counts'] == saved['counts']
    assert type(loaded['buffer']) is HistoryBuffer and loaded['buffer'].max_length == 7
    for found, expected in zip(loaded['buffer'].data, buffer.data, strict=True):
        assert type(found) is np.ndarray and np.array_equal(found, expected)
    loaded['buffer'].update(8.0)
    assert loaded['buffer'].mean() == pytest.approx(12 / 4) and loaded['buffer'].current() == 8.0


def test_a_buffer_does_not_change_its_class(tmp_path):
    smallest = Call(getattr, (HistoryBuffer, 'min'))
    state = dict(vars(HistoryBuffer([1.0, 3.0], [1, 1])), statistics_methods={'mean': smallest})
    read_checkpoint(save(Call(HistoryBuffer, (), state), tmp_path))
    assert HistoryBuffer([1.0, 3.0], [1, 1]).statistics('mean') == 2.0


@pytest.mark.parametrize(
    'name', ['attributes of PyTorch', 'numpy.ndarray called', 'a class of numpy']
)
def test_what_could_reach_further_is_refused(tmp_path, name):
    copy_ = torch.Tensor.copy_
    with pytest.raises(CheckpointError, match=r'file\.pth'):
        read_checkpoint(save(dict(state_dict={}, meta=dict(a=payloads()[name])), tmp_path))
    assert torch.Tensor.copy_ is copy_


def test_state_that_hides_its_items(tmp_path):
    """An OrderedDict as the state of an object, whose `keys` are the file's."""
    state = Call(OrderedDict, (), dict(keys=set, get=torch.Size), None, iter([('lr', 0.1)]))
    file = save(dict(args=Call(Namespace, (), state)), tmp_path)
    assert read_checkpoint(file)['args'] == Namespace(lr=0.1)


@pytest.mark.parametrize('kind', ['storage', 'tensor class', 'type'])
def test_other_objects_are_refused(tmp_path, kind):
    value = {
        'storage': torch.ones(2).untyped_storage(),
        'tensor class': DTensorSpec,  # which PyTorch allows by itself
        'type': set,
    }[kind]
    with pytest.raises(CheckpointError, match=r'file\.pth'):
        read_checkpoint(save(dict(a=[value]), tmp_path))


def test_a_large_array_of_nothing(tmp_path):
    state = 1, (1 << 58,), Call(np.dtype, ('S0', False, True)), False, b''
    array = Call(np.empty(0).__reduce__()[0], (np.ndarray, (0,), b'b'), state)
    with pytest.raises(CheckpointError, match='empty texts'):
        read_checkpoint(save(dict(a=array), tmp_path))


def test_readers_in_several_threads(tmp_path):
    """What is allowed while a file is read holds for all threads."""
    file = save(dict(args=Namespace(lr=0.1), value=np.float64(1)), tmp_path)
    allowed = set(torch.serialization.get_safe_globals())
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(read_checkpoint, [file] * 16))
    assert all(one == dict(args=Namespace(lr=0.1), value=1.0) for one in found)
    assert set(torch.serialization.get_safe_globals()) == allowed


def test_an_array_is_filled_once():
    """A tensor may share its memory, which a second filling would give back."""
    array = unpickling._reconstruct(unpickling._Array, (0,), b'b')
    state = 1, (1,), unpickling._Dtype('f8'), False, bytes(8)
    array.__setstate__(state)
    with pytest.raises(pickle.UnpicklingError, match='filled once'):
        array.__setstate__(state)
    with pytest.raises(pickle.UnpicklingError, match='not called'):
        unpickling._Array.__new__(unpickling._Array, (1,), 'O', bytes(8))


def test_attributes_are_dropped_everywhere(tmp_path):
    """An OrderedDict could hide what is in it, a tensor that it is not finite."""
    hub = OrderedDict(runtime_info=dict(cfg='import os'), log_scalars={})
    hub.get = Counter
    tensor = torch.ones(2)
    tensor.isfinite = Counter
    tensor._backward_hooks = OrderedDict({0: Counter})
    loaded = read_checkpoint(save(dict(message_hub=hub, deep=[(hub, {'a': tensor})]), tmp_path))
    assert loaded['message_hub'] == dict(runtime_info={}, log_scalars={})
    found, tensors = loaded['deep'][0]
    assert not vars(found) and not vars(tensors['a']) and not tensors['a']._backward_hooks


def test_what_the_program_allows_is_kept(tmp_path):
    """But for the classes that have a stand-in."""
    file = save(dict(place=Fraction(1, 3), args=Namespace(a=[1])), tmp_path)
    with pytest.raises(CheckpointError, match='Fraction'):
        read_checkpoint(file)
    with torch.serialization.safe_globals([Fraction, Namespace, (print, 'builtins.getattr')]):
        allowed = set(torch.serialization.get_safe_globals())
        assert read_checkpoint(file) == dict(place=Fraction(1, 3), args=Namespace(a=[1]))
        with pytest.raises(CheckpointError, match='not allowed'):
            read_checkpoint(save(Call(getattr, (HistoryBuffer, 'mro')), tmp_path))
        assert set(torch.serialization.get_safe_globals()) == allowed


@pytest.mark.parametrize('value', [float('nan'), float('inf')])
def test_weights_that_are_not_finite(tmp_path, state, value, messages):
    state['stages.1.blocks.0.gamma'][2] = value
    file = save(dict(state_dict=state), tmp_path)
    words = r'file\.pth[\s\S]*stages\.1\.blocks\.0\.gamma has values that are not finite'
    for load in (
        lambda: load_checkpoint(CARE(TINY), file),
        lambda: CARE(TINY, init_cfg=dict(type='Pretrained', checkpoint=file)).init_weights(),
        lambda: convert_checkpoint(file, tmp_path / 'out.pth'),
    ):
        with pytest.raises(CheckpointError, match=words):
            load()
    other = save(dict(state_dict={'neck.weight': torch.tensor(value)}), tmp_path)
    CheckpointLoader.load_checkpoint(other)
    assert 'file.pth: neck.weight has values that are not finite' in messages[-1]


@pytest.mark.parametrize(
    ('value', 'words'),
    [
        (torch.ones(16, dtype=torch.int64), 'has values of torch.int64'),
        (torch.ones(16, device='meta'), 'has a shape only'),
        ([1.0] * 16, 'is a list, not a tensor'),
    ],
)
def test_values_that_are_no_weights(tmp_path, state, value, words):
    state['stem.norm.weight'] = value
    with pytest.raises(CheckpointError, match=f'stem.norm.weight {words}'):
        load_checkpoint(CARE(TINY), save(dict(state_dict=state), tmp_path))


@pytest.mark.parametrize('trusted', [False, True])
def test_configs_are_left_out(tmp_path, monkeypatch, messages, trusted):
    """An inferencer would build what they name, `type='os.system'` as well."""
    monkeypatch.setenv('MMCARE_TRUST_CONFIGS', str(int(trusted)))
    config = "model = dict(type='os.system', command='touch executed')"
    file = save(
        dict(
            state_dict={},
            meta=dict(config=config, cfg=config, epoch=1),
            message_hub=dict(runtime_info=dict(cfg=config, iter=2)),
        ),
        tmp_path,
    )
    checkpoint = read_checkpoint(file)
    kept = dict(cfg=config) if trusted else {}
    assert checkpoint['meta'] == dict(kept, epoch=1)  # config is of MMCV 1.x, and would be run
    assert checkpoint['message_hub']['runtime_info'] == dict(kept, iter=2)
    told = [text for text in messages if 'file.pth: the config in it is left out' in text]
    assert len(told) == (not trusted)
    with trusting_configs():
        assert read_checkpoint(file)['meta']['cfg'] == config
    assert os.environ['MMCARE_TRUST_CONFIGS'] == str(int(trusted))


def test_downloads_are_read_as_local_files(tmp_path, monkeypatch, state):
    """MMEngine's own loader for addresses runs what code a file brings."""
    served, kept = tmp_path / 'served', tmp_path / 'kept'
    served.mkdir()
    monkeypatch.setattr(torch.hub, 'get_dir', lambda: str(kept))
    handler = partial(SimpleHTTPRequestHandler, directory=str(served))
    monkeypatch.setattr(SimpleHTTPRequestHandler, 'log_message', lambda *_: None)
    with ThreadingHTTPServer(('127.0.0.1', 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f'http://127.0.0.1:{server.server_port}'
        save(dict(state_dict=state), served)
        backbone = CARE(TINY)
        load_checkpoint(backbone, f'{address}/file.pth?download=1')
        assert torch.equal(backbone.stem.conv.weight, state['stem.conv.weight'])
        (served / 'file.pth').unlink()  # it is downloaded once
        load_checkpoint(CARE(TINY), f'{address}/file.pth')
        torch.save(payloads()['os.system'], served / 'code.pth')
        with pytest.raises(CheckpointError, match=r'code\.pth'):
            CheckpointLoader.load_checkpoint(f'{address}/code.pth')
        with monkeypatch.context() as patch:  # rank 0 of another machine has its own copy
            patch.setattr('mmcare.checkpoint.is_main_process', lambda: False)
            torch.save(dict(state_dict=state), served / 'other.pth')
            assert CheckpointLoader.load_checkpoint(f'{address}/other.pth')['state_dict']
        with pytest.raises(OSError, match='404'):
            CheckpointLoader.load_checkpoint(f'{address}/missing.pth')
        server.shutdown()


def test_metadata_cannot_change_how_weights_are_loaded(tmp_path, state):
    """PyTorch would put the file's own tensor, of its type, in place of the parameter."""
    state['stem.conv.weight'] = state['stem.conv.weight'].double()
    metadata = {'stem.conv': {'assign_to_params_buffers': True, 'version': 1}}
    file = save(dict(state_dict=state), tmp_path)
    crafted = Call(OrderedDict, (), {'_metadata': metadata, 'items': 3}, None, iter(state.items()))
    backbone = CARE(TINY)
    load_checkpoint(backbone, save(dict(state_dict=crafted), tmp_path))
    assert backbone.stem.conv.weight.dtype == torch.float32
    assert isinstance(backbone.stem.conv.weight, nn.Parameter)
    found = load_from_local_checked(file)['state_dict']._metadata
    assert all(values.keys() <= {'version', 'file'} for values in found.values())


def test_files_that_are_saved_again_do_not_tell_where_they_were(tmp_path):
    state = CARE(TINY).state_dict()
    loaded = load_from_local_checked(save(dict(state_dict=state), tmp_path))['state_dict']
    assert loaded._metadata['']['file'] == str(tmp_path / 'file.pth')
    again = read_checkpoint(save(dict(state_dict=loaded), tmp_path))['state_dict']._metadata
    assert again['stem.conv'] == {'version': 1} and str(tmp_path) not in str(again)


def test_a_network_larger_than_memory(tmp_path, state):
    """Conversion takes shapes from the file: here of many TB, stored as single values."""
    sizes = {size: size << 14 for size in (4, 8, 12, 16, 24, 32)}
    huge = {
        key: torch.zeros(()).expand(tuple(sizes.get(size, size) for size in value.shape))
        for key, value in state.items()
    }
    with pytest.raises(CheckpointError, match='holds more values than the file'):
        convert_checkpoint(save(dict(state_dict=huge), tmp_path), tmp_path / 'out.pth')


def test_files_without_checksums_are_told(tmp_path, state, messages):
    published = to_published(state)
    torch.save(published, tmp_path / 'old.pth', _use_new_zipfile_serialization=False)
    read_checkpoint(tmp_path / 'old.pth')
    assert 'old.pth has no checksums' in messages[-1]
    write_checkpoint(dict(meta=dict(epoch=1), state_dict=published), tmp_path / 'new.safetensors')
    count = len(messages)
    read_checkpoint(tmp_path / 'new.safetensors')
    assert len(messages) == count


def test_metadata_of_safetensors_is_under_the_checksum(tmp_path, state):
    file = tmp_path / 'file.safetensors'
    write_checkpoint(dict(meta=dict(source='original'), state_dict=state), file)
    file.write_bytes(file.read_bytes().replace(b'"original"', b'"otherone"'))
    with pytest.raises(CheckpointError, match=r'file\.safetensors is damaged'):
        read_checkpoint(file)


@pytest.mark.parametrize(
    'content', [None, 3, [1], 'text', dict(state_dict=[1]), {3: torch.ones(1)}]
)
def test_what_holds_no_weights(tmp_path, content):
    if isinstance(content, dict) and 'state_dict' not in content:
        content = dict(state_dict=content)
    with pytest.raises(CheckpointError, match=r'file\.pth'):
        load_checkpoint(CARE(TINY), save(content, tmp_path))


@pytest.mark.parametrize('key', ['stages', 'stages.', 'stages.²', f'stages.{"9" * 5000}.x', 'stem'])
def test_odd_keys(tmp_path, state, key):
    state[key] = torch.zeros(2)
    with pytest.raises(CheckpointError, match='not in the model'):
        load_checkpoint(CARE(TINY), save(dict(state_dict=state), tmp_path))


def test_switches_are_no_text():
    with pytest.raises(TypeError, match="norm_eval must be True or False, got 'False'"):
        CARE(TINY, norm_eval='False')
