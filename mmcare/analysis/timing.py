"""Time several functions under the same conditions."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd
from mmengine.utils import track_iter_progress
from torch.utils.benchmark import Timer

SECONDS = 0.2  # of runs of a function in a round, which has at least one run


def measure_in_turn(
    runs: Mapping[Any, Callable[[], object]], rounds: int, threads: int = 1
) -> pd.DataFrame:
    """Time functions in interleaved rounds (A, B, C, A, B, C, ...), so that noise affects all.

    In each round, each function is warmed up and then repeated for 0.2 seconds. On a GPU the timer
    waits until the work is done.

    Returns:
        Milliseconds, a row for each round and a column for each function: the median of its
        repetitions.
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
