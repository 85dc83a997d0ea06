"""What one of two gloo processes does for test_distributed.py: ``distributed_worker.py FOLDER``.

Started by torch.distributed.run, once for all tests, since importing the toolboxes takes long. The
folder holds ``coco`` and ``ade``, made by mmcare.sample_data. What a test wants to know goes to
``FOLDER/rank{0,1}.json``.
"""

import json
import os
import random
import sys
from copy import deepcopy
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.evaluator import BaseMetric
from mmengine.optim import OptimWrapper
from mmengine.registry import METRICS, MODELS, RUNNERS
from mmengine.structures import PixelData
from torch.nn.modules.batchnorm import _BatchNorm

from mmcare.checkpoint import read_checkpoint
from mmcare.engine import CheckingRunner, CPUDistributedDataParallel
from mmcare.models import CARE

sys.path.insert(0, str(Path(__file__).parent / 'test_engine'))
from test_exact_resume_hook import NoisyDataset, NoisyModel, Silent, collate, equal

RANK = int(os.environ.get('RANK', 0))
LAUNCHER = 'pytorch' if 'RANK' in os.environ else 'none'
CONFIGS = Path(__file__).parents[1] / 'configs'
CPU_DIST = CONFIGS / '_base_' / 'cpu_dist.py'
SIZE = 64  # of images, pixels
CHANNELS = 16  # of neck and heads
ARCH = dict(
    depths=(1, 1, 1, 1),
    widths=(6, 12, 24, 48),
    memory_widths=(2, 4, 8, 16),
    expansions=((2, 2), (2, 2), (2, 2), (2, 2)),
    head_channels=(1, 1, 8, 8),
)
BACKBONE = {
    'model.backbone.init_cfg': None,
    'model.backbone.layer_scale_init_value': 0.5,
    'model.neck.in_channels': [8, 16, 32, 128],
    'model.neck.out_channels': CHANNELS,
}
MODES = ('train', 'val', 'test')


@METRICS.register_module(force=True)
class EachImage(BaseMetric):
    """Names of the images that are evaluated, each with a figure that its prediction decides."""

    def process(self, data_batch, data_samples):
        for sample in data_samples:
            name = Path(sample['img_path']).name
            if 'pred_instances' in sample:
                figure = sample['pred_instances']['scores'].sum()
            else:
                figure = sample['seg_logits']['data'].abs().mean()
            self.results.append((name, figure.item()))

    def compute_metrics(self, results):
        return dict(images=results)


def two_bases(shipped, folder):
    """A config as a user writes it: a shipped one, and the one for processes on the CPU."""
    path = folder / f'{Path(shipped).stem}_{RANK}.py'
    path.write_text(f'_base_ = {[str(CONFIGS / shipped), str(CPU_DIST)]!r}\n')
    config = Config.fromfile(path)
    config.launcher = LAUNCHER
    config.model.backbone.arch = ARCH
    return config


def detection_config(folder, work_dir, **changes):
    """Mask R-CNN on a thin CARE."""
    data = folder / 'coco'
    annotations = f'{data}/annotations/instances_val2017.json'
    config = two_bases('mask_rcnn/care_s0_coco.py', folder)
    config.merge_from_dict(
        {
            **BACKBONE,
            **{f'{mode}_dataloader.dataset.data_root': f'{data}/' for mode in MODES},
            **{f'{mode}_dataloader.num_workers': 0 for mode in MODES},
            **{f'{mode}_dataloader.persistent_workers': False for mode in ('val', 'test')},
            **{
                f'{mode}_dataloader.dataset.pipeline.{index}.scale': (SIZE, SIZE)
                for mode, index in (('train', 2), ('val', 1), ('test', 1))
            },
            **{f'{mode}_evaluator.ann_file': annotations for mode in ('val', 'test')},
            'train_dataloader.batch_size': 2,
            'train_cfg.max_epochs': 1,
            'model.backbone.norm_eval': False,
            'model.rpn_head.in_channels': CHANNELS,
            'model.rpn_head.feat_channels': CHANNELS,
            'model.roi_head.bbox_roi_extractor.out_channels': CHANNELS,
            'model.roi_head.bbox_head.in_channels': CHANNELS,
            'model.roi_head.bbox_head.fc_out_channels': CHANNELS,
            'model.roi_head.mask_roi_extractor.out_channels': CHANNELS,
            'model.roi_head.mask_head.in_channels': CHANNELS,
            'model.roi_head.mask_head.conv_out_channels': CHANNELS,
            'model.train_cfg.rpn.sampler.num': 32,
            'model.train_cfg.rcnn.sampler.num': 16,
            'model.train_cfg.rpn_proposal.max_per_img': 50,
            'model.test_cfg.rpn.max_per_img': 20,
            'model.test_cfg.rcnn.score_thr': 0.0,  # an untrained model detects something, too
            'work_dir': str(work_dir),
            'experiment_name': work_dir.name,
            **changes,
        }
    )
    for mode in ('val', 'test'):
        evaluator = f'{mode}_evaluator'
        config[evaluator] = [config[evaluator], dict(type='EachImage')]
    return config


