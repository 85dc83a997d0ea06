"""Semantic FPN CARE-S0, trained from scratch on sample scenes with the shipped config."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mmcv
import numpy as np
import torch
from mmengine.config import Config
from mmengine.evaluator import BaseMetric
from mmengine.registry import METRICS as MMENGINE_METRICS
from mmengine.registry import RUNNERS
from mmengine.structures import PixelData

from mmcare.demo import QUICK_START, empty_data_dir
from mmcare.demo.report import plot_curves, read_scalars, write_grid, write_results
from mmcare.sample_data import make_ade20k
from mmcare.shipped import shipped_config

GOAL = 0.5  # mIoU over the classes that occur, on held-out scenes
SCENES = (1000, 40)  # to learn from, and held out
IMAGE_SIZE = 160
CROP_SIZE = 128
BATCH_SIZE = 4
ITERATIONS = 900
METRICS = {
    'mIoU_occurring': 'mIoU, occurring classes',
    'mIoU': "mIoU, mmseg's",
    'aAcc': 'pixel accuracy',
}


@MMENGINE_METRICS.register_module()
class OccurringClassIoU(BaseMetric):
    """Mean IoU over the classes that occur in the ground truth: ``mIoU_occurring``, from 0 to 1.

    mmseg's mean also counts every class that does not occur but was predicted somewhere, as zero.
    Few of the 150 classes occur in the sample data, so a single wrong pixel would cost as much as
    missing one of them altogether. (Wrong pixels do count here: in the union of what they are.)
    """

    def process(self, data_batch: Any, data_samples: Sequence[dict]) -> None:
        """Count the pixels of each true and predicted class; label 255 is ignored."""
        num_classes = len(self.dataset_meta['classes'])
        for sample in data_samples:
            true = sample['gt_sem_seg']['data'].flatten().long()
            predicted = sample['pred_sem_seg']['data'].flatten().long()
            pairs = (num_classes * true + predicted)[true != 255]
            counts = torch.bincount(pairs, minlength=num_classes**2)
            self.results.append(counts.reshape(num_classes, num_classes).cpu())

    def compute_metrics(self, results: list[torch.Tensor]) -> dict[str, float]:
        """Average over classes, pixels of all images taken together."""
        counts = torch.stack(results).sum(0)
        true, predicted, both = counts.sum(1), counts.sum(0), counts.diagonal()
        occurs = true > 0
        return dict(mIoU_occurring=(both / (true + predicted - both))[occurs].mean().item())


def demo_config(data_dir: Path, work_dir: Path) -> Config:
    """The shipped config for ADE20K, overridden where a small data set and two cores ask for it.

    Args:
        data_dir: Data in the layout of the ADE20K challenge.
        work_dir: Where checkpoints and logs go.
    """
    config = Config.fromfile(shipped_config('fpn/care_s0_ade20k'))
    for name in ('train', 'val', 'test'):
        dataset = config[f'{name}_dataloader'].dataset
        dataset.data_root = str(data_dir)
        for transform in dataset.pipeline:
            if transform['type'] in ('RandomResize', 'Resize'):
                transform['scale'] = (4 * IMAGE_SIZE, IMAGE_SIZE)
                if 'ratio_range' in transform:
                    transform['ratio_range'] = (0.75, 1.5)  # textures have a narrow range of sizes
            elif transform['type'] == 'RandomCrop':
                transform['crop_size'] = (CROP_SIZE, CROP_SIZE)
    for name in ('val', 'test'):
        config[f'{name}_evaluator'] = [
            config[f'{name}_evaluator'],
            dict(type='OccurringClassIoU'),
        ]
    config.merge_from_dict(
        {
            'work_dir': str(work_dir),
            # mmengine hands a visualizer of the same name, and its folder, from run to run.
            'visualizer.name': str(work_dir),
            'train_dataloader.batch_size': BATCH_SIZE,
            'train_dataloader.num_workers': 1,
            'val_dataloader.num_workers': 1,
            'test_dataloader.num_workers': 1,
            'train_cfg.max_iters': ITERATIONS,
            'train_cfg.val_interval': ITERATIONS // 5,
            'optim_wrapper.optimizer.lr': 1e-3,
            'optim_wrapper.optimizer.fused': True,
            # Wide layers take smaller steps: see the detection demo.
            'optim_wrapper.paramwise_cfg.custom_keys': {
                'neck': dict(lr_mult=0.3),
            },
            'optim_wrapper.optimizer.betas': (0.9, 0.98),
            'param_scheduler': [
                dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=30),
                dict(type='PolyLR', power=0.9, by_epoch=False, begin=30, end=ITERATIONS),
            ],
            'default_hooks.logger.interval': 10,
            'default_hooks.checkpoint.interval': ITERATIONS,
            'model.data_preprocessor.size': (CROP_SIZE, CROP_SIZE),
            # From scratch: no file of weights, and see the detection demo.
            'model.backbone.init_cfg': QUICK_START,
            'model.backbone.layer_scale_init_value': 0.1,
            'model.backbone.drop_path_rate': 0.0,
        }
    )
    return config


def run(work_dir: Path) -> dict[str, Any]:
    """Make the data, test untrained, train, test, and leave figures and pictures.

    Args:
        work_dir: Gets ``sample_data/``, the checkpoint and the logs of mmengine, ``results.json``,
            ``curves.png`` and ``predictions.png``.

    Returns:
        The metrics untrained and trained, and the minutes of training.
    """
    data_dir = empty_data_dir(work_dir)
    make_ade20k(data_dir, train=SCENES[0], val=SCENES[1], size=IMAGE_SIZE)
    runner = RUNNERS.build(demo_config(data_dir, work_dir))
    runner.model.init_weights()
    before = runner.test()
    started = time.monotonic()
    runner.train()
    minutes = (time.monotonic() - started) / 60
    after = runner.test()

    results = dict(
        goal=dict(metric='mIoU_occurring', above=GOAL),
        training_minutes=round(minutes, 1),
        untrained={name: _as_shares(before)[name] for name in METRICS},
        trained={name: _as_shares(after)[name] for name in METRICS},
    )
    write_results(results, work_dir / 'results.json')
    plot_curves(
        [_as_shares(row) for row in read_scalars(Path(runner.log_dir))],
        ['loss'],
        METRICS,
        work_dir / 'curves.png',
    )
    _draw_predictions(runner, work_dir / 'predictions.png')
    return results


def _as_shares(metrics: dict[str, Any]) -> dict[str, Any]:
    """What mmseg gives in per cent, from 0 to 1."""
    return {
        name: float(value) / 100 if name in ('mIoU', 'aAcc') else value
        for name, value in metrics.items()
    }


def _draw_predictions(runner: Any, filename: Path, number: int = 6, enlarged: int = 2) -> None:
    """Held-out scenes, one a row: the image, its annotation, the prediction."""
    from mmseg.registry import VISUALIZERS

    dataset = runner.test_dataloader.dataset
    visualizer = VISUALIZERS.build(
        {**runner.cfg.visualizer, 'name': 'predictions', 'vis_backends': None, 'alpha': 0.6}
    )
    visualizer.dataset_meta = dataset.metainfo
    runner.model.eval()
    pictures = []
    for index in range(number):
        packed = dataset[index]
        with torch.no_grad():
            (sample,) = runner.model.test_step({key: [value] for key, value in packed.items()})
        image = mmcv.imread(sample.img_path)
        for name in ('gt_sem_seg', 'pred_sem_seg'):
            labels = sample.get(name).data
            labels = labels.repeat_interleave(enlarged, -1).repeat_interleave(enlarged, -2)
            setattr(sample, name, PixelData(data=labels))
        image = np.repeat(np.repeat(image, enlarged, 0), enlarged, 1)
        pictures.append(image)
        for truth in (True, False):
            visualizer.add_datasample(
                'scene', image[..., ::-1], sample, draw_gt=truth, draw_pred=not truth
            )
            pictures.append(visualizer.get_image()[..., ::-1])
    write_grid(pictures, 3, filename)
