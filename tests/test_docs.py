"""Every code block of docs/use_in_your_project.md, and the facts in its tables.

Blocks that are configs of models are trained in test_projects.py.
"""

import contextlib
import inspect
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from docs_page import CONVERTED, PAGE, PUBLISHED, blocks, make_project

from mmcare.models import CARE


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    make_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def assert_same(printed: str, expected: str) -> None:
    """Compare output with a text block, in which a line of three dots stands for any lines."""
    pattern = r'\n.*\n'.join(map(re.escape, expected.strip().split('\n...\n')))
    assert re.fullmatch(pattern, printed.strip(), re.DOTALL), printed


def run_command(command: str) -> str:
    """Run a line of a shell, with the interpreter's environment first on the path."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ['PATH']])
    done = subprocess.run(
        command, shell=True, capture_output=True, text=True, env={**os.environ, 'PATH': path}
    )
    assert done.returncode == 0, f'{command}\n{done.stdout}\n{done.stderr}'
    return done.stdout


def test_code_blocks_in_their_order(project):
    """Python shares one namespace; a text block is what the block before it prints."""
    converted = project / CONVERTED
    converted.unlink()
    namespace, printed, tried = {}, None, []
    for block in blocks():
        tried.append(block.language)
        if block.language == 'text':
            assert printed is not None, f'nothing is printed before line {block.line}'
            assert_same(printed, block.text)
            printed = None
        elif block.language == 'console':
            for line in block.text.splitlines():
                assert line.startswith('$ '), f'no command: {line!r}'
                printed = run_command(line[2:])
        elif block.filename is None:
            assert block.language == 'python', f'what is {block.language!r}, line {block.line}?'
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(compile(block.text, f'{PAGE.name}, line {block.line}', 'exec'), namespace)
            printed = output.getvalue()
    assert {'python', 'console', 'text'} == set(tried)
    assert converted.is_file() and (project / PUBLISHED).is_file()


def table(heading: str) -> list[list[str]]:
    """Rows of the table under a heading, without the two lines of its head."""
    section = PAGE.read_text().split(f'## {heading}\n')[1].split('\n## ')[0]
    rows = [line for line in section.splitlines() if line.startswith('|')]
    return [[cell.strip() for cell in row.strip('|').split('|')] for row in rows[2:]]


def test_channels_and_strides():
    *channels, strides = table('Channels and strides')
    for arch, whole, plain in channels:
        arch = arch.strip("`'")
        assert whole == ', '.join(map(str, CARE(arch).out_channels))
        assert plain == ', '.join(map(str, CARE(arch, expand_last=False).out_channels))
    assert [row[0].strip("`'") for row in channels] == list(CARE.arch_zoo)
    assert strides == ['strides', '4, 8, 16, 32', '4, 8, 16, 32']


def test_arguments_that_are_recommended():
    known = inspect.signature(CARE).parameters
    settings = re.findall(r'`(\w+)=(.+?)`', PAGE.read_text())
    names = {name for name, _ in settings}
    assert {'norm_eval', 'drop_path_rate', 'out_norm_cfg', 'with_cp', 'frozen_stages'} <= names
    for name, value in settings:
        if name in known and name != 'frozen_stages':
            CARE(**{name: eval(value)})


def test_the_page_is_linked_to_existing_files():
    for target in re.findall(r'\]\(([^)#]+)', PAGE.read_text()):
        assert '://' in target or (PAGE.parent / target).exists(), target
