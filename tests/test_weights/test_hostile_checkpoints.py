"""Checkpoints that are made to run code, to reach into NumPy and PyTorch, or to mislead."""

import pickle
import struct
import tarfile
import traceback
import zipfile
import zlib
from argparse import Namespace
from collections import Counter, OrderedDict
from contextlib import nullcontext
from fractions import Fraction
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch
from exploits import Call, dtype, exploits
from helpers import IS_NEW, THIN, Images, thin_backbone, warned
from mmengine.config import ConfigDict
from mmengine.logging import HistoryBuffer
from mmengine.runner import CheckpointLoader, load_checkpoint
from mmengine.runner.checkpoint import load_from_local
from torch import nn
from toy_training import build

from mmcare.convert import convert_checkpoint
from mmcare.models import CARE
from mmcare.weights import reading, unpickling
from mmcare.weights.reading import CheckpointError, read_checkpoint, safe_loader, write_checkpoint

HAS_LIST = hasattr(torch.serialization, 'safe_globals')  # of allowed classes; from PyTorch 2.5 on
has_list = pytest.mark.skipif(not HAS_LIST, reason='this PyTorch has no list of allowed classes')


def save(content, folder, **options):
    folder.mkdir(exist_ok=True)
    torch.save(content, folder / 'file.pth', **options)
    return folder / 'file.pth'


@pytest.fixture(autouse=True)
def nothing_else_is_allowed():
    """Importing ExecuTorch, as coremltools does, allows classes of its own in the process."""
    if not HAS_LIST:
        yield
        return
    allowed = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    yield
    torch.serialization.add_safe_globals(allowed)


def is_plain(value):
    if isinstance(value, dict):
        return not set(vars(value) if type(value) is OrderedDict else ()) - {'_metadata'} and all(
            map(is_plain, [*value, *value.values()])
        )
    if type(value) in (list, tuple):
        return all(map(is_plain, value))
    return type(value) in (type(None), bool, int, float, str, bytes, set, torch.Tensor)


