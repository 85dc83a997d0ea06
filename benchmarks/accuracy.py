"""Measure the accuracy of backbones that are trained from scratch on three public data sets.

If a data set is named, the script trains a backbone in the shipped config with a learning rate (a
second call resumes from the last checkpoint), tests it once, and writes the log's scalars to
benchmarks/results/accuracy. With --fresh, it trains and validates on the splits of partition.py,
and tests nothing. --fresh --test then chooses a rate for each backbone by validation, and tests the
runs with this rate, once. Without arguments, the script draws the curves of the recorded runs and
writes their tables into docs/results.md. Latencies come from recordings of latency.py.
"""

import argparse
import json
import sys
from itertools import islice
from pathlib import Path

import pandas as pd
import torch
from latency import PEERS, describe_ratio
from matplotlib.figure import Figure
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from mmengine.runner import Runner, find_latest_checkpoint
from partition import use_fresh_splits
from recording import save
from scipy import stats

from mmcare.analysis.counting import count_macs
from mmcare.compatibility import require
from mmcare.engine.hooks.plot_hook import draw_predictions, keep
from mmcare.models import CARE
from mmcare.shipped import shipped_config

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / 'benchmarks/results/accuracy'
WORK = Path('work_dirs/accuracy')
RATES = ('3e-3', '1e-3')
BACKBONES = ('s0', 'resnet18', 'mobilenetv4_m')  # on fresh splits, with three seeds
SEEDS = range(3)
PAGE, CURVES = ROOT / 'docs/results.md', ROOT / 'docs/images/learning_curves.png'
MASKS = {'coco/segm_mAP': 'mask AP', 'coco/segm_mAP_50': 'mask AP50', 'coco/bbox_mAP': 'box AP'}
BOXES = {'coco/bbox_mAP': 'box AP', 'pascal_voc/AP50': 'AP50 (VOC)'}
# Config, height and width for GMACs and latency, factor that makes metrics per cent, metrics.
SETS = {
    'dsb2018': ('mask_rcnn/care_s0_dsb2018', (256, 256), 100, MASKS),
    'bccd': ('retinanet/care_s0_bccd', (256, 320), 100, BOXES),
    'camvid': ('fpn/care_s0_camvid', (256, 320), 1, {'mIoU': 'mIoU', 'aAcc': 'pixel accuracy'}),
}


def read_config(name: str, key: str, rate: str = RATES[0], fresh: bool = False) -> Config:
    """Read the shipped config of a data set, and set the backbone and the learning rate."""
    config = Config.fromfile(shipped_config(SETS[name][0]))
    config.optim_wrapper.optimizer.lr = float(rate)
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
    if fresh:
        use_fresh_splits(config, name, WORK / f'fresh_{name}')
    return config


def train(name: str, key: str, rate: str, seed: int, fresh: bool = False) -> None:
    """Train a backbone and write the scalars; test it unless the splits are fresh."""
    config, folder = read_config(name, key, rate, fresh), folder_of(name, key, rate, seed, fresh)
    config.merge_from_dict({'randomness.seed': seed, 'resume': True, 'work_dir': str(folder)})
    runner = Runner.from_cfg(config)
    runner.train()
    tested = [] if fresh else [dict(runner.test(), split='test', step=runner.iter)]
    logs = sorted(folder.glob('*/vis_data/scalars.json'))  # one for each resume
    rows = pd.concat([pd.read_json(log, lines=True) for log in logs])
    rows['split'] = rows['loss'].isna().map({True: 'val', False: 'train'})
    rows = rows.drop_duplicates(['split', 'step'], keep='last').sort_values('step')
    rows = pd.concat([rows, pd.DataFrame(tested)])
    recording = RESULTS / folder.relative_to(WORK).with_suffix('.csv')
    recording.parent.mkdir(exist_ok=True)
    save(recording, rows[['split', 'step', 'loss', *SETS[name][3]]].round(4))
    if key == 's0' and name != 'camvid' and not fresh:  # CamVid's licence allows research only
        with torch.no_grad():
            batches = islice(runner.test_dataloader, 3)
            samples = [keep(runner.model.test_step(batch)[0], score_thr=0.5) for batch in batches]
        metainfo = runner.test_dataloader.dataset.metainfo
        draw_predictions(samples, metainfo, CURVES.with_name(f'{name}.jpg'), score_thr=0.5)


