"""Train from scratch, test and draw on generated scenes; no download, two CPU cores.

The scenes are drawn first unless the config's data_root exists. Exit status: 0 if the goal is
reached, 1 if not, 2 for bad input.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import mmcv
import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle
from mmengine.config import Config, DictAction
from mmengine.device import utils as device
from mmengine.runner import Runner

from mmcare.files import check_writable, moved_into_place
from mmcare.sample_data import make_ade20k, make_coco
from mmcare.shipped import shipped_config

BOXES = {'coco/bbox_mAP_50': 'box AP50', 'coco/segm_mAP_50': 'mask AP50'}
PIXELS = {'mIoU': 'mIoU', 'aAcc': 'pixel accuracy'}
# Data, config, metrics, their divisor (mmseg gives per cent), goal of the first metric.
DEMOS = {
    'coco': (make_coco, 'demo/care_s0_mask_rcnn_scenes', BOXES, 1, 0.8),
    'ade20k': (make_ade20k, 'demo/care_s0_fpn_scenes', PIXELS, 100, 0.7),
}


def plot_curves(runner: Runner, metrics: dict[str, str], unit: int, filename: Path) -> None:
    """Plot the logged losses by iteration, and the metrics below."""
    rows = pd.read_json(f'{runner.log_dir}/vis_data/scalars.json', lines=True).set_index('step')
    _, (upper, lower) = plt.subplots(2, 1, figsize=(8, 8), layout='constrained')
    losses = rows.filter(like='loss').dropna(how='all')
    losses.plot(xlabel='iteration', ylabel='loss', ylim=(0, None), ax=upper)
    tested = rows.reindex(columns=list(metrics)).dropna(how='all').rename(columns=metrics)
    tested.div(unit).plot(xlabel='tested after', ylim=(0, 1), marker='o', ax=lower)
    with moved_into_place(filename) as temporary:
        plt.savefig(temporary)


def show(axis: Axes, image: np.ndarray, sample: Any, part: str, colours: np.ndarray) -> None:
    """Show an image (H, W, 3) with its classes as colours, or the outlines of its objects.

    Predicted objects have scores from 0.5 on.
    """
    axis.imshow(image)
    axis.set_axis_off()
    axis.autoscale(False)  # boxes may reach over the border
    if f'{part}_sem_seg' in sample:
        axis.imshow(colours[sample.get(f'{part}_sem_seg').data[0].numpy()], alpha=0.6)
        return
    objects = sample.get(f'{part}_instances').numpy()
    if 'scores' in objects:
        objects = objects[objects.scores >= 0.5]
    boxes = objects.bboxes if isinstance(objects.bboxes, np.ndarray) else objects.bboxes.numpy()
    for index, (box, label) in enumerate(zip(boxes, objects.labels, strict=True)):
        left, top, right, bottom = box
        size = right - left, bottom - top
        axis.add_patch(Rectangle((left, top), *size, fill=False, color=colours[label], lw=1.5))
        if 'masks' in objects:
            mask = objects.masks[index : index + 1]
            mask = mask if isinstance(mask, np.ndarray) else mask.to_ndarray()
            axis.contour(mask[0], [0.5], colors=[colours[label]], linewidths=2)


@torch.no_grad()
def draw_predictions(runner: Runner, filename: Path, number: int = 4) -> None:
    """Draw held-out images, annotations next to predictions; a legend names the colours."""
    data = runner.test_dataloader.dataset
    number, metainfo = min(number, len(data)), data.metainfo
    colours = np.zeros((256, 3))  # labels without a class are black
    colours[: len(metainfo['classes'])] = np.array(metainfo['palette']) / 255
    size = (10, 5 * number)
    figure, axes = plt.subplots(number, 2, figsize=size, squeeze=False, layout='constrained')
    for row, batch in zip(axes, runner.test_dataloader, strict=False):
        sample = runner.model.test_step(batch)[0].to('cpu')
        image = mmcv.imread(sample.img_path, channel_order='rgb')
        for axis, part in zip(row, ('gt', 'pred'), strict=True):
            show(axis, image, sample, part, colours)
    for axis, title in zip(axes[0], ('truth', 'prediction'), strict=True):
        axis.set_title(title, fontsize=20)
    names = zip(metainfo['classes'], colours, strict=False)
    handles = [Patch(color=colour, label=name) for name, colour in names]
    figure.legend(handles=handles, loc='outside upper center', ncols=4, fontsize=16)
    with moved_into_place(filename) as temporary:
        figure.savefig(temporary)


def main() -> None:
    """Run one demo and say what was reached."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('kind', choices=DEMOS, help="the layout of the data; the config's task")
    parser.add_argument('--work-dir', type=Path, help="where results go; default: the config's")
    parser.add_argument('--device', help="default: MMEngine's choice, but cpu in place of mps")
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, help='changes of the config')
    arguments = parser.parse_args()
    device.DEVICE = arguments.device or device.DEVICE.replace('mps', 'cpu')
    make_data, name, metrics, unit, goal = DEMOS[arguments.kind]
    config = Config.fromfile(shipped_config(name))
    config.merge_from_dict(arguments.cfg_options or {})
    work_dir = arguments.work_dir or Path(config.work_dir)
    config.work_dir = str(work_dir)
    data_root = Path(config.train_dataloader.dataset.data_root)
    try:
        check_writable(work_dir)
        if not data_root.exists():
            make_data(data_root)
    except OSError as error:
        parser.error(str(error))

    runner = Runner.from_cfg(config)
    runner.model.init_weights()
    measured = {'untrained': runner.test()}
    started = time.monotonic()
    runner.train()
    minutes = round((time.monotonic() - started) / 60, 1)
    measured['trained'] = runner.test()

    # mmdet reports nothing where it detects nothing.
    table = pd.DataFrame(measured).reindex(list(metrics)).fillna(0.0) / unit
    metric = table.index[0]
    reached = float(table.trained[metric])
    result = dict(goal=dict(metric=metric, above=goal), training_minutes=minutes, **table.to_dict())
    with moved_into_place(work_dir / 'results.json') as temporary:
        temporary.write_text(json.dumps(result, indent=2) + '\n')
    plot_curves(runner, metrics, unit, work_dir / 'curves.png')
    draw_predictions(runner, work_dir / 'predictions.png')
    print(table.rename(index=metrics).to_string(float_format='{:.3f}'.format))
    print(
        f'{metrics[metric]} on held-out scenes: {reached:.3f} after {minutes} minutes of training '
        f'(goal: above {goal}); see {work_dir}/curves.png and {work_dir}/predictions.png'
    )
    parser.exit(int(reached <= goal))


if __name__ == '__main__':
    main()
