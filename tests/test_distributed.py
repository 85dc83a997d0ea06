"""Two gloo processes: gradients, checkpoints, evaluation, exact resume, no unused parameters.

Both processes are started once, by distributed_worker.py; each test looks at its results.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from distributed_worker import (
    ARCH,
    CONFIGS,
    MODES,
    detection_config,
    evaluated,
    segmentation_config,
)
from mmengine.config import Config
from mmengine.registry import RUNNERS, DefaultScope
from torch import nn

from mmcare.checkpoint import read_checkpoint
from mmcare.engine import BroadcastBuffersHook, CPUDistributedDataParallel
from mmcare.engine.cpu_distributed import init_cpu_processes
from mmcare.models import CARE
from mmcare.sample_data import make_ade20k, make_coco

PAGE = Path(__file__).parents[1] / 'docs' / 'scale.md'
WORKER = Path(__file__).parent / 'distributed_worker.py'
RUNS = {
    'detection': ('det', 'epoch_1.pth', detection_config),
    'segmentation': ('seg', 'iter_2.pth', segmentation_config),
}


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """Data, and what two processes have made of it."""
    folder = tmp_path_factory.mktemp('distributed')
    make_coco(folder / 'coco', train=4, val=5, size=64)
    make_ade20k(folder / 'ade', train=4, val=3, size=96)
    launch = [sys.executable, '-m', 'torch.distributed.run', '--standalone']
    done = subprocess.run(
        [*launch, '--nproc-per-node', '2', str(WORKER), str(folder)],
        capture_output=True,
        text=True,
        env={**os.environ, 'OMP_NUM_THREADS': '1'},
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return folder


@pytest.fixture(scope='module')
def results(folder):
    """What rank 0 and rank 1 have found."""
    return [json.loads((folder / f'rank{rank}.json').read_text()) for rank in range(2)]


def test_the_config_for_the_cpu(results):
    for result in results:
        found = result['detection_gradients']
        assert found['wrapper'] == 'CPUDistributedDataParallel' and found['backend'] == 'gloo'
        assert found['find_unused'] is False


def test_detection_gradients_are_the_mean_of_both_halves(results):
    """With drop path and RoI sampling, so the halves need the generators of their processes."""
    for result in results:
        found = result['detection_gradients']
        assert found['mean_of_halves'] < 1e-5
        assert found['one_half'] > 1e-2 and found['other_seed'] > 1e-2


def test_segmentation_gradients_are_those_of_the_whole_batch(results):
    """So it is without dropout where norms are fixed and equally many pixels are labelled."""
    for result in results:
        found = result['segmentation_gradients']
        assert found['fixed norms'] < 1e-5
        # What docs/scale.md says of the rest: statistics and means are of a process's own images.
        assert found['training norms'] > 1e-2 and found['ignored pixels'] > 1e-2


@pytest.mark.parametrize('task', RUNS)
def test_checkpoints_are_written_once(folder, results, task):
    """Each process has a working directory of its own here; rank 1 leaves its empty."""
    name, checkpoint, _ = RUNS[task]
    assert {checkpoint, 'last_checkpoint'} <= set(results[0][task]['files'])
    assert results[1][task]['files'] == []
    assert (folder / f'{name}_0' / 'last_checkpoint').read_text().endswith(checkpoint)


@pytest.mark.parametrize('task', RUNS)
def test_evaluation_counts_every_image_once_and_is_that_of_the_checkpoint(folder, results, task):
    """An odd number of images; one process with the checkpoint finds the same for each."""
    name, checkpoint, make_config = RUNS[task]
    runner = RUNNERS.build(
        make_config(folder, folder / name, load_from=str(folder / f'{name}_0' / checkpoint))
    )
    alone = evaluated(runner.test())
    names = [image for image, _ in alone['images']]
    assert len(set(names)) == len(names) == len(runner.test_dataloader.dataset)
    assert len(names) % 2 == 1
    for result in results:
        for found in (result[task]['validated'], result[task]['tested']):
            assert [image for image, _ in found['images']] == names
            for (_, figure), (_, expected) in zip(found['images'], alone['images'], strict=True):
                assert figure == pytest.approx(expected, rel=1e-4)
            assert found['metric'] == pytest.approx(alone['metric'], abs=1e-6)


@pytest.mark.parametrize('task', RUNS)
def test_both_evaluate_with_the_statistics_that_are_saved(folder, results, task):
    name, checkpoint, _ = RUNS[task]
    state = read_checkpoint(folder / f'{name}_0' / checkpoint)['state_dict']
    means = [value for key, value in state.items() if key.endswith('running_mean')]
    for result in results:
        assert torch.equal(torch.tensor(result[task]['statistics']), torch.cat(means))


@pytest.mark.parametrize('loop', ['epochs', 'iterations'])
def test_resume_is_exact_in_every_process(results, loop):
    for result in results:
        found = result['resume'][loop]
        assert found['ranks'] == 2 and found['states_differ']
        assert not found['stopped_is_whole'] and found['resumed_is_whole']


def test_no_unused_parameters_for_any_out_indices(results):
    for result in results:
        assert len(result['unused_parameters']) == 15
        assert 'parameters that were not used in producing loss' in result['unused_is_noticed']


@pytest.mark.parametrize(
    'option',
    [
        dict(inter1=False),
        dict(inter2=False),
        dict(memory=False),
        dict(early_conv=False),
        dict(multi_scale=False),
        dict(decoupling='global_only'),
        dict(expand_last=False, feature_map='identity'),
    ],
)
def test_no_unused_parameters_in_ablations(option):
    for out_indices in [(0,), (1, 2), (3,), (0, 1, 2, 3)]:
        model = CARE(ARCH, out_indices=out_indices, **option)
        sum(output.sum() for output in model(torch.rand(2, 3, 32, 32))).backward()
        unused = [name for name, p in model.named_parameters() if p.grad is None]
        assert unused == []


def test_sync_bn_as_far_as_it_goes_without_a_gpu(results):
    """Same names and values in checkpoints; fixed norms compute on the CPU, others refuse it."""
    for result in results:
        assert 'SyncBatchNorm expected input tensor to be on GPU' in result['sync_bn']
    image = torch.rand(2, 3, 64, 64)
    plain = CARE(ARCH, norm_eval=True)
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(CARE(ARCH, norm_eval=True))
    assert any(isinstance(module, nn.SyncBatchNorm) for module in synced.modules())
    synced.load_state_dict(plain.state_dict())
    assert list(synced.state_dict()) == list(plain.state_dict())
    for found, expected in zip(synced.train()(image), plain.train()(image), strict=True):
        assert torch.equal(found, expected)


def test_a_config_for_gpus_is_refused_on_the_cpu(tmp_path):
    config = Config.fromfile(CONFIGS / 'mask_rcnn' / 'care_s0_coco.py')
    config.merge_from_dict(dict(launcher='pytorch', work_dir=str(tmp_path)))
    with pytest.raises(ValueError, match=r'sees no GPU.*cpu_dist\.py.*CPUDistributedDataParallel'):
        RUNNERS.build(config)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize('launcher', ['slurm', 'mpi'])
def test_other_launchers_are_refused_on_the_cpu(launcher):
    wrapper = Config.fromfile(CONFIGS / '_base_' / 'cpu_dist.py').model_wrapper_cfg
    with pytest.raises(ValueError, match=f"--launcher pytorch, not '{launcher}'"):
        init_cpu_processes(launcher, wrapper, dict(backend='nccl'))


def test_a_model_on_another_device_is_refused():
    with pytest.raises(ValueError, match=r'model on meta.*CUDA_VISIBLE_DEVICES=-1'):
        CPUDistributedDataParallel(nn.Linear(2, 2, device='meta'), device_ids=[0])


def test_the_hook_does_nothing_in_a_single_process():
    model = nn.BatchNorm2d(2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    BroadcastBuffersHook._broadcast(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def page_blocks(language):
    """The blocks of a language in docs/scale.md."""
    return re.findall(f'^```{language}\n(.*?)^```$', PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_the_commands_of_the_page(folder, tmp_path):
    """Both for the CPU, and torchrun's on one machine, each with settings that make it short."""
    (tmp_path / 'configs').symlink_to(CONFIGS)
    (config,) = [block for block in page_blocks('python') if 'cpu_dist.py' in block]
    (tmp_path / 'two_processes.py').write_text(config)
    lines = [line[2:] for block in page_blocks('console') for line in block.splitlines()]
    on_cpu = [line for line in lines if line.startswith('CUDA_VISIBLE_DEVICES=-1 mim')]
    (find_tool,) = [line for line in lines if line.startswith('TRAIN=')]
    (torchrun,) = [line for line in lines if line.startswith('torchrun ')]
    for written, here in (
        ('--nnodes 8 --nproc-per-node 8', '--nnodes 1 --nproc-per-node 2'),
        ('HOST:29500', 'localhost:0'),
        ('configs/mask_rcnn/care_s1_coco.py', 'two_processes.py'),
    ):
        assert written in torchrun
        torchrun = torchrun.replace(written, here)
    data, annotations = f'{folder}/coco/', f'{folder}/coco/annotations/instances_val2017.json'
    detection = {
        **{f'{mode}_dataloader.dataset.data_root': data for mode in MODES},
        **{f'{mode}_evaluator.ann_file': annotations for mode in ('val', 'test')},
        'train_dataloader.dataset.pipeline.2.scale': '(64,64)',
        'val_dataloader.dataset.pipeline.1.scale': '(64,64)',
        'train_dataloader.batch_size': 2,
        'train_cfg.max_epochs': 1,
        'model.backbone.init_cfg': None,
        'model.train_cfg.rpn_proposal.max_per_img': 50,
    }
    segmentation = {
        **{f'{mode}_dataloader.dataset.data_root': f'{folder}/ade' for mode in MODES},
        'train_dataloader.dataset.pipeline.4.crop_size': '(64,64)',
        'model.data_preprocessor.size': '(64,64)',
        'train_dataloader.dataset.pipeline.3.scale': '(256,64)',
        'val_dataloader.dataset.pipeline.1.scale': '(256,64)',
        'train_dataloader.batch_size': 2,
        'train_cfg.max_iters': 1,
        'train_cfg.val_interval': 1,
        'default_hooks.checkpoint.interval': 1,
        'model.backbone.init_cfg': None,
    }
    for command, options, saved in (
        (f'{on_cpu[0]} --cfg-options', detection, 'two_processes/epoch_1.pth'),
        (on_cpu[1], segmentation, 'care_s0_ade20k/iter_1.pth'),
        (f'{find_tool}; {torchrun} --cfg-options', detection, 'two_processes/epoch_1.pth'),
    ):
        (tmp_path / 'work_dirs' / saved).unlink(missing_ok=True)
        settings = ' '.join(f"'{key}={value}'" for key, value in options.items())
        done = subprocess.run(
            f'{command} {settings}',
            shell=True,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env={**os.environ, 'PATH': f'{Path(sys.executable).parent}:{os.environ["PATH"]}'},
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        assert 'Distributed launcher: pytorch' in done.stdout + done.stderr
        assert (tmp_path / 'work_dirs' / saved).is_file()


def teardown_module():
    """Leave no default scope behind for other modules."""
    DefaultScope._instance_dict.clear()
