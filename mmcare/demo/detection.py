"""Mask R-CNN CARE-S0, trained from scratch on sample scenes with the shipped config."""

import time
from pathlib import Path
from typing import Any

import mmcv
from mmengine.config import Config
from mmengine.registry import RUNNERS

from mmcare.demo import QUICK_START, empty_data_dir
from mmcare.demo.report import plot_curves, read_scalars, write_grid, write_results
from mmcare.sample_data import make_coco
from mmcare.shipped import shipped_config

GOAL = 0.5  # box AP50 on held-out scenes
SCENES = (600, 60)  # to learn from, and held out
IMAGE_SIZE = 160  # twice the largest object
EPOCHS = 3
BATCH_SIZE = 4
METRICS = {
    'coco/bbox_mAP_50': 'box AP50',
    'coco/bbox_mAP': 'box AP',
    'coco/segm_mAP_50': 'mask AP50',
    'coco/segm_mAP': 'mask AP',
}


def demo_config(data_dir: Path, work_dir: Path) -> Config:
    """The shipped config for COCO, overridden where a small data set and two cores ask for it.

    Args:
        data_dir: Data in COCO 2017 layout.
        work_dir: Where checkpoints and logs go.
    """
    config = Config.fromfile(shipped_config('mask_rcnn/care_s0_coco'))
    for name in ('train', 'val', 'test'):
        dataset = config[f'{name}_dataloader'].dataset
        dataset.data_root = f'{data_dir}/'
        for transform in dataset.pipeline:
            if transform['type'] == 'Resize':
                transform['scale'] = (IMAGE_SIZE, IMAGE_SIZE)
    for name in ('val', 'test'):
        config[f'{name}_evaluator'].ann_file = f'{data_dir}/annotations/instances_val2017.json'
    config.merge_from_dict(
        {
            'work_dir': str(work_dir),
            # mmengine hands a visualizer of the same name, and its folder, from run to run.
            'visualizer.name': str(work_dir),
            'train_dataloader.batch_size': BATCH_SIZE,
            'train_cfg.max_epochs': EPOCHS,
            'train_cfg.val_interval': 1,
            'optim_wrapper.optimizer.lr': 1e-3,
            # The second moment forgets the first steps within this short run.
            'optim_wrapper.optimizer.betas': (0.9, 0.98),
            'optim_wrapper.optimizer.fused': True,
            # A step of Adam moves a layer's output in proportion to its inputs: 12544 of the first
            # fully connected layer, 2304 of the 3x3 convolutions, a few hundred in the backbone.
            'optim_wrapper.paramwise_cfg.custom_keys': {
                'neck': dict(lr_mult=0.2),
                'rpn_head': dict(lr_mult=0.2),
                'mask_head': dict(lr_mult=0.2),
                'bbox_head': dict(lr_mult=0.3),
                'shared_fcs': dict(lr_mult=0.04),
            },
            'param_scheduler': [
                dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=50),
                dict(
                    type='CosineAnnealingLR',
                    by_epoch=True,
                    begin=1,
                    end=EPOCHS,
                    T_max=EPOCHS - 1,
                    eta_min=1e-5,
                    convert_to_iter_based=True,
                ),
            ],
            'default_hooks.logger.interval': 10,
            # From scratch: no file of weights, and the norms learn. The published initialisation
            # (std 0.02), layer scale (1e-6) and drop path are meant for hundreds of epochs: with
            # them the blocks pass hardly any signal for as long as this run takes.
            'model.backbone.init_cfg': QUICK_START,
            'model.backbone.norm_eval': False,
            'model.backbone.layer_scale_init_value': 0.1,
            'model.backbone.drop_path_rate': 0.0,
            # Fewer proposals and RoIs: scenes are small and hold six objects at most.
            'model.train_cfg.rcnn.sampler.num': 40,
            'model.train_cfg.rpn_proposal.nms_pre': 500,
            'model.train_cfg.rpn_proposal.max_per_img': 200,
            'model.test_cfg.rpn.max_per_img': 100,
        }
    )
    return config


def run(work_dir: Path) -> dict[str, Any]:
    """Make the data, test untrained, train, test, and leave figures and pictures.

    Args:
        work_dir: Gets ``sample_data/``, the checkpoint and the logs of mmengine, ``results.json``,
            ``curves.png`` and ``predictions.png``.

    Returns:
        Box and mask AP untrained and trained, and the minutes of training.
    """
    data_dir = empty_data_dir(work_dir)
    make_coco(data_dir, train=SCENES[0], val=SCENES[1], size=IMAGE_SIZE)
    runner = RUNNERS.build(demo_config(data_dir, work_dir))
    runner.model.init_weights()
    before = runner.test()
    started = time.monotonic()
    runner.train()
    minutes = (time.monotonic() - started) / 60
    after = runner.test()

    results = dict(
        goal=dict(metric='coco/bbox_mAP_50', above=GOAL),
        training_minutes=round(minutes, 1),
        # Without a single detection mmdet reports no figures at all.
        untrained={name: before.get(name, 0.0) for name in METRICS},
        trained={name: after.get(name, 0.0) for name in METRICS},
    )
    write_results(results, work_dir / 'results.json')
    plot_curves(
        read_scalars(Path(runner.log_dir)),
        ['loss', 'loss_rpn_cls', 'loss_rpn_bbox', 'loss_cls', 'loss_bbox', 'loss_mask'],
        METRICS,
        work_dir / 'curves.png',
    )
    _draw_predictions(runner, work_dir / 'predictions.png')
    return results


def _draw_predictions(runner: Any, filename: Path, number: int = 6) -> None:
    """Held-out scenes: the annotation on the left of each pair, the prediction on the right."""
    from mmdet.apis import inference_detector
    from mmdet.registry import VISUALIZERS
    from mmdet.structures.bbox import get_box_tensor

    dataset = runner.test_dataloader.dataset
    runner.model.cfg = runner.cfg
    visualizer = VISUALIZERS.build(
        {**runner.cfg.visualizer, 'name': 'predictions', 'vis_backends': None}
    )
    visualizer.dataset_meta = dataset.metainfo
    pictures = []
    for index in range(number):
        packed = dataset[index]['data_samples']
        image = mmcv.imread(packed.img_path)
        sample = inference_detector(runner.model, image)
        sample.gt_instances = packed.gt_instances
        sample.gt_instances.bboxes = get_box_tensor(packed.gt_instances.bboxes)
        visualizer.add_datasample('prediction', image[..., ::-1], sample, pred_score_thr=0.5)
        pictures.append(visualizer.get_image()[..., ::-1])
    write_grid(pictures, 2, filename)
