"""Times what runs in turn, and says on what machine."""

import os
import platform
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import pandas as pd
import torch
from mmengine.utils import track_iter_progress
from torch.utils.benchmark import Timer

from mmcare.version import __version__

SECONDS = 0.2  # of repeated runs in a round, at least one


def measure_in_turn(
    runs: Mapping[Any, Callable[[], object]], rounds: int, threads: int = 1
) -> pd.DataFrame:
    """Time A, B, C, A, B, C, ..., so that a slow moment of the machine meets all of them.

    Args:
        runs: What to time, by name. In each round each is warmed up, then repeated for 0.2
            seconds. On a GPU the timer waits until the work is done.
        rounds: How often each gets its turn.
        threads: Threads of PyTorch.

    Returns:
        Milliseconds, a row for each round and a column for each run: the median of its repetitions.
    """
    timers = {
        name: Timer('run()', globals=dict(run=run), num_threads=threads)
        for name, run in runs.items()
    }
    return pd.DataFrame(
        {
            name: 1e3 * timer.blocked_autorange(min_run_time=SECONDS).median
            for name, timer in timers.items()
        }
        for _ in track_iter_progress(list(range(rounds)), file=sys.stderr)
    )


def describe_machine(*packages: str) -> list[str]:
    """Describe the class of the machine, without its name, and the versions that computed."""
    processor = torch.backends.cpu.get_cpu_capability()
    return [
        f'{os.cpu_count()} cores, {platform.machine()}, {processor}, {platform.system()}',
        *([torch.cuda.get_device_name()] if torch.cuda.is_available() else []),
        f'mmcare {__version__}',
        f'python {platform.python_version()}',
        *(f'{name} {import_module(name).__version__}' for name in ('torch', *packages)),
    ]