def folder_of(name: str, key: str, rate: str, seed: int, fresh: bool) -> Path:
    """Name the folder of a run; its recording has the same name."""
    return WORK / ('fresh' if fresh else '') / f'{name}_{key}_{rate}_{seed}'


def test_fresh(name: str) -> None:
    """Choose each backbone's rate by validation, and test the runs with this rate, once.

    Raises:
        SystemExit: If runs are missing, or have a test row.
    """
    runs = read_runs(name, RESULTS / 'fresh')
    wanted = {(key, rate, seed) for key in BACKBONES for rate in RATES for seed in SEEDS}
    recorded = set(zip(runs['key'], runs['rate'], runs['seed'], strict=True))
    if missing := wanted - recorded:
        sys.exit(f'error: train these first, with --fresh: {sorted(missing)}')
    if (runs['split'] == 'test').any():
        sys.exit('error: the test pictures of the fresh splits were read before')
    rows = {}
    for key, rate in choose_rates(name, runs).items():
        for seed in SEEDS:
            config, folder = (
                read_config(name, key, rate, True),
                folder_of(name, key, rate, seed, True),
            )
            config.merge_from_dict({'randomness.seed': seed, 'work_dir': str(folder / 'test')})
            config.load_from = find_latest_checkpoint(str(folder))
            rows[f'{folder.name}.csv'] = dict(Runner.from_cfg(config).test(), split='test')
    for file, row in rows.items():
        table = pd.read_csv(RESULTS / 'fresh' / file)
        row['step'] = table['step'].max()
        added = pd.DataFrame([row]).reindex(columns=table.columns).round(4)
        save(RESULTS / 'fresh' / file, pd.concat([table, added]))


def read_runs(name: str, folder: Path = RESULTS) -> pd.DataFrame:
    """Read the scalars of all runs on a set, in per cent, with backbone, rate and seed."""
    tables = []
    for file in sorted(folder.glob(f'{name}_*.csv')):
        key, rate, seed = file.stem.removeprefix(f'{name}_').rsplit('_', 2)
        tables.append(pd.read_csv(file).assign(key=key, rate=rate, seed=int(seed)))
        tables[-1][list(SETS[name][3])] *= SETS[name][2]
    columns = ['split', 'step', 'key', 'rate', 'seed', *SETS[name][3]]
    return pd.concat(tables) if tables else pd.DataFrame(columns=columns)


def choose_rates(name: str, runs: pd.DataFrame) -> dict[str, str]:
    """Choose each backbone's rate by the first metric in the last validation.

    Rates are compared by means over the seeds that were run with each of them.
    """
    metric = next(iter(SETS[name][3]))
    last = runs[runs['split'] == 'val'].groupby(['key', 'rate', 'seed'])[metric].last()
    rates = {}
    for key, values in last.groupby('key'):
        by_rate = values.droplevel('key').unstack('rate')
        rates[str(key)] = str(by_rate.dropna().mean().idxmax())
    return rates


def describe(values: pd.Series) -> str:
    """Write mean and 95 % t-interval of three values or more, and fewer values as they are."""
    if len(values) < 3:
        return ', '.join(values.map('{:.1f}'.format))
    return f'{values.mean():.1f} ± {values.sem() * stats.t.ppf(0.975, len(values) - 1):.1f}'


def difference(ours: pd.Series, others: pd.Series) -> str:
    """Write the difference of two means with a 95 % interval of the t-test with equal variances."""
    if min(len(ours), len(others)) < 2:
        return 'one seed'
    interval = stats.ttest_ind(others, ours).confidence_interval()
    return f'{others.mean() - ours.mean():+.1f} ± {(interval.high - interval.low) / 2:.1f}'


