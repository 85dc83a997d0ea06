"""The script for Slurm in docs/multi_gpu.md, with stand-ins for Slurm's commands and Python."""

import os
import re
import shutil
import subprocess

import pytest
from helpers import ROOT

# What a stand-in does besides writing its arguments to a file of its name.
IDLE = dict(
    python='echo /toolbox',
    scontrol='test "$1" = requeue && touch requeued || echo "node1\nnode2"',
    srun='echo $MASTER_ADDR $MASTER_PORT $SRUN_CPUS_PER_TASK > environment',
)


def submit(folder, **commands):
    """Run the script as Slurm runs it on the first node; return the exit status."""
    page = (ROOT / 'docs/multi_gpu.md').read_text(encoding='utf-8')
    (script,) = re.findall(r'```bash\n(#!/bin/bash\n#SBATCH .*?)```', page, re.DOTALL)
    for name, command in {**IDLE, **commands}.items():
        text = f'#!/bin/sh\necho "$@" >> {name}.txt\n{command}\n'
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    job = dict(SLURM_JOB_ID='70001', SLURM_JOB_NODELIST='node[1-2]', SLURM_CPUS_PER_TASK='8')
    job['PATH'] = f'{folder}:{os.environ["PATH"]}'
    command = ['bash', '-c', script]
    return subprocess.run(command, cwd=folder, env={**os.environ, **job}, timeout=60).returncode


pytestmark = pytest.mark.skipif(shutil.which('bash') is None, reason='needs bash')


@pytest.mark.parametrize('status', [0, 7])
def test_its_status_is_that_of_the_training(tmp_path, status):
    assert submit(tmp_path, srun=f'{IDLE["srun"]}; exit {status}') == status
    assert (tmp_path / 'environment').read_text().split() == ['node1', '30001', '8']
    assert '--launcher slurm --resume' in (tmp_path / 'srun.txt').read_text()
    assert not (tmp_path / 'requeued').exists()


def test_a_signal_requeues_the_job_and_waits_for_the_training(tmp_path):
    wait = 'kill -USR1 $PPID; until test -e requeued; do sleep 0.1; done; sleep 0.3; exit 3'
    assert submit(tmp_path, srun=wait) == 3
    assert (tmp_path / 'scontrol.txt').read_text().split('\n')[-2] == 'requeue 70001'


def test_a_signal_before_the_training_starts(tmp_path):
    assert submit(tmp_path, python='kill -USR1 $PPID; echo /toolbox') == 0
    assert (tmp_path / 'requeued').exists()
