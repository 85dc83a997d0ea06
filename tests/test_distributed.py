"""Two gloo processes: gradients, one writer, exact resume, what must be the same on both.

Both are started once, by distributed_worker.py; each test looks at the results. Unused parameters,
for any out_indices, would stop them.
"""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from helpers import ROOT, run, warned
from mim.utils import get_installed_path
from toy_configs import make_data, toy_config
from toy_training import StopAt, train

WORKER = Path(__file__).parent / 'distributed_worker.py'


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp('distributed')
    for task in ('detection', 'segmentation'):
        make_data(task, folder / task)
    launch = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', 2]
    run(*launch, WORKER, folder, OMP_NUM_THREADS='1')
    texts = [(folder / f'rank{rank}.json').read_text() for rank in range(2)]
    return [dict(json.loads(text), folder=folder) for text in texts]


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


def test_ranks_that_differ_are_named(results):
    """Each before the first iteration, on all ranks; one of them has something else."""
    expected = dict(
        samples='train data, length',
        classes='train data, classes',
        annotations='train data, annotations',
        config='optim_wrapper.accumulative_counts: rank 0 on',
        weights='weights',
        folder="the folder '.'",
        checkpoint='no checkpoint; rank 1 on',
        checkpoint_of_mmengine='epoch 4',
    )
    for result in results:
        raised = result['differences']['raised']
        assert raised.keys() == expected.keys()
        assert all(words in raised[name] for name, words in expected.items())
        assert all('rank 0 on' in text and 'rank 1 on' in text for text in raised.values())
    for name, texts in results[0]['differences']['warned'].items():
        words = dict(versions='numpy: rank 0 on', checkpoint_of_mmengine='work_dir').get(name)
        assert len(texts) == bool(words) and (not words or words in texts[0])


def test_ranks_that_are_alike_train(results):
    for result in results:
        assert result['healthy']['iterations'] == 4
        assert result['healthy']['images_per_second'] > 0


@pytest.mark.parametrize('loop', ['epochs', 'iterations'])
def test_a_resume_with_fewer_processes_says_what_changes(results, tmp_path, logged, loop):
    """Two processes with two images each have written the checkpoint."""
    name = dict(epochs='epoch_3.pth', iterations='iter_12.pth')[loop]
    file = str(results[0]['folder'] / f'parts_{loop}' / name)
    options = dict(by_epoch=loop == 'epochs', resume=True, load_from=file)
    train(tmp_path, hooks=[StopAt(0), StopAt(6), StopAt(12)], **options)
    (text,) = warned(logged, 'The checkpoint is of')
    assert 'of processes=2 (now 1): augmentations' in text
    assert 'has 2 images in place of 4' in text and '0.707 times as large' in text
    if loop == 'epochs':
        assert 'An epoch has 4 iterations, and had 2: 4 are left' in text
    else:
        assert '4 iterations are left, on 8 images in place of 16' in text
        assert 'at image 48 of the sampler, and goes on at image 24: 24 images are' in text
        assert text.endswith('trained on again.')


@pytest.mark.slow
def test_a_config_is_tried_on_a_cpu_as_the_page_says(tmp_path):
    page = (ROOT / 'docs/multi_gpu.md').read_text(encoding='utf-8')
    script, command = re.search(
        r'`on_cpus.py`:.*?```python\n(.*?)```.*?\$ torchrun (.*?)\n', page, re.DOTALL
    ).groups()
    (tmp_path / 'on_cpus.py').write_text(script)
    make_data('retinanet', tmp_path / 'data')
    toy_config('retinanet', tmp_path / 'data', tmp_path / 'run').dump(tmp_path / 'toy.py')
    toolbox = Path(get_installed_path('mmdet'), '.mim/tools/train.py')
    command = command.replace('$TRAIN', str(toolbox)).replace('CONFIG', 'toy.py')
    launch = [sys.executable, '-m', 'torch.distributed.run', '--standalone', *shlex.split(command)]
    run(*launch, cwd=tmp_path, OMP_NUM_THREADS='1', CUDA_VISIBLE_DEVICES='-1')
    assert (tmp_path / 'run' / 'last_checkpoint').exists()
