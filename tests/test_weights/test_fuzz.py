"""Damaged files load as they were saved or are refused by name. Nothing else ever happens."""

import functools
import multiprocessing
import resource
import sys
import tempfile
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path

import torch
from helpers import THIN, thin_backbone
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from mmcare.models import CARE
from mmcare.weights.names import to_published
from mmcare.weights.reading import CheckpointError, write_checkpoint

FORK = multiprocessing.get_context('fork')
SLOW = [HealthCheck.too_slow]
MEMORY = 2 << 30  # bytes of address space beyond those of the parent
CODE_EVENTS = ('os.exec', 'os.posix_spawn', 'os.system', 'socket.connect', 'subprocess.Popen')


def sandboxed(file, expected):
    """Return what is wrong with the way in which a file is read; empty if nothing is."""
    receiver, sender = FORK.Pipe(duplex=False)

    def child():
        torch.set_num_threads(1)  # those of the parent do not survive a fork
        pages = int(Path('/proc/self/statm').read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        seen = []
        sys.addaudithook(lambda event, _: seen.append(event) if event in CODE_EVENTS else None)
        answer = judge(file, expected)
        sender.send(f'ran code: {seen}' if seen else answer)

    (process := FORK.Process(target=child)).start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(30) else 'hung'
    except EOFError:
        return 'crashed'
    finally:
        process.kill()


def judge(file, expected):
    try:
        found = init_weights(file)
        weights = [key for key in expected if not key.endswith('num_batches_tracked')]
        same = all(torch.equal(found[key], expected[key]) for key in weights)
    except CheckpointError as error:
        return '' if file.name in str(error) else f'the file is not named: {error}'
    except BaseException as error:
        return f'{type(error).__name__}: {error}'
    return '' if same else 'other weights than those saved'


def init_weights(file):
    backbone = CARE(THIN, init_cfg=dict(type='Pretrained', checkpoint=str(file)))
    backbone.init_weights()
    return backbone.state_dict()


@functools.lru_cache(None)
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


@st.composite
def damaged_bytes(draw):
    """Failing disks and transfers; half of them at the end, where zip has its directory."""
    random = draw(st.randoms(use_true_random=True))  # its own draws prefer the ends of a range
    name = random.choice(['new.pth', 'ours.safetensors', *sorted(good()[1])])
    content = good()[1][name]
    start = random.choice([random.randrange(len(content)), len(content) - random.randint(1, 3000)])
    end = start + random.choice([1, 4, 16, 512, 4096])
    flipped = bytes([content[start] ^ 1 << random.randrange(8)]) + content[start + 1 : end]
    noise = bytes(random.choices(range(256), k=end - start))
    other = [b'', bytes(end - start), content[start:end] * 2, noise]
    block = random.choice([flipped] * 4 + other)
    whole = content[:start] + block + content[end:]
    return name, random.choice([whole] * 6 + [content[:start], block])


def test_damaged_files(tmp_path):
    """Files without checksums may give other weights, of the right shapes and finite."""
    (tmp_path / 'whole.pth').write_bytes(good()[1]['new.pth'])
    expected = dict.fromkeys(['new.pth', 'ours.safetensors'], init_weights(tmp_path / 'whole.pth'))

    @settings(max_examples=25, derandomize=True, deadline=None, suppress_health_check=SLOW)
    @given(damaged_bytes())
    def check(damaged):
        name, content = damaged
        (tmp_path / name).write_bytes(content)
        assert not sandboxed(tmp_path / name, expected.get(name, {}))

    check()
