"""Train from scratch, test and draw on generated scenes; no download, two CPU cores, ten minutes.

The scenes are drawn first unless the config's data_root exists. Exit status: 0 if the goal is
reached, 1 if not, 2 for bad input.
"""

import argparse
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib.pyplot as plt
import mmcv
import numpy as np
import pandas as pd
import torch
from mmengine.config import Config, DictAction
from mmengine.runner import Runner

from mmcare.files import check_writable, moved_into_place
from mmcare.sample_data import make_ade20k, make_coco
from mmcare.shipped import shipped_config

GOAL = 0.5  # of the first metric
BOXES = {'coco/bbox_mAP_50': 'box AP50', 'coco/segm_mAP_50': 'mask AP50'}
PIXELS = {'mIoU': 'mIoU', 'aAcc': 'pixel accuracy'}
# Data, config, metrics, what these are divided by (mmseg gives per cent), options of the pictures.
DEMOS = {
    'coco': (make_coco, 'demo/mask_rcnn_care_s0_scenes', BOXES, 1, {}),
    'ade20k': (make_ade20k, 'demo/fpn_care_s0_scenes', PIXELS, 100, dict(with_labels=False)),
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


@torch.no_grad()
def draw_predictions(runner: Runner, filename: Path, **options: object) -> None:
    """Draw held-out scenes, each annotation to the left of the prediction."""
    pictures = []
    with TemporaryDirectory() as folder:
        for batch, _ in zip(runner.test_dataloader, range(6), strict=False):
            (sample,) = runner.model.test_step(batch)
            image = mmcv.imread(sample.img_path, channel_order='rgb')
            name = f'{folder}/scene.png'
            runner.visualizer.add_datasample('', image, sample, out_file=name, **options)
            pictures.append(mmcv.imread(name))
    size = tuple(np.max([picture.shape[:2] for picture in pictures], axis=0))
    rows = [mmcv.impad(picture, shape=size, pad_val=(255,) * 3) for picture in pictures]
    with moved_into_place(filename) as temporary:
        mmcv.imwrite(mmcv.imrescale(np.vstack(rows), 2.0), str(temporary))


def main() -> None:
    """Run one demo and say what was reached."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('kind', choices=DEMOS, help="the layout of the data; the config's task")
    parser.add_argument('--work-dir', type=Path, help="where results go; default: the config's")
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, help='changes of the config')
    arguments = parser.parse_args()
    make_data, name, metrics, unit, options = DEMOS[arguments.kind]
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
    result = dict(goal=dict(metric=metric, above=GOAL), training_minutes=minutes, **table.to_dict())
    with moved_into_place(work_dir / 'results.json') as temporary:
        temporary.write_text(json.dumps(result, indent=2) + '\n')
    plot_curves(runner, metrics, unit, work_dir / 'curves.png')
    draw_predictions(runner, work_dir / 'predictions.png', **options)
    print(table.rename(index=metrics).to_string(float_format='{:.3f}'.format))
    print(
        f'{metrics[metric]} on held-out scenes: {reached:.3f} after {minutes} minutes of training '
        f'(goal: above {GOAL}); see {work_dir}/curves.png and {work_dir}/predictions.png'
    )
    parser.exit(int(reached <= GOAL))


if __name__ == '__main__':
    main()