def segmentation_config(folder, work_dir, **changes):
    """Semantic FPN on a thin CARE."""
    config = two_bases('fpn/care_s0_ade20k.py', folder)
    config.merge_from_dict(
        {
            **BACKBONE,
            **{f'{mode}_dataloader.dataset.data_root': str(folder / 'ade') for mode in MODES},
            **{f'{mode}_dataloader.num_workers': 0 for mode in MODES},
            **{f'{mode}_dataloader.persistent_workers': False for mode in ('val', 'test')},
            **{
                f'{mode}_dataloader.dataset.pipeline.{index}.scale': (4 * SIZE, SIZE)
                for mode, index in (('train', 3), ('val', 1), ('test', 1))
            },
            'train_dataloader.dataset.pipeline.4.crop_size': (SIZE, SIZE),
            'train_dataloader.batch_size': 2,
            'train_cfg.max_iters': 2,
            'train_cfg.val_interval': 2,
            'default_hooks.checkpoint.interval': 2,
            'model.data_preprocessor.size': (SIZE, SIZE),
            'model.decode_head.in_channels': [CHANNELS] * 4,
            'model.decode_head.channels': CHANNELS,
            'work_dir': str(work_dir),
            'experiment_name': work_dir.name,
            **changes,
        }
    )
    for mode in ('val', 'test'):
        evaluator = f'{mode}_evaluator'
        config[evaluator] = [config[evaluator], dict(type='EachImage')]
    return config


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def step_gradients(model, batch, seed):
    """The gradients of a training step from seeded generators; the weights stay as they are."""
    found = {}

    def take(optimizer, args, kwargs):
        parameters = getattr(model, 'module', model).named_parameters()
        found.update({name: p.grad.clone() for name, p in parameters if p.requires_grad})

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(take)
    seed_all(seed)
    model.train_step(batch, OptimWrapper(optimizer))
    return found


def deviation(found, expected):
    """Largest difference of two sets of gradients, as a share of the largest gradient."""
    assert found.keys() == expected.keys()
    largest = max(gradient.abs().max() for gradient in expected.values())
    difference = max((found[name] - expected[name]).abs().max() for name in expected)
    return (difference / largest).item()


def mean(first, second):
    return {name: (first[name] + second[name]) / 2 for name in first}


def plain_copy(runner):
    """The runner's model without its wrapper, in the same modes."""
    model = MODELS.build(runner.cfg.model)
    model.load_state_dict(runner.model.module.state_dict())
    for module, original in zip(model.modules(), runner.model.module.modules(), strict=True):
        module.training = original.training
    return model


def detection_gradients(folder):
    """Two processes with two images each, and the same in one process."""
    runner = RUNNERS.build(
        detection_config(
            folder,
            folder / f'det_gradients_{RANK}',
            **{'model.backbone.norm_eval': True, 'model.backbone.drop_path_rate': 0.5},
        )
    )
    runner._init_model_weights()
    dataset = runner.build_dataloader(runner.cfg.train_dataloader).dataset
    seed_all(0)
    samples = [dataset[index] for index in range(4)]
    halves = [pseudo_collate(samples[:2]), pseudo_collate(samples[2:])]
    runner.model.train()
    found = step_gradients(runner.model, deepcopy(halves[RANK]), seed=RANK)
    model = plain_copy(runner)
    alone = [step_gradients(model, deepcopy(halves[index]), seed=index) for index in (0, 1)]
    other_seed = step_gradients(model, deepcopy(halves[0]), seed=2)
    return dict(
        wrapper=type(runner.model).__name__,
        find_unused=runner.model.find_unused_parameters,
        backend=torch.distributed.get_backend(),
        mean_of_halves=deviation(found, mean(*alone)),
        one_half=deviation(found, alone[0]),
        other_seed=deviation(found, mean(other_seed, alone[1])),
    )