@pytest.mark.parametrize('name', exploits())
def test_exploits_are_refused_or_removed(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    payload = exploits()[name]
    before = torch.Tensor.copy_, torch.Tensor.isfinite
    files = [Path(f'{number}.pth') for number in range(9)]
    contents = payload, dict(meta=[payload]), dict(state_dict={'a': payload})
    for number, content in enumerate(contents):
        for legacy in (0, 1):
            options = dict(_use_new_zipfile_serialization=not legacy)
            torch.save(content, files[2 * number + legacy], **options)
    for file, protocol in zip(files[6:], (0, 2, 4) if name != 'a storage' else ()):
        file.write_bytes(pickle.dumps(payload, protocol))
    for file in filter(Path.exists, files):
        try:
            content = read_checkpoint(file)
        except CheckpointError as error:
            assert file.name in str(error)
        else:
            assert file in files[2:6] and is_plain(content) and not next(iter(content.values()), 0)
    assert not Path('canary').exists()
    assert (torch.Tensor.copy_, torch.Tensor.isfinite) == before
    assert not unpickling.allowed()


def test_foreign_objects_are_removed(tmp_path, logged):
    """NumPy's numbers become Python's: mmseg keeps the best score as one."""
    saved = dict(
        runtime_info=dict(best_score=np.float32(0.5), epoch=np.int64(3), flag=np.bool_(True)),
        log_scalars=dict(loss=HistoryBuffer([1.0], [1])),
        args=Namespace(lr=0.1),
        arrays=[np.array([None])],
        text=np.str_('sky'),
        nested=[dict(mean=np.array(['a']), std=2.0)],
        dataset_meta=dict(info=ConfigDict(name=ConfigDict(first='a'))),
    )
    loaded = read_checkpoint(save(saved, tmp_path))
    info = dict(best_score=0.5, epoch=3, flag=True)
    meta = loaded.pop('dataset_meta')['info']
    assert loaded == dict(runtime_info=info, log_scalars={}, nested=[dict(std=2.0)])
    assert meta == dict(name=dict(first='a')) and type(meta) is type(meta['name']) is dict
    assert [type(value) for value in loaded['runtime_info'].values()] == [float, int, bool]
    (text,) = warned(logged, 'Left out')
    names = 'args (Namespace), arrays (ndarray), text (scalar), nested.mean (ndarray)'
    assert text.endswith(f'since they are not plain values: {names}')


@pytest.mark.parametrize('legacy', [False, True])
def test_arrays_of_numbers_are_read(tmp_path, logged, legacy):
    """mmpose keeps the standard deviations of keypoints and their colors as such."""
    dtypes = [*unpickling.DTYPES, '>f4', '>i2']
    arrays = {name: np.arange(6).reshape(2, 3).astype(name) for name in dtypes}
    arrays.update(
        empty=np.ones((0, 2)), scalar=np.array(3.0), columns=np.arange(6.0).reshape(2, 3).T
    )
    arrays['listed'] = [arrays['f4'], arrays['f4']]
    options = dict(_use_new_zipfile_serialization=not legacy)
    loaded = read_checkpoint(save(dict(meta=arrays), tmp_path, **options))['meta']
    listed, _ = loaded.pop('listed'), arrays.pop('listed')
    assert listed[0] is listed[1] is loaded['f4'] and loaded.keys() == arrays.keys()
    for name, array in arrays.items():
        assert loaded[name].dtype == array.dtype and np.array_equal(loaded[name], array)
        assert loaded[name].flags.writeable
    assert not warned(logged, 'Left out')


@pytest.mark.parametrize(
    'state',
    [
        (1, (8,), dtype('f8', 3, '<', None, None, None, -1, -1, 0), False, b'short'),
        (1, (-1, -1), dtype('u1', 3, '|', None, None, None, -1, -1, 0), False, b'a'),
        (1, (0, 1 << 62), dtype('u1', 3, '|', None, None, None, -1, -1, 0), False, b''),
        (1, (1,), dtype('b1', 3, '|', None, None, None, -1, -1, 0), False, b'a'),
        (1, (1,), dtype('U1', 3, '<', None, None, None, 4, 4, 0), False, b'a' * 4),
        (1, (1,), np.dtype, False, b'a'),
        (1, 'a'),
        None,
    ],
)
def test_forged_arrays_are_removed(tmp_path, logged, state):
    forged = Call(np.empty(0).__reduce__()[0], (np.ndarray, (0,), b'b'), state)
    assert read_checkpoint(save(dict(meta=dict(a=forged, b=1)), tmp_path))['meta'] == dict(b=1)
    assert warned(logged, 'values: meta.a (ndarray)')


def test_forged_arrays_share_their_bytes(tmp_path):
    """Otherwise a small file could become a large one in memory."""
    kind = dtype('u1', 3, '|', None, None, None, -1, -1, 0)
    state = 1, (8,), kind, False, b'12345678'
    arrays = [Call(np.empty(0).__reduce__()[0], (np.ndarray, (0,), b'b'), state) for _ in range(2)]
    first, second = read_checkpoint(save(dict(arrays=arrays), tmp_path))['arrays']
    assert np.shares_memory(first, second)


def test_attributes_are_dropped_everywhere(tmp_path):
    """An OrderedDict could hide what is in it, a tensor that it is not finite."""
    hub = OrderedDict(log_scalars={})
    hub.get = Counter
    tensor = torch.ones(2)
    tensor.isfinite = Counter
    hooked = Call(torch._utils._rebuild_parameter, (tensor, True, OrderedDict({0: Counter})))
    loaded = read_checkpoint(save(dict(deep=[(hub, {'a': tensor, 'b': hooked})]), tmp_path))
    found, tensors = loaded['deep'][0]
    assert found == dict(log_scalars={}) and not vars(found)
    assert not vars(tensors['a']) and not tensors['b']._backward_hooks


def rewrite(file, change):
    """Write an archive again, with ``change(name, content)`` in place of each record's content."""
    with zipfile.ZipFile(file) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, 'w') as archive:
        for name, content in records.items():
            for copy in change(name, content):
                archive.writestr(*copy)


