"""Damaged files load as they were saved or are refused by name. Nothing else ever happens."""

import functools
import io
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from exploits import exploits
from helpers import THIN, thin_backbone
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from mmcare.models import CARE
from mmcare.weights.published import to_published
from mmcare.weights.reading import write_checkpoint
from mmcare.weights.whole import CheckpointError

FORK = multiprocessing.get_context('fork')
SLOW = [HealthCheck.too_slow]
MEMORY = 2 << 30  # bytes of address space beyond those of the parent
CODE_EVENTS = ('os.exec', 'os.posix_spawn', 'os.system', 'socket.connect', 'subprocess.Popen')


def sandboxed(judge, *arguments, seconds=30):
    """Call a function in a child process with limits; return what it says, or how it ended."""
    receiver, sender = FORK.Pipe(duplex=False)

    def child():
        torch.set_num_threads(1)  # those of the parent do not survive a fork
        pages = int(Path('/proc/self/statm').read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        seen = []
        sys.addaudithook(lambda event, _: seen.append(event) if event in CODE_EVENTS else None)
        answer = judge(*arguments)
        sender.send(f'ran code: {seen}' if seen else answer)

    (process := FORK.Process(target=child)).start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(seconds) else 'hung'
    except EOFError:
        return 'crashed'
    finally:
        process.kill()


def init_weights(file):
    backbone = CARE(THIN, init_cfg=dict(type='Pretrained', checkpoint=str(file)))
    backbone.init_weights()
    return backbone.state_dict()


def judge(read, file, expected):
    """Return what is wrong with the way in which a file is read; empty if nothing is."""
    try:
        found = read(file)
        weights = [key for key in expected if not key.endswith('num_batches_tracked')]
        same = all(torch.equal(found[key], expected[key]) for key in weights)
    except CheckpointError as error:
        return '' if file.name in str(error) else f'the file is not named: {error}'
    except BaseException as error:
        return f'{type(error).__name__}: {error}'
    return '' if same else 'other weights than those saved'


@functools.cache
def good():
    """Return a training checkpoint, and the bytes of files of it with and without checksums."""
    published = OrderedDict(to_published(thin_backbone().state_dict()))
    training = dict(state_dict=published, meta=dict(epoch=3), args=Namespace(lr=1e-3))
    with tempfile.TemporaryDirectory() as folder:
        torch.save(training, f'{folder}/new.pth')
        torch.save(training, f'{folder}/old.pth', _use_new_zipfile_serialization=False)
        write_checkpoint(training, f'{folder}/ours.safetensors')
        save_file(published, f'{folder}/foreign.safetensors')
        return training, {file.name: file.read_bytes() for file in Path(folder).iterdir()}


RANDOM = st.randoms(use_true_random=True)  # Hypothesis' own draws prefer the ends of a range


@st.composite
def damaged_bytes(draw):
    """Failing disks and transfers."""
    random = draw(RANDOM)
    name = random.choice(['new.pth', 'ours.safetensors', *sorted(good()[1])])
    content = good()[1][name]
    start = random.choice([random.randrange(len(content)), len(content) - random.randint(1, 3000)])
    end = start + random.choice([1, 16, 512, 4096])
    flipped = bytes([content[start] ^ 1 << random.randrange(8)]) + content[start + 1 : end]
    other = [b'', bytes(end - start), content[start:end] * 2, random.randbytes(100)]
    block = random.choice([flipped] * 4 + other)
    whole = content[:start] + block + content[end:]
    return name, random.choice([whole] * 6 + [content[:start], block])


@st.composite
def lying_directory(draw):
    """Zip archives that are wrong about the size or the place of an entry."""
    content = good()[1]['new.pth']
    starts = [n for n in range(len(content)) if content[n : n + 4] == b'PK\x01\x02']
    random = draw(RANDOM)
    field = random.choice(starts) + random.choice([20, 24, 42])
    return 'new.pth', content[:field] + random.randbytes(4) + content[field + 4 :]


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
PLAIN = st.recursive(SCALARS, lambda odd: st.lists(odd) | st.dictionaries(st.text(), odd))


@st.composite
def changed_structure(draw):
    """Whole files with values, keys and metadata that nobody expects."""
    random = draw(RANDOM)
    training = dict(good()[0])
    state = training['state_dict'] = OrderedDict(training['state_dict'])
    key = random.choice([key for key in state if not key.endswith('num_batches_tracked')])
    old = state[key]
    odd = [draw(PLAIN), old * torch.nan, old.long(), old[..., None], old.to_sparse(), old.numpy()]
    odd += [torch.zeros(()).expand(1 << 40), torch.empty_like(old, device='meta')]
    kind = random.choice(['weight', 'weight', 'elsewhere', 'key', 'metadata'])
    if kind == 'weight':
        state[key] = random.choice([*odd, random.choice(list(exploits().values()))])
    elif kind == 'elsewhere':
        training[random.choice(list(training))] = draw(PLAIN)
    elif kind == 'key':
        state[draw(st.text() | st.integers() | st.just(f'{key}.x'))] = state.pop(key)
    else:
        state._metadata = draw(PLAIN | st.dictionaries(st.sampled_from(['', 'stem']), PLAIN))
    torch.save(training, file := io.BytesIO())
    return 'new.pth', file.getvalue()


@st.composite
def lying_header(draw):
    """Headers of .safetensors that do not describe what follows."""
    name = draw(st.sampled_from(['foreign.safetensors', 'ours.safetensors']))
    content = good()[1][name]
    size = int.from_bytes(content[:8], 'little')
    header = json.loads(content[8 : 8 + size])
    key = draw(st.sampled_from(sorted(header.keys() - {'__metadata__'})))
    field = draw(st.sampled_from(['data_offsets', 'shape', 'dtype', 'key', 'metadata', 'length']))
    numbers = st.sampled_from([-1, 0, 1, 8, size, 1 << 40, 1 << 63])
    if field == 'key':
        header[draw(st.text())] = header.pop(key)
    elif field == 'metadata':
        header['__metadata__'] = draw(PLAIN)
    elif field != 'length':
        types = st.sampled_from(['F64', 'BF16', 'I32', 'U8', 'F8_E4M3'])
        header[key][field] = draw(st.lists(numbers, max_size=5) | types | PLAIN)
    packed = json.dumps(header, default=str).encode()
    length = draw(numbers) % (1 << 64) if field == 'length' else len(packed)
    return name, length.to_bytes(8, 'little') + packed + content[8 + size :]


DAMAGE = [damaged_bytes, lying_directory, changed_structure, lying_header]


@pytest.mark.parametrize('damage', DAMAGE)
def test_damaged_files(tmp_path, damage):
    """Files without checksums may give other weights, of the right shapes and finite."""
    (tmp_path / 'whole.pth').write_bytes(good()[1]['new.pth'])
    expected = dict.fromkeys(['new.pth', 'ours.safetensors'], init_weights(tmp_path / 'whole.pth'))

    @settings(max_examples=30, derandomize=True, deadline=None, suppress_health_check=SLOW)
    @given(damage())
    def check(damaged):
        name, content = damaged
        (tmp_path / name).write_bytes(content)
        assert not sandboxed(judge, init_weights, tmp_path / name, expected.get(name, {}))

    check()


@pytest.mark.parametrize(
    ('read', 'words'),
    [
        (lambda file: os.system('true'), 'ran code'),
        (lambda file: os._exit(1), 'crashed'),
        (lambda file: time.sleep(60), 'hung'),
        (lambda file: bytes(2 * MEMORY), 'MemoryError'),
        (lambda file: {'a': torch.ones(1)}, 'other weights'),
    ],
)
def test_the_sandbox_sees_what_goes_wrong(tmp_path, read, words):
    """Readers that do what must not happen."""
    assert words in sandboxed(judge, read, tmp_path, {'a': torch.zeros(1)}, seconds=2)