def segmentation_batch(ignored):
    """Four images with random labels, of which a share is ignored in the first half only."""
    from mmseg.structures import SegDataSample

    rng = np.random.default_rng(1)
    inputs, samples = [], []
    for index in range(4):
        image = torch.from_numpy(rng.integers(0, 256, (3, SIZE, SIZE), dtype=np.uint8))
        labels = image[:1].long() % 150
        if index < 2:
            labels[:, : int(ignored * SIZE)] = 255
        sample = SegDataSample(metainfo=dict(img_shape=(SIZE, SIZE), ori_shape=(SIZE, SIZE)))
        sample.gt_sem_seg = PixelData(data=labels)
        inputs.append(image)
        samples.append(sample)
    return inputs, samples


def segmentation_gradients(folder):
    """Two processes with two images each, and one process with all four."""
    runner = RUNNERS.build(
        segmentation_config(
            folder,
            folder / f'seg_gradients_{RANK}',
            **{'model.backbone.drop_path_rate': 0.0, 'model.decode_head.dropout_ratio': 0.0},
        )
    )
    runner._init_model_weights()
    results = {}
    for case, training_norms, ignored in (
        ('fixed norms', False, 0.0),
        ('training norms', True, 0.0),
        ('ignored pixels', False, 0.75),
    ):
        runner.model.train()
        for module in runner.model.modules():
            if isinstance(module, _BatchNorm):
                module.train(training_norms)
        inputs, samples = segmentation_batch(ignored)
        share = slice(2 * RANK, 2 * RANK + 2)
        half = deepcopy(dict(inputs=inputs[share], data_samples=samples[share]))
        found = step_gradients(runner.model, half, seed=0)
        whole = step_gradients(plain_copy(runner), dict(inputs=inputs, data_samples=samples), 0)
        results[case] = deviation(found, whole)
    return results


def evaluated(metrics):
    """What an evaluation found: the images, and the first metric."""
    name = next(name for name in ('coco/bbox_mAP', 'mIoU') if name in metrics)
    return dict(images=metrics['images'], metric=float(metrics[name]))


def train_and_evaluate(config):
    """Train, with a validation and a checkpoint at the end, and test."""
    runner = RUNNERS.build(config)
    runner.train()
    hub = runner.message_hub
    found = {name.removeprefix('val/'): value.current() for name, value in hub.log_scalars.items()}
    validated = evaluated(dict(found, images=hub.get_info('val/images')))
    statistics = torch.cat(
        [norm.running_mean for norm in runner.model.modules() if isinstance(norm, _BatchNorm)]
    )
    return dict(
        validated=validated,
        tested=evaluated(runner.test()),
        files=sorted(path.name for path in Path(config.work_dir).iterdir() if path.is_file()),
        statistics=statistics.tolist(),
    )


def unused_parameters():
    """Two steps each: the second raises if the first left a parameter without gradient."""
    image = torch.rand(2, 3, 32, 32)
    checked = []
    subsets = [chosen for size in range(1, 5) for chosen in combinations(range(4), size)]
    options = [{}, dict(out_norm_cfg=dict(type='BN'), with_cp=True), dict(frozen_stages=1)]
    for out_indices in subsets:
        for option in options:
            if option.get('frozen_stages', -1) > out_indices[-1]:
                continue  # nothing would be left to train
            model = CPUDistributedDataParallel(CARE(ARCH, out_indices=out_indices, **option))
            assert not model.find_unused_parameters
            for _ in range(2):
                sum(output.square().mean() for output in model(image)).backward()
            checked.append(out_indices)
    return sorted(set(checked))


