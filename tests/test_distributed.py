"""Two gloo processes: gradients, one writer, exact resume, checks of data, no unused parameters.

Both are started once, by distributed_worker.py; each test looks at the results. Unused parameters,
for any out_indices, would stop them.
"""

import json
import sys
from pathlib import Path

import pytest
from helpers import run
from toy_configs import make_data

WORKER = Path(__file__).parent / 'distributed_worker.py'


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp('distributed')
    for task in ('detection', 'segmentation'):
        make_data(task, folder / task)
    launch = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', 2]
    run(*launch, WORKER, folder, OMP_NUM_THREADS='1')
    return [json.loads((folder / f'rank{rank}.json').read_text()) for rank in range(2)]


@pytest.mark.parametrize('task', ['detection', 'segmentation'])
def test_gradients_are_the_mean_of_both_halves(results, task):
    """In detection with drop path, RoI sampling and activations that are computed again."""
    for result in results:
        assert result[task]['mean'] < 1e-5 and result[task]['one_half'] > 1e-2


def test_channels_last_gradients_fit_their_buckets(results):
    for result in results:
        assert result['channels_last']['deviation'] < 1e-5
        assert not result['channels_last']['warned']


@pytest.mark.parametrize('loop', ['epochs', 'iterations'])
def test_distributed_resume(results, loop):
    written = [result['resume'][loop]['written'] for result in results]
    assert len(written[0]) == 3 and written[1] == []
    assert results[0]['resume'][loop]['draws'] != results[1]['resume'][loop]['draws']
    for result in (result['resume'][loop] for result in results):
        assert result['same_files'] and result['different'] == []


def test_a_fault_in_data_stops_all_processes(results):
    """The main process finds it, and the other raises the same error."""
    main, other = (result['data_check'] for result in results)
    assert len(main) == 2 and main == other
    assert main[0].endswith('[required_keys]') and '[crowds]' in main[1]
