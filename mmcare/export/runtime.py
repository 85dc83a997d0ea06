"""Exported files, run and timed on the CPU by one thread."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from mmengine.utils import track_iter_progress
from torch.utils.benchmark import Timer

from mmcare.export.formats import FORMATS
from mmcare.export.formats.base import Exported

SECONDS = 0.2  # of repeated runs in a round, at least one


def open_exported(path: Path, float16: bool = False) -> Exported:
    """Open a file, which says itself what it takes; compute it in float16 if that is asked for.

    Raises:
        FileNotFoundError: If it does not exist.
        ImportError: If the package is missing that runs it.
        ValueError: If it is damaged, or of another format, or nothing here computes it in float16.
    """
    formats = {form.ending: form for form in FORMATS.values()}
    if path.suffix not in formats:
        raise ValueError(f'{path} is not {", ".join(formats)}')
    if not path.exists():
        raise FileNotFoundError(f'{path} does not exist')
    form = formats[path.suffix]
    try:
        opened = form.open_float16(path) if float16 else form.open(path)
    except ImportError:
        raise
    except Exception as error:  # the runtimes have classes of their own
        reason = ' '.join(str(error).split())
        raise ValueError(f'{path} cannot be opened: {reason}') from error
    if opened is None:
        raise ValueError(f'nothing here computes {path} in float16')
    return opened


def measure_in_turn(
    runs: Mapping[Any, Callable[[], object]], rounds: int, threads: int = 1
) -> pd.DataFrame:
    """Time A, B, C, A, B, C, ..., so that noise affects all equally.

    In each round each run is warmed up, then repeated for 0.2 seconds. On a GPU the timer waits
    until the work is done.

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