def test_storages_are_as_large_as_their_records(tmp_path):
    """PyTorch before 2.10 reads whatever lies behind them in memory."""
    file = save(dict(a=torch.zeros(1000)), tmp_path)
    size = (10**8).to_bytes(4, 'little')
    rewrite(file, lambda name, content: [(name, content.replace(b'M\xe8\x03', b'J' + size))])
    with pytest.raises(CheckpointError, match='another size than its record'):
        read_checkpoint(file)


@pytest.mark.filterwarnings('ignore:Duplicate name')
@pytest.mark.parametrize(
    'change',
    [
        lambda name, content: [(name, content, zipfile.ZIP_DEFLATED)],
        lambda name, content: [(name, content), (name, content)],
        lambda name, content: [(name, content), (name.upper(), content)],
        lambda name, content: [(name, content), (f'{name}/', b'')],
    ],
    ids=['compressed', 'twice', 'upper case', 'directory'],
)
def test_records_that_torch_does_not_write(tmp_path, change):
    file = save(dict(a=torch.zeros(1000)), tmp_path)
    rewrite(file, change)
    with pytest.raises(CheckpointError, match=r'records as torch\.save does not write them'):
        read_checkpoint(file)


def test_overlapping_records(tmp_path):
    """Each contains the next ones, so that reading them takes far more memory than the file."""
    nested, headers = b'x' * 1000, []
    for number in range(50):
        header = zipfile.ZipInfo(f'archive/data/{number}')
        header.CRC, header.file_size = zlib.crc32(nested), len(nested)
        header.compress_size = len(nested)
        nested = header.FileHeader() + nested
        headers.append((header, len(nested)))
    with zipfile.ZipFile(tmp_path / 'file.pth', 'w') as archive:
        archive.fp.write(nested)
        for header, length in headers:
            header.header_offset = len(nested) - length
            archive.filelist.append(header)
        archive.start_dir, archive._didModify = len(nested), True
    with pytest.raises(CheckpointError, match=r'records as torch\.save does not write them'):
        read_checkpoint(tmp_path / 'file.pth')


def test_two_directories(tmp_path):
    """Python reads the one before the end, PyTorch the one at the place that the end names."""
    parts = []
    for size, method in (10_000_000, zipfile.ZIP_DEFLATED), (16, zipfile.ZIP_STORED):
        source, target = zipfile.ZipFile(save(dict(a=torch.zeros(size)), tmp_path)), BytesIO()
        with zipfile.ZipFile(target, 'w') as archive:
            for name in source.namelist():
                archive.writestr(zipfile.ZipInfo(name), source.read(name), method)
        content, start = target.getvalue(), archive.start_dir
        end = content.rindex(b'PK\5\6')
        parts.append((content[:start], content[start:end], bytearray(content[end:])))
    (hidden, directory, _), (shown, second, ending) = parts
    # Python adds to all offsets how far the second directory is from where the end says it is.
    shift = len(directory + shown)
    entries, place = bytearray(second), 0
    while place < len(entries):
        lengths = struct.unpack_from('<3H', entries, place + 28)
        (offset,) = struct.unpack_from('<I', entries, place + 42)
        offset += len(hidden + directory) - shift
        struct.pack_into('<I', entries, place + 42, offset)
        place += 46 + sum(lengths)
    struct.pack_into('<2I', ending, 12, len(directory), len(hidden))
    file = tmp_path / 'two.pth'
    file.write_bytes(hidden + directory + shown + entries + ending)
    if IS_NEW:
        assert len(torch._C.PyTorchFileReader(str(file)).get_record('data/0')) == 40_000_000
    assert torch.equal(read_checkpoint(file)['a'], torch.zeros(16))


