"""A slice of the fuzz run, and proof that the harness sees each kind of failure."""

import os
import pickle
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from fuzz.checkpoint_files import COMMAND, Call
from fuzz.harness import BAD, Kind, Made, run_case
from fuzz.kinds import KINDS
from mmengine.logging import HistoryBuffer

from mmcare.checkpoint import CheckpointError, read_checkpoint

SCRIPT = Path(__file__).parent / 'fuzz_files.py'
CASES = 25  # of each kind


@pytest.fixture(autouse=True)
def one_thread():
    """Threads of PyTorch do not survive a fork."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_a_slice_of_the_fuzz_run():
    done = subprocess.run(
        [sys.executable, SCRIPT, '--cases', str(CASES), '--seed', '7'],
        capture_output=True,
        text=True,
        env={**os.environ, 'OMP_NUM_THREADS': '1'},
    )
    assert done.returncode == 0, f'{done.stdout}\n{done.stderr}'
    total = re.search(r'^all +(\d+) +(\d+)', done.stdout, re.MULTILINE)
    assert int(total[1]) == CASES * len(KINDS)
    assert int(total[2]) > CASES  # many files are refused, not read past


def weights_file(folder, damage=None):
    """A checkpoint of one tensor; its data damaged if wanted."""
    file = folder / 'weights.pth'
    torch.save(dict(state_dict={'a': torch.arange(500.0)}), file)
    if damage:
        content = bytearray(file.read_bytes())
        content[content.index(torch.arange(490.0, 500.0).numpy().tobytes())] ^= 1
        file.write_bytes(content)
    return file


def code_file(folder):
    file = folder / 'weights.pth'
    file.write_bytes(pickle.dumps(Call(os.system, (COMMAND,))))
    return file


def load_unsafely(file):
    return torch.load(file, weights_only=False)


def load_unverified(file):
    return torch.load(file, weights_only=True)


def change_a_class(file):
    HistoryBuffer._statistics_methods['mean'] = HistoryBuffer.max
    return load_unverified(file)


def fail_in_the_depths(file):
    raise KeyError(str(file))


def fail_without_a_name(file):
    raise ValueError('something is wrong')


def crash(file):
    os.kill(os.getpid(), signal.SIGSEGV)


def sleep(file):
    time.sleep(600)


def judge(made, read, found):
    expected = torch.arange(500.0)
    return None if torch.equal(found['state_dict']['a'], expected) else 'other values'


@pytest.mark.parametrize(
    ('outcome', 'entry', 'make'),
    [
        ('executed', load_unsafely, code_file),
        ('executed', change_a_class, weights_file),
        ('silent', load_unverified, lambda folder: weights_file(folder, damage=True)),
        ('unclear', fail_in_the_depths, weights_file),
        ('unclear', fail_without_a_name, weights_file),
        ('crashed', crash, weights_file),
        ('hung', sleep, weights_file),
        ('refused', read_checkpoint, code_file),
        ('refused', read_checkpoint, lambda folder: weights_file(folder, damage=True)),
        ('right', read_checkpoint, weights_file),
    ],
)
def test_planted_failures_are_seen(tmp_path, outcome, entry, make):
    """Loaders that do what must not happen, and mmcare's beside them."""
    kind = Kind('planted', {}, {'read': entry}, judge)
    made = Made(make(tmp_path), 'planted')
    result = run_case(kind, 'planted', 0, 'read', made, seconds=2 if entry is sleep else 60)
    assert result.outcome == outcome, result
    assert (outcome in BAD) == (entry is not read_checkpoint)


def test_every_family_gets_the_same_file_from_the_same_seed(tmp_path):
    import random

    kind = KINDS['ade20k'](tmp_path / 'source')
    for family, make in kind.families.items():
        contents = []
        for name in 'ab':
            (tmp_path / name / family).mkdir(parents=True)
            made = make(tmp_path / name / family, random.Random(family))
            contents.append((made.what, made.file.read_bytes()))
        assert contents[0] == contents[1], family


@pytest.mark.parametrize(
    'forge',
    ['pointers', 'offsets'],
)
def test_forged_numpy_layout_is_refused(tmp_path, forge):
    """numpy would take bytes of the file for addresses in memory."""
    from fuzz.checkpoint_files import payloads

    torch.save(dict(state_dict={}, meta=payloads()[f'numpy {forge}']), tmp_path / 'forged.pth')
    with pytest.raises(CheckpointError, match=r'forged\.pth'):
        read_checkpoint(tmp_path / 'forged.pth')
