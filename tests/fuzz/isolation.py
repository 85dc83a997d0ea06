"""Run a function where it can do no harm: in a child process with limits, watched for code.

A file that runs code gives itself away in one of three ways: a canary file that its code creates,
an event of Python's audit hooks that reading a file never raises (starting a process, opening a
connection), or a class that is another one afterwards.
"""

import argparse
import faulthandler
import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.logging import HistoryBuffer
from torch import nn

CANARY = 'canary'
FORBIDDEN_EVENTS = (
    'os.exec',
    'os.fork',
    'os.posix_spawn',
    'os.spawn',
    'os.system',
    'socket.connect',
    'subprocess.Popen',
    'webbrowser.open',
)
WATCHED = (torch.Tensor, nn.Parameter, nn.Module, np.ndarray, HistoryBuffer, argparse.Namespace)
EXTRA_MEMORY = 2 << 30  # bytes of address space beyond those of the parent


@dataclass(frozen=True)
class Report:
    """What became of a call.

    Attributes:
        ended: ``'returned'``, ``'raised'``, ``'crashed'`` or ``'hung'``.
        value: What was returned, as JSON has it.
        error: Name of the exception's class.
        message: Text of the exception, or the signal.
        output: What was written to standard output and standard error.
        executed: Traces of code that was run; empty if there are none.
    """

    ended: str
    value: Any = None
    error: str = ''
    message: str = ''
    output: str = ''
    executed: list[str] = field(default_factory=list)


@contextmanager
def silenced() -> Iterator[None]:
    """Let nothing through to standard output and standard error, whoever holds them."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    with open(os.devnull, 'w') as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, stream in enumerate(kept, 1):
            os.dup2(stream, number)
            os.close(stream)


def call_isolated(function: Callable[[], Any], folder: Path, seconds: float) -> Report:
    """Call a function in a forked child, in a folder of its own.

    Args:
        function: Returns what JSON can express. Code in files that it reads may create
            ``canary`` in the current directory.
        folder: The child's current directory.
        seconds: After so long the child is killed.
    """
    answer, output = folder / 'answer.json', folder / 'output.txt'
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        _be_child(function, folder, answer, output)
    deadline = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return Report('hung', message=f'after {seconds} s', executed=_canaries(folder))
        time.sleep(0.002)
    text = output.read_text(errors='replace') if output.exists() else ''
    if not answer.exists():
        how = f'status {status}'
        if os.WIFSIGNALED(status):
            how = signal.Signals(os.WTERMSIG(status)).name
        return Report('crashed', message=how, output=text, executed=_canaries(folder))
    report = json.loads(answer.read_text())
    report['executed'] += _canaries(folder)
    return Report(output=text, **report)


def _be_child(function: Callable[[], Any], folder: Path, answer: Path, output: Path) -> None:
    """Call the function, write down what became of it, and end the process."""
    executed: list[str] = []
    status = 1
    try:
        faulthandler.disable()  # a planted crash would be told on pytest's own terminal
        os.setsid()
        os.chdir(folder)
        stream = os.open(output, os.O_WRONLY | os.O_CREAT)
        os.dup2(stream, 1)
        os.dup2(stream, 2)
        tempfile.tempdir = str(folder)
        pages = int(Path('/proc/self/statm').read_text().split()[0])
        limit = pages * os.sysconf('SC_PAGE_SIZE') + EXTRA_MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        sys.addaudithook(
            lambda event, details: (
                executed.append(f'{event} {details[:2]!r}') if event in FORBIDDEN_EVENTS else None
            )
        )
        HistoryBuffer()  # the first one completes its class
        before = _classes()
        try:
            report = dict(ended='returned', value=function())
        except BaseException as error:  # SystemExit, too
            names = type(error).__name__, str(error)
            report = dict(ended='raised', error=names[0], message=names[1])
        after = _classes()
        executed += [f'changed {name}' for name in before if after.get(name) is not before[name]]
        sys.stdout.flush()
        sys.stderr.flush()
        temporary = answer.with_suffix('.tmp')
        temporary.write_text(json.dumps({**report, 'executed': executed}))
        temporary.replace(answer)
        status = 0
    finally:
        os._exit(status)


def _classes() -> dict[str, Any]:
    """What classes consist of that a file must not change."""
    parts = {
        f'{owner.__name__}.{name}': vars(owner).get(name)
        for owner in WATCHED
        for name in vars(owner)
    }
    methods = HistoryBuffer._statistics_methods
    return {**parts, **{f'HistoryBuffer statistics {name}': methods[name] for name in methods}}


def _canaries(folder: Path) -> list[str]:
    return [CANARY] if (folder / CANARY).exists() else []
