"""Code blocks of README and docs are tests: ``pytest README.md docs``."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from sybil import Example, Sybil
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser


def run_console(example: Example) -> str | None:
    """Run commands after ``$``, in the repository; compare the lines below, where there are any.

    A line ``...`` matches any lines. A hash begins a comment. Blocks that need data or weights,
    or take long, have a comment ``skip: next`` above them in the page.
    """
    blocks = re.split(r'^\$ ', example.parsed, flags=re.MULTILINE)[1:]
    path = f'{Path(sys.executable).parent}{os.pathsep}{os.environ["PATH"]}'
    for block in blocks:
        command, _, expected = block.partition('\n')
        done = subprocess.run(
            shlex.split(command, comments=True),
            capture_output=True,
            text=True,
            env={**os.environ, 'PATH': path, 'CUDA_VISIBLE_DEVICES': '-1'},
            cwd=Path(__file__).parent,
        )
        if done.returncode:
            return f'{command}\n{done.stderr}'
        pattern = r'\n.*\n'.join(map(re.escape, expected.strip().split('\n...\n')))
        if expected.strip() and not re.search(pattern, done.stdout, re.DOTALL):
            return f'{command} printed\n{done.stdout}'
    return None


def enter_folder(namespace: dict[str, Any]) -> None:
    """Let the Python blocks of a page write into a folder of their own."""
    namespace['_folder'] = TemporaryDirectory()
    os.chdir(namespace['_folder'].name)


def leave_folder(namespace: dict[str, Any]) -> None:
    """Go back to the repository, and delete the folder."""
    os.chdir(Path(__file__).parent)
    namespace['_folder'].cleanup()


pytest_collect_file = Sybil(
    parsers=[
        PythonCodeBlockParser(),
        CodeBlockParser(language='console', evaluator=run_console),
        SkipParser(),
    ],
    patterns=['README.md', 'docs/*.md'],
    setup=enter_folder,
    teardown=leave_folder,
).pytest()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the pages whose blocks export models."""
    for item in items:
        if item.path.name in ('app.md', 'deploy.md'):
            item.add_marker('conversion')
