"""Commands, code and figures of docs/complexity.md are what they are when run."""

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path

import pytest

from mmcare.analysis import build_network, count_complexity

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / 'docs/complexity.md').read_text()
# A command or code, and what it prints.
EXAMPLES = re.findall(
    r'^```(console|python)\n(.*?)^```\n\n```text\n(.*?)^```$', PAGE, re.MULTILINE | re.DOTALL
)
COMMANDS = [text.strip() for language, text, _ in EXAMPLES if language == 'console']


def test_every_block_is_an_example():
    assert len(re.findall(r'^```\w+$', PAGE, re.MULTILINE)) == 2 * len(EXAMPLES)
    assert len(COMMANDS) == 4 and len(EXAMPLES) == 5


@pytest.mark.parametrize(
    ('language', 'text', 'expected'),
    [
        pytest.param(*one, marks=[pytest.mark.slow] if '--paper' in one[1] else [])
        for one in EXAMPLES
    ],
    ids=[text.strip().splitlines()[0] for _, text, _ in EXAMPLES],
)
def test_examples_print_what_the_page_shows(language, text, expected, tmp_path, monkeypatch):
    """A line of three dots stands for any lines."""
    (tmp_path / 'configs').symlink_to(ROOT / 'configs')
    monkeypatch.chdir(tmp_path)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        if language == 'python':
            exec(compile(text, 'docs/complexity.md', 'exec'), {})
        else:
            start, python, tool, *arguments = text.split()
            assert (start, python, tool) == ('$', 'python', 'tools/complexity.py')
            monkeypatch.setattr(sys, 'argv', [tool, *arguments])
            runpy.run_path(str(ROOT / tool), run_name='__main__')
    printed, position = output.getvalue(), 0
    for piece in re.split(r'^\.\.\.$', expected, flags=re.MULTILINE):
        found = printed.find(piece.strip('\n'), position)
        assert found >= 0, f'{piece}\nis not in\n{printed}'
        position = found + len(piece.strip('\n'))
    if '...' not in expected:
        assert printed == expected
    assert 'Written to' not in printed or list((tmp_path / 'work_dirs/complexity').iterdir())


def test_table_of_the_classifiers():
    rows = re.findall(r'^\| `(\w+)` \| ([\d,]+) \| ([\d.]+) \| ([\d.]+) \|$', PAGE, re.MULTILINE)
    assert [arch for arch, *_ in rows] == ['s0', 's1', 's2']
    for arch, params, *gmacs in rows:
        counted = count_complexity(build_network(arch), (32, 32))
        assert f'{counted.params:,}' == params
        head = counted.total('macs', stage='head')
        for size, printed in zip((224, 512), gmacs, strict=True):
            # Everything but the heads grows with the number of pixels.
            macs = head + (counted.macs - head) * (size // 32) ** 2
            assert f'{macs / 1e9:.4f}' == printed