def unused_is_noticed():
    """The same with a parameter that is not used: what the message says."""
    care = CARE(ARCH, out_indices=(0,))
    care.stages.append(CARE(ARCH).stages[1])
    care.forward = lambda image: [care.stages[0](care.stem(image))]
    model = CPUDistributedDataParallel(care)
    try:
        for _ in range(2):
            model(torch.rand(2, 3, 32, 32))[0].square().mean().backward()
    except RuntimeError as error:
        return str(error)
    return ''


def sync_bn():
    """What SyncBN says to a training step on the CPU."""
    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(CARE(ARCH))
    try:
        model(torch.rand(2, 3, 32, 32))
    except ValueError as error:
        return str(error)
    return ''


class UnevenModel(NoisyModel):
    """The processes draw different numbers of values, so that their generators part."""

    def forward(self, inputs, mode='tensor'):
        for _ in range(RANK):
            torch.rand(3), np.random.rand(), random.random()
        return super().forward(inputs, mode)


def train_uneven(work_dir, by_epoch, stop=None, resume=False):
    """As in test_exact_resume_hook.py, in two processes."""
    seed_all(0)
    runner = CheckingRunner(
        model=UnevenModel(),
        work_dir=str(work_dir),
        experiment_name=f'{work_dir.name}_{stop}_{resume}',
        launcher='pytorch',
        cfg=dict(model_wrapper_cfg=dict(type='mmcare.CPUDistributedDataParallel')),
        train_dataloader=dict(
            dataset=NoisyDataset(),
            batch_size=1,
            num_workers=1,
            collate_fn=collate,
            sampler=dict(type='DefaultSampler' if by_epoch else 'InfiniteSampler', shuffle=True),
        ),
        train_cfg=dict(by_epoch=True, max_epochs=3, val_interval=1)
        if by_epoch
        else dict(by_epoch=False, max_iters=12, val_interval=2),
        optim_wrapper=dict(optimizer=dict(type='AdamW', lr=0.05)),
        val_dataloader=dict(
            dataset=NoisyDataset(),
            batch_size=2,
            collate_fn=collate,
            sampler=dict(type='DefaultSampler', shuffle=False),
        ),
        val_cfg=dict(type=Silent),
        val_evaluator=[],
        randomness=dict(seed=3),
        resume=resume,
        default_hooks=dict(
            checkpoint=dict(
                type='mmcare.AtomicCheckpointHook', by_epoch=by_epoch, interval=1 if by_epoch else 2
            )
        ),
        custom_hooks=[
            dict(type='mmcare.ExactResumeHook'),
            dict(type='StopAfter', stop=stop),
        ],
    )
    try:
        runner.train()
    except KeyboardInterrupt:
        assert stop is not None
    return {name: value.clone() for name, value in runner.model.state_dict().items()}


def resume(folder, by_epoch):
    """An uninterrupted run beside one that is stopped and resumed."""
    name = 'epochs' if by_epoch else 'iterations'
    uninterrupted = train_uneven(folder / f'whole_{name}', by_epoch)
    stopped = train_uneven(folder / f'parts_{name}', by_epoch, stop=5)
    last = 'epoch_1' if by_epoch else 'iter_4'
    states = read_checkpoint(folder / f'parts_{name}' / f'{last}.pth')['generator_states']
    resumed = train_uneven(folder / f'parts_{name}', by_epoch, resume=True)
    return dict(
        ranks=len(states),
        states_differ=not torch.equal(states[0]['torch'], states[1]['torch']),
        stopped_is_whole=equal(uninterrupted, stopped),
        resumed_is_whole=equal(uninterrupted, resumed),
    )


def main():
    folder = Path(sys.argv[1])
    results = dict(
        detection_gradients=detection_gradients(folder),
        detection=train_and_evaluate(detection_config(folder, folder / f'det_{RANK}')),
        segmentation_gradients=segmentation_gradients(folder),
        segmentation=train_and_evaluate(segmentation_config(folder, folder / f'seg_{RANK}')),
        resume=dict(epochs=resume(folder, True), iterations=resume(folder, False)),
        unused_parameters=unused_parameters(),
        unused_is_noticed=unused_is_noticed(),
        sync_bn=sync_bn(),
    )
    (folder / f'rank{RANK}.json').write_text(json.dumps(results))


if __name__ == '__main__':
    main()
