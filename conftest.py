"""Code blocks of README and docs are tests: ``pytest README.md docs``."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from sybil import Example, Sybil
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser


def run_console(example: Example) -> str | None:
    """Run commands after ``$``, in the repository; compare the lines below, where there are any.

    A line ``...`` stands for any lines. A hash begins a comment. Blocks that need data or weights,
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


pytest_collect_file = Sybil(
    parsers=[
        PythonCodeBlockParser(),
        CodeBlockParser(language='console', evaluator=run_console),
        SkipParser(),
    ],
    patterns=['README.md', 'docs/*.md'],
).pytest()