def make_rows(name: str, runs: pd.DataFrame) -> pd.DataFrame:
    """Make a row for each backbone and rate, the chosen rate in bold, the best backbone first.

    Parameters and GMACs are left out: see :func:`make_table`.
    """
    _, shape, _, metrics = SETS[name]
    recording = RESULTS / f'latency_{shape[0]}x{shape[1]}.json'
    times = pd.DataFrame(json.loads(recording.read_text())['milliseconds']['onnxruntime'])
    metric, title = next(iter(metrics.items()))
    chosen, rows = choose_rates(name, runs), []
    tests = runs[runs['split'] == 'test'].sort_values('seed').set_index(['key', 'rate'])
    vals = runs[runs['split'] == 'val'].groupby(['key', 'rate', 'seed'])[metric].last()
    means = {key: tests.loc[[(key, rate)], metric].mean() for key, rate in chosen.items()}
    for key in sorted(means, key=means.__getitem__, reverse=True):
        for rate in sorted(vals[key].index.unique('rate'), key=chosen[key].__ne__):
            row = {'key': key, 'backbone': PEERS['label'][key], 'rate': rate}
            row[f'{title} on validation'] = describe(vals[key, rate])
            if (key, rate) in tests.index:
                seeds = tests.loc[[(key, rate)]]
                row |= {heading: describe(seeds[column]) for column, heading in metrics.items()}
            if rate == chosen[key]:
                row['rate'] = f'**{rate}**'
                ours, ratios = tests.loc[[('s0', chosen['s0'])], metric], times[key] / times['s0']
                row['minus CARE-S0'] = '' if key == 's0' else difference(ours, seeds[metric])
                row['time, x CARE-S0'] = '1' if key == 's0' else describe_ratio(ratios)
            rows.append(row)
    return pd.DataFrame(rows).fillna('')


def make_table(name: str, runs: pd.DataFrame) -> str:
    """Write the rows of a set, with parameters and GMACs of each backbone."""
    table, shape = make_rows(name, runs), SETS[name][1]
    counts = {}
    for key in table['key'].unique():
        config = read_config(name, key)
        with DefaultScope.overwrite_default_scope(config.default_scope):
            backbone = MODELS.build(config.model.backbone)
        parameters = sum(p.numel() for p in backbone.parameters()) / 1e6
        macs = count_macs(backbone, torch.zeros(1, 3, *shape))[''] / 1e9
        counts[key] = f'{parameters:.1f}', f'{macs:.2f}'
    for place, column in enumerate(('parameters, M', 'GMACs')):
        cells = [
            counts[key][place] if time else ''
            for key, time in zip(table['key'], table['time, x CARE-S0'], strict=True)
        ]
        table.insert(table.columns.get_loc('time, x CARE-S0'), column, cells)
    return table.drop(columns='key').to_markdown(index=False, disable_numparse=True)


def report() -> None:
    """Draw the validation curves, and replace the table of each data set in docs/results.md."""
    text, figure = PAGE.read_text(encoding='utf-8'), Figure(figsize=(15, 4.5), layout='constrained')
    for place, name in enumerate(SETS):
        axes, runs = figure.add_subplot(1, len(SETS), place + 1), read_runs(name)
        metric, title = next(iter(SETS[name][3].items()))
        chosen = choose_rates(name, runs)
        for (key, rate, seed), run in runs[runs['split'] == 'val'].groupby(['key', 'rate', 'seed']):
            if rate == chosen[key]:
                style = ('*' if key in CARE.arch_zoo else 'o') + ('--' if seed else '-')
                label = f'{PEERS["label"][key]}, {rate}, seed {seed}'
                colour = f'C{PEERS.index.get_loc(key)}'
                axes.plot(run['step'], run[metric], style, color=colour, label=label)
        axes.set(title=name, xlabel='iteration', ylabel=f'{title} on the validation split, %')
        axes.legend()
        tables = {name: make_table(name, runs)}
        fresh = read_runs(name, RESULTS / 'fresh')
        if (fresh['split'] == 'test').any():
            table = make_table(name, fresh)
            tables[f'{name} fresh'] = table.replace('| backbone ', f'| {name}, fresh splits ', 1)
        for mark, table in tables.items():
            begin, end = f'<!--- {mark}: written by benchmarks/accuracy.py -->', '<!--- end -->'
            before, _, after = text.partition(begin)
            text = f'{before}{begin}\n\n{table}\n\n{end}{after.partition(end)[2]}'
    save(CURVES, figure)
    save(PAGE, text)


def main() -> None:
    """Train, test on fresh splits, or report."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add('set', nargs='?', choices=SETS)
    add('backbone', nargs='?', default='s0', choices=PEERS.index)
    add('seed', nargs='?', default=0, type=int)
    add('--rate', choices=RATES, default=RATES[0], help='learning rate; default: %(default)s')
    add('--fresh', action='store_true', help='train on the splits of partition.py; no test')
    add('--test', action='store_true', help='with --fresh: test the chosen rates of the set, once')
    arguments = parser.parse_args()
    if arguments.set is None:
        report()
    elif arguments.test:
        test_fresh(arguments.set)
    else:
        place = arguments.set, arguments.backbone, arguments.rate, arguments.seed
        train(*place, fresh=arguments.fresh)


if __name__ == '__main__':
    main()
