"""Measure the accuracy of backbones that are trained from scratch on three public data sets.

If a data set is named, the script trains a backbone in the shipped config (a second call resumes
from the last checkpoint), tests it once, and writes the log's scalars to
benchmarks/results/accuracy. Without arguments, it draws the curves of all files there and writes
their tables into docs/results.md. Latencies come from recordings of latency.py.
"""

import argparse
import json
import sys
from pathlib import Path

import pandas as pd
import torch
from latency import PEERS
from matplotlib.figure import Figure
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from mmengine.runner import Runner
from recording import save

from mmcare.analysis.counting import count_macs
from mmcare.compatibility import require
from mmcare.models import CARE
from mmcare.shipped import shipped_config

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / 'tools'))

from demo import draw_predictions  # noqa: E402 (found through the path above)

RESULTS = ROOT / 'benchmarks/results/accuracy'
PAGE, CURVES = ROOT / 'docs/results.md', ROOT / 'docs/images/learning_curves.png'
MASKS = {'coco/segm_mAP': 'mask AP', 'coco/segm_mAP_50': 'mask AP50', 'coco/bbox_mAP': 'box AP'}
BOXES = {'coco/bbox_mAP': 'box AP', 'pascal_voc/AP50': 'AP50 (VOC)'}
# Config, height and width for GMACs and latency, factor that makes metrics per cent, metrics.
SETS = {
    'dsb2018': ('mask_rcnn/care_s0_dsb2018', (256, 256), 100, MASKS),
    'bccd': ('retinanet/care_s0_bccd', (256, 320), 100, BOXES),
    'camvid': ('fpn/care_s0_camvid', (256, 320), 1, {'mIoU': 'mIoU', 'aAcc': 'pixel accuracy'}),
}


def read_config(name: str, key: str) -> Config:
    """Read the shipped config of a data set, and set the backbone."""
    config = Config.fromfile(shipped_config(SETS[name][0]))
    if model_name := PEERS['timm_model'][key]:
        timm = require('timm', 'a peer', 'bench')
        options = dict(features_only=True, out_indices=[-4, -3, -2, -1], pretrained=False)
        channels = timm.create_model(model_name, **options).feature_info.channels()
        peer = dict(type='mmpretrain.TIMMBackbone', model_name=model_name, **options)
        config.model.backbone = peer
    else:
        channels = CARE(key).out_channels
        config.model.backbone.arch = key
    config.model.neck.in_channels = list(channels)
    return config


def train(name: str, key: str, seed: int) -> None:
    """Train and test a backbone, and write the scalars."""
    config, folder = read_config(name, key), Path(f'work_dirs/accuracy/{name}_{key}_{seed}')
    config.merge_from_dict({'randomness.seed': seed, 'resume': True, 'work_dir': str(folder)})
    runner = Runner.from_cfg(config)
    runner.train()
    tested = dict(runner.test(), split='test', step=runner.iter)
    logs = sorted(folder.glob('*/vis_data/scalars.json'))  # one for each resume
    rows = pd.concat([pd.read_json(log, lines=True) for log in logs])
    rows['split'] = rows['loss'].isna().map({True: 'val', False: 'train'})
    rows = rows.drop_duplicates(['split', 'step'], keep='last').sort_values('step')
    rows = pd.concat([rows, pd.DataFrame([tested])])
    save(RESULTS / f'{folder.name}.csv', rows[['split', 'step', 'loss', *SETS[name][3]]].round(4))
    if key == 's0' and name != 'camvid':  # CamVid's licence allows research only
        draw_predictions(runner, CURVES.with_name(f'{name}.jpg'), number=3)


def read_runs(name: str) -> pd.DataFrame:
    """Read the scalars of all runs on a set, with columns for backbone and seed, in per cent."""
    tables = []
    for file in sorted(RESULTS.glob(f'{name}_*.csv')):
        key, seed = file.stem.removeprefix(f'{name}_').rsplit('_', 1)
        tables.append(pd.read_csv(file).assign(key=key, seed=int(seed)))
        tables[-1][list(SETS[name][3])] *= SETS[name][2]
    return pd.concat(tables)


def make_table(name: str, runs: pd.DataFrame) -> str:
    """Write a row for each backbone: means of the seeds and half their range, size and speed."""
    _, shape, _, metrics = SETS[name]
    recording = RESULTS / f'latency_{shape[0]}x{shape[1]}.json'
    times = pd.DataFrame(json.loads(recording.read_text())['milliseconds']['onnxruntime'])
    rows, tests = [], runs[runs['split'] == 'test'].set_index('key')
    means = tests.groupby('key')[next(iter(metrics))].mean()
    for key in means.sort_values(ascending=False).index:
        config, seeds = read_config(name, key), tests.loc[[key]]
        with DefaultScope.overwrite_default_scope(config.default_scope):
            backbone = MODELS.build(config.model.backbone)
        row = {'backbone': PEERS['label'][key]}
        for metric, title in metrics.items():
            spread = (seeds[metric].max() - seeds[metric].min()) / 2
            row[title] = f'{seeds[metric].mean():.1f}' + f' ± {spread:.1f}' * (len(seeds) > 1)
        row['parameters, M'] = f'{sum(p.numel() for p in backbone.parameters()) / 1e6:.1f}'
        row['GMACs'] = f'{count_macs(backbone, torch.zeros(1, 3, *shape))[""] / 1e9:.2f}'
        row['time, x CARE-S0'] = f'{(times[key] / times["s0"]).median():.2f}'
        rows.append(row)
    return pd.DataFrame(rows).to_markdown(index=False, disable_numparse=True)


def report() -> None:
    """Draw the validation curves, and replace the table of each data set in docs/results.md."""
    text, figure = PAGE.read_text(encoding='utf-8'), Figure(figsize=(15, 4.5), layout='constrained')
    for place, name in enumerate(SETS):
        axes, runs = figure.add_subplot(1, len(SETS), place + 1), read_runs(name)
        metric, title = next(iter(SETS[name][3].items()))
        for (key, seed), run in runs[runs['split'] == 'val'].groupby(['key', 'seed']):
            style = ('*' if key in CARE.arch_zoo else 'o') + ('--' if seed else '-')
            label, colour = f'{PEERS["label"][key]}, seed {seed}', f'C{PEERS.index.get_loc(key)}'
            axes.plot(run['step'], run[metric], style, color=colour, label=label)
        axes.set(title=name, xlabel='iteration', ylabel=f'{title} on the validation split, %')
        axes.legend()
        begin, end = f'<!--- {name}: written by benchmarks/accuracy.py -->', '<!--- end -->'
        before, _, after = text.partition(begin)
        text = f'{before}{begin}\n\n{make_table(name, runs)}\n\n{end}{after.partition(end)[2]}'
    save(CURVES, figure)
    save(PAGE, text)


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('set', nargs='?', choices=SETS)
    parser.add_argument('backbone', nargs='?', default='s0', choices=PEERS.index)
    parser.add_argument('seed', nargs='?', default=0, type=int)
    arguments = parser.parse_args()
    train(arguments.set, arguments.backbone, arguments.seed) if arguments.set else report()
