"""Train from scratch and test on generated scenes; no download, two CPU cores.

The scenes are drawn first unless the config's data_root exists. Exit status: 0 if the goal is
reached, 1 if not, 2 for bad input.
"""

import argparse
import json
import time
from pathlib import Path

import pandas as pd
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
    print(table.rename(index=metrics).to_string(float_format='{:.3f}'.format))
    print(
        f'{metrics[metric]} on held-out scenes: {reached:.3f} after {minutes} minutes of training '
        f'(goal: above {goal}); see {work_dir}/curves.png and {work_dir}/predictions.png'
    )
    parser.exit(int(reached <= goal))


if __name__ == '__main__':
    main()