@pytest.mark.parametrize('step', [7, pytest.param(1, marks=pytest.mark.slow)])  # bits
@pytest.mark.parametrize('ending', ['.pth', '.safetensors'])
def test_flipped_bits(tmp_path, ending, step, monkeypatch):
    """It is found, or changes nothing: also in the directory of the zip, which has no checksum.

    PyTorch's reader took a record that is marked as a directory for one of no bytes, and gave
    memory as it was.
    """
    load, loaded = torch.load, {}

    def load_once(source, *arguments, **options):  # it gives the same for the same bytes
        key = source.getvalue() if isinstance(source, BytesIO) else None
        if key not in loaded or key is None:
            loaded[key] = load(source, *arguments, **options)
        return loaded[key]

    monkeypatch.setattr(torch, 'load', load_once)
    file, weights = tmp_path / f'file{ending}', torch.arange(4.0) + 1
    write_checkpoint(dict(meta={}, state_dict={'a': weights}), file)
    content, refused = bytearray(file.read_bytes()), 0
    for bit in range(0, 8 * len(content), step):
        content[bit // 8] ^= 1 << bit % 8
        file.write_bytes(content)
        content[bit // 8] ^= 1 << bit % 8
        try:
            state = read_checkpoint(file)['state_dict']
        except CheckpointError:
            refused += 1
        else:
            assert state.keys() == {'a'} and torch.equal(state['a'], weights), bit
    assert refused > 2 * len(content) / step


HOSTILE = 'a\x1b[2J\x7f\u202e\u200b\r'


def test_what_is_printed_of_a_file(tmp_path, safe_loading):
    """Terminals obey control characters, and directional marks change what one reads."""
    shown, state = r'a\x1b[2J\x7f\u202e\u200b\r', CARE(THIN).state_dict()
    named = save(dict(state_dict={**state, f'stem.{HOSTILE}': torch.ones(1)}), tmp_path / 'named')
    called = save(Call(eval, ('1',)), tmp_path / 'called')
    rewrite(called, lambda name, content: [(name, content.replace(b'eval', HOSTILE.encode()))])
    tensors = tmp_path / f'{HOSTILE}.safetensors'
    tensors.write_bytes(b'nonsense')
    for file in (named, called, tensors):
        with pytest.raises(CheckpointError) as error:
            CARE(THIN, init_cfg=dict(type='Pretrained', checkpoint=str(file))).init_weights()
        text = ''.join(traceback.format_exception(None, error.value, None))
        assert shown in text and not {*HOSTILE[1:]} - {*'[2J'} & {*text}


def test_shared_containers_are_visited_once(tmp_path):
    """They would be visited a billion times; and they stay shared."""
    nested = dict(tensor=torch.ones(1))
    for _ in range(30):
        nested = dict(a=nested, b=[nested, nested])
    file = save(dict(nested=nested, again=nested), tmp_path)
    found = read_checkpoint(file)
    assert found['nested'] is found['again'] and found['nested']['b'][0] is found['nested']['a']


@pytest.mark.parametrize('verify', [True, False])
def test_other_archives_are_refused(tmp_path, state, verify):
    """torch.load gives TorchScript to torch.jit.load, and unpacks tar archives."""
    file = tmp_path / 'file.pth'
    torch.jit.script(nn.Linear(1, 1)).save(file)
    with pytest.raises(CheckpointError, match='TorchScript'):
        read_checkpoint(file, verify=verify)
    with tarfile.open(file, 'w') as archive:
        archive.add(save(state, tmp_path / 'inner'), 'storages')
    with pytest.raises(CheckpointError, match='tar archive'):
        read_checkpoint(file)


def test_a_file_that_another_process_has_verified(tmp_path):
    """It is not verified again; code in it still does not run."""
    state = dict(weights=torch.arange(5.0), step=3)
    file = save(state, tmp_path / 'good')
    content = file.read_bytes()
    found = read_checkpoint(file, verify=False)
    assert found['step'] == 3 and torch.equal(found['weights'], state['weights'])
    found['weights'].zero_()
    assert file.read_bytes() == content  # a mapped file keeps its content
    with pytest.raises(CheckpointError, match='eval'):
        read_checkpoint(save(Call(eval, ('1',)), tmp_path / 'called'), verify=False)


@has_list
def test_the_programs_list_stays_as_it_is(tmp_path):
    """What it allows is read, and nothing is added to it."""
    file = save(dict(args=Namespace(lr=0.1), place=Fraction(1, 3), value=np.float64(1)), tmp_path)
    with pytest.raises(CheckpointError, match='Fraction') as error:
        read_checkpoint(file)
    assert 'Re-running' not in str(error.value)  # PyTorch's advice to read the file unsafely
    with torch.serialization.safe_globals([Fraction, Namespace]):
        assert read_checkpoint(file) == dict(place=Fraction(1, 3), value=1.0)
        assert set(torch.serialization.get_safe_globals()) == {Fraction, Namespace}


@has_list
@pytest.mark.parametrize('name', ['torch.distributed connect', 'builtins getattr', 'numpy dtype'])
def test_what_is_allowed_elsewhere_is_not_called(tmp_path, name):
    """PyTorch allows its classes for distributed tensors by itself; some open connections."""
    file, called = tmp_path / 'file.pth', []
    file.write_bytes(f'\x80\x02c{name}\n)R.'.replace(' ', '\n').encode('latin1'))
    allowed = torch.serialization.safe_globals([(lambda: called.append(1), name.replace(' ', '.'))])
    with allowed, pytest.raises(CheckpointError, match=r'file\.pth'):
        read_checkpoint(file)
    assert not called


@pytest.fixture
def safe_loading():
    with safe_loader():
        yield


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


def test_the_hook_switches_the_loader_while_it_loads(tmp_path, monkeypatch):
    """What MMEngine's own hook writes is read; it cannot read that on PyTorch 2.6 and later."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(CheckpointLoader, '_schemes', {'': load_from_local})  # MMEngine's
    hub = dict(log_scalars=dict(loss=HistoryBuffer([1.0], [1])))
    good = dict(state_dict=Images().state_dict(), message_hub=hub)
    for content in (good, dict(state_dict=exploits()['os.system'])):
        file, hooks = str(save(content, tmp_path)), [dict(type='mmcare.SafeLoadingHook')]
        options = dict(exact=False, hooks=hooks, checkpoint=dict(save_best=None))
        runner = build(tmp_path, model=Images(), load_from=file, **options)
        is_good = content is good
        with nullcontext() if is_good else pytest.raises(CheckpointError, match=r'file\.pth'):
            runner.test()
        assert CheckpointLoader._schemes == {'': load_from_local}
    assert not Path('canary').exists()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, 'get_dir', lambda: str(tmp_path / 'kept'))
    return tmp_path / 'kept/checkpoints'


def test_downloads_are_read_as_local_files(
    tmp_path, monkeypatch, state, safe_loading, served, cache
):
    """MMEngine's own loader for addresses runs what code a file brings."""
    folder, address = served
    monkeypatch.chdir(tmp_path)
    file = save(dict(state_dict=state), folder)
    backbone = CARE(THIN)
    load_checkpoint(backbone, f'{address}file.pth')
    assert torch.equal(backbone.stem.conv.weight, state['stem.conv.weight'])
    file.unlink()  # it is downloaded once
    CARE(THIN, init_cfg=dict(type='Pretrained', checkpoint=f'{address}file.pth')).init_weights()
    torch.save(exploits()['os.system'], folder / 'code.pth')
    with pytest.raises(CheckpointError, match=r'code\.pth'):
        CheckpointLoader.load_checkpoint(f'{address}code.pth')
    assert not Path('canary').exists()
    with pytest.raises(OSError, match='404'):
        CheckpointLoader.load_checkpoint(f'{address}missing.pth')
    for name in ('', '..', 'a/', 'a/..', '?file.pth'):
        with pytest.raises(OSError, match='does not name a file'):
            CheckpointLoader.load_checkpoint(address + name)
    # One process of a machine downloads; the others wait for it, and raise if it has failed.
    monkeypatch.setenv('LOCAL_RANK', '1')
    monkeypatch.setattr(reading, 'all_gather_object', lambda own: ['no route', own])
    torch.save(state, folder / 'other.pth')
    with pytest.raises(OSError, match='no route'):
        CheckpointLoader.load_checkpoint(f'{address}other.pth')
    assert len([*cache.iterdir()]) == 2


def test_each_address_has_its_file(safe_loading, served, cache):
    folder, address = served
    for value, name in enumerate('ab'):
        save(dict(a=torch.tensor(value)), folder / name)
        found = CheckpointLoader.load_checkpoint(f'{address}{name}/file.pth')
        assert found == dict(a=torch.tensor(value))
    file, _ = cache.iterdir()
    file.write_bytes(file.read_bytes()[:-30])  # damaged: downloaded again
    for value, name in enumerate('ab'):
        found = CheckpointLoader.load_checkpoint(f'{address}{name}/file.pth')
        assert found == dict(a=torch.tensor(value))


class Answers(BaseHTTPRequestHandler):
    """Ends the connection too early, or redirects to the scheme that is asked for."""

    def do_GET(self):
        _, kind, rest = self.path.split('/', 2)
        if kind == 'cut':
            self.send_response(200)
            self.send_header('Content-Length', '1000')
            self.end_headers()
            return self.wfile.write(b'x' * 500)
        self.send_response(302)
        self.send_header('Location', f'{kind}://127.0.0.1:{self.server.server_port}/{rest}')
        self.end_headers()

    def log_message(self, *_):
        """Stay silent."""


@pytest.mark.parametrize(
    ('path', 'words'),
    [
        ('cut/file.pth', 'connection ended after 500 of 1000 bytes'),
        ('ftp/file.pth', 'redirected to ftp://'),
        ('file/file.pth', "'file://"),
        ('http/cut/file.pth', 'connection ended'),
    ],
)
def test_failed_downloads_leave_nothing(safe_loading, cache, path, words):
    with ThreadingHTTPServer(('127.0.0.1', 0), Answers) as server:
        Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        with pytest.raises(OSError, match=words):
            CheckpointLoader.load_checkpoint(f'http://127.0.0.1:{server.server_port}/{path}')
        server.shutdown()
    assert not [*cache.glob('*')]


def test_metadata_cannot_change_loading(tmp_path, state, safe_loading):
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
    [None, [1], {}, {3: 'a'}, dict(state_dict=[1]), {3: torch.ones(1)}, {'conv1': torch.ones(1)}],
    ids=str,
)
def test_files_that_are_not_checkpoints(tmp_path, safe_loading, content):
    """MMEngine gets them as they are; as weights they are refused."""
    file = str(save(content, tmp_path))
    assert CheckpointLoader.load_checkpoint(file) == content
    for read in (
        lambda: convert_checkpoint(file, tmp_path / 'out.pth'),
        CARE(THIN, init_cfg=dict(type='Pretrained', checkpoint=file)).init_weights,
    ):
        with pytest.raises(CheckpointError, match=r'file\.pth'):
            read()
    assert not (tmp_path / 'out.pth').exists()


def test_files_without_checksums_are_told(tmp_path, state, logged):
    write_checkpoint(dict(meta=dict(epoch=1), state_dict=state), tmp_path / 'new.safetensors')
    read_checkpoint(tmp_path / 'new.safetensors')
    read_checkpoint(save(state, tmp_path))
    assert not logged
    read_checkpoint(save(state, tmp_path, _use_new_zipfile_serialization=False))
    if hasattr(torch.serialization, 'set_crc32_options'):  # from PyTorch 2.6 on
        torch.serialization.set_crc32_options(False)
        try:
            found = read_checkpoint(save(state, tmp_path))
        finally:
            torch.serialization.set_crc32_options(True)
        assert torch.equal(found['stem.conv.weight'], state['stem.conv.weight'])
        assert len(logged) == 2
    assert logged and warned(logged, 'file.pth has no checksums') == [text for _, text in logged]


def test_safetensors_metadata_checksum(tmp_path, state):
    file = tmp_path / 'file.safetensors'
    write_checkpoint(dict(meta=dict(source='original'), state_dict=state), file)
    file.write_bytes(file.read_bytes().replace(b'"original"', b'"otherone"'))
    with pytest.raises(CheckpointError, match=r'file\.safetensors .* checksum'):
        read_checkpoint(file)
