"""Measure the latency of CARE and its peers: from an image to four maps, in turn in one process.

Engines are ONNX Runtime, XNNPACK (of ExecuTorch) and LiteRT, the last two also with convolutions in
int8, and on request ONNX Runtime in int8, OpenVINO and ncnn, all with the same number of threads of
the CPU, one by default. Peers are timm's. Networks have random weights, are fused as far as
possible, and are exported by the same function. The output is recording.json (all times, and the
instruction sets of the machine), latency.csv (every median and quartile), latency.md (the table of
docs/latency.md), engines.md (each time as a share of ONNX Runtime's in float32), and for each
engine a figure, accuracy_<engine>.png: published accuracy over latency, with the Pareto line.
"""

import argparse
import json
import re
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
import torch
from adjustText import adjust_text
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter
from mmengine.utils import track_iter_progress
from recording import describe_machine, save
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.optimization import fuse
from torchvision.models.feature_extraction import NodePathTracer

from mmcare.analysis.timing import measure_in_turn
from mmcare.compatibility import require
from mmcare.export import export_model, open_exported
from mmcare.export.backends import BACKENDS
from mmcare.export.images import HELD_OUT, draw_images
from mmcare.export.loading import IMAGENET, LoadedModel
from mmcare.export.tasks import Task, make_task
from mmcare.files import check_writable
from mmcare.models import CARE
from mmcare.models.deployment import BackboneInfo
from mmcare.version import __version__
from mmcare_runtime import Model

PURPOSE = 'the latency benchmark'
STRIDES = [4, 8, 16, 32]
OUTPUT_NAMES = tuple(f'stride{stride}' for stride in STRIDES)
# Format and precision of the files.
ENGINES = {
    'onnxruntime': ('onnx', 'float32'),
    'xnnpack': ('executorch', 'float32'),
    'xnnpack-int8': ('executorch', 'int8'),
    'litert': ('litert', 'float32'),
    'litert-int8': ('litert', 'int8'),
}
ON_REQUEST = {
    'onnxruntime-int8': ('onnx', 'int8'),
    'openvino': ('onnx', 'float32'),
    'openvino-bf16': ('onnx', 'float32'),
    'openvino-int8': ('onnx', 'int8'),
    'ncnn': ('ncnn', 'float32'),
}
FILES = ENGINES | ON_REQUEST
RUNTIMES = dict(onnx='onnxruntime', executorch='executorch', litert='ai-edge-litert', ncnn='ncnn')
BASE = 'onnxruntime'  # the engine whose times others are divided by
LATE = 1.3  # times the largest share of a peer
BUSY = 0.9  # share of a core; a lower share means that something else was running
Run = Callable[[], object]
Prepared = tuple[Run, dict[str, Any]]  # a run of a file, and the file's report
Recording = dict[str, Any]

PEERS = pd.read_csv(Path(__file__).with_name('peers.csv'), index_col='key').fillna('')
CARES = PEERS[PEERS['timm_model'] == '']['top1']


class FourMaps(nn.Module):
    """The maps of strides 4, 8, 16 and 32 of a feature extractor of timm, channels first."""

    def __init__(self, features: Any) -> None:
        super().__init__()
        strides = features.feature_info.reduction()
        if strides[-4:] != STRIDES:
            raise ValueError(f'has maps of strides {strides}')
        self.features = features
        self.channels_last = getattr(features, 'output_fmt', 'NCHW') == 'NHWC'

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """Map images (B, 3, H, W) to four maps (B, C, H / stride, W / stride)."""
        maps = self.features(image)[-4:]
        return tuple(x.permute(0, 3, 1, 2) if self.channels_last else x for x in maps)


def build(key: str, shape: tuple[int, int]) -> Task:
    """Build a network with random weights from one seed.

    Exports fuse CARE. FastViT and RepViT are fused by timm's ``reparameterize_model``.
    """
    torch.manual_seed(0)
    name = PEERS['timm_model'][key]
    if not name:
        return make_task(CARE(key))
    timm = require('timm', PURPOSE, 'bench')
    for_a_size = name.startswith(('efficientformerv2', 'swin_'))  # due to their attention
    options: dict[str, Any] = dict(img_size=shape) if for_a_size else {}
    features = timm.create_model(name, features_only=True, **options).eval()
    network = fuse_norms(FourMaps(timm.utils.reparameterize_model(features)).eval())
    return make_task(network, info=BackboneInfo(name, output_names=OUTPUT_NAMES))


def fuse_norms(network: nn.Module) -> nn.Module:
    """Return a copy, with batch norms fused into convolutions whose output nothing else takes."""
    with_act = require('timm.layers', PURPOSE, 'bench').BatchNormAct2d
    attention = require('timm.models', PURPOSE, 'bench').cpubone.ConvAttention
    for name, module in list(network.named_modules()):
        if isinstance(module, with_act):  # keep its activation
            norm = nn.BatchNorm2d(module.num_features, module.eps).eval()
            norm.load_state_dict(module.state_dict())
            network.set_submodule(name, nn.Sequential(norm, module.act))
        elif isinstance(module, attention):  # its forward reads sizes, which torch.fx cannot record
            module.conv_proj = fuse(module.conv_proj)
    graph = NodePathTracer(leaf_modules=[attention]).trace(network)
    return fuse(GraphModule(network, graph), no_trace=True)


def find_report(key: str, shape: Sequence[int], engine: str, directory: Path) -> dict[str, Any]:
    """Find the report of a file that an earlier run of this version wrote, or an empty dict."""
    name, precision = FILES[engine]
    wanted = dict(key=key, format=name, precision=precision, shape=[*shape])
    wanted['mmcare_version'] = __version__
    for path in directory.glob(f'{key}_*.json'):  # written last
        report = json.loads(path.read_text(encoding='utf-8'))
        if wanted.items() <= report.items():
            return report
    return {}


def prepare(
    key: str, network: Task, image: Tensor, engine: str, directory: Path, threads: int
) -> Prepared:
    """Export a network unless an earlier run has done so; return a run and the report."""
    name, precision = FILES[engine]
    shape = image.shape[2], image.shape[3]
    report = find_report(key, shape, engine, directory)
    if not report:
        model = LoadedModel(key, 'random', network, IMAGENET, metadata=dict(key=key))
        options: dict[str, Any] = dict(formats=(name,), precision=precision)
        options |= dict(tolerance=1e-3, compare_float16=False)  # random weights amplify rounding
        if precision == 'int8':  # there are no pictures to calibrate with
            smooth = draw_images(3, shape, IMAGENET)['smooth'].pixels
            options['images'] = [smooth] * (1 + HELD_OUT)
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')  # several delegates are noted in the recording
            report = export_model(model, directory, shape, **options)[name]
    if BACKENDS[name].layout == 'NHWC':  # convert once; apps have this layout
        image = image.to(memory_format=torch.channels_last)
    run = partial(open_file(directory / report['file'], engine, threads).run, image.numpy())
    run()
    return run, report


def open_file(path: Path, engine: str, threads: int) -> Model:
    """Open an exported file in an engine."""
    options: dict[str, Any] = dict(threads=threads)
    if engine.startswith('openvino'):
        options |= dict(engine='openvino', bfloat16=engine.endswith('bf16'))
    return open_exported(path, **options)


def package_of(engine: str) -> str:
    """Name the package of an engine."""
    return 'openvino' if engine.startswith('openvino') else RUNTIMES[FILES[engine][0]]


def measure(arguments: argparse.Namespace, directory: Path) -> Recording:
    """Prepare every network for every engine, then measure all in turn.

    A network that an engine cannot take is left out, and the recording says why. Exported files go
    to ``directory``.
    """
    torch.set_flush_denormal(True)  # random weights may give denormal numbers
    torch.set_num_threads(1)
    torch.manual_seed(0)
    image = torch.randn(1, 3, *arguments.shape)
    runs: dict[tuple[str, str], Run] = {}
    parameters, left_out = {}, {}
    delegates: dict[str, dict[str, int]] = {}
    print('Prepare networks', file=sys.stderr)
    for key in track_iter_progress([*arguments.archs, *arguments.peers], file=sys.stderr):
        network = None
        for engine in arguments.engine:
            try:
                network = network or build(key, arguments.shape)
                run, report = prepare(key, network, image, engine, directory, arguments.threads)
            except Exception as error:  # networks and converters raise errors of any class
                reason = f'{type(error).__name__}: {error}'.splitlines()[0]
                left_out[f'{PEERS["label"][key]}, {engine}'] = reason
            else:
                runs[engine, key] = run
                parameters[key] = report['parameters']
                if 'delegates' in report:
                    delegates.setdefault(engine, {})[key] = report['delegates']
    if not runs:
        sys.exit(f'error: nothing can be measured: {left_out or "name archs or peers"}')
    print('\nMeasure rounds', file=sys.stderr)
    start = time.perf_counter(), time.process_time()
    times = measure_in_turn(runs, arguments.rounds).round(3)
    times.columns = pd.MultiIndex.from_tuples(runs)
    share = (time.process_time() - start[1]) / (time.perf_counter() - start[0])
    packages = {package_of(engine) for engine in arguments.engine}
    if arguments.peers:
        packages.add('timm')
    return dict(
        settings=dict(
            shape=arguments.shape,
            runs=arguments.rounds,
            threads='one thread' if arguments.threads == 1 else f'{arguments.threads} threads',
        ),
        versions=describe_machine(*sorted(packages)),
        processor_share=round(share, 3),
        parameters=parameters,
        delegates=delegates,
        left_out=left_out,
        milliseconds={engine: times[engine].to_dict('list') for engine, _ in runs},
    )


def compare(times: pd.DataFrame, key: str) -> pd.DataFrame:
    """Divide all times by those of a network in the same rounds; quartiles, a row for each network.

    The columns are ``q1``, ``median`` and ``q3``. A network is faster if ``q3`` is below 1, and
    slower if ``q1`` is above 1. In between, the two are about as fast.
    """
    ratios = times.div(times[key], axis='index')
    return ratios.quantile([0.25, 0.5, 0.75]).T.set_axis(['q1', 'median', 'q3'], axis='columns')


def describe_ratio(ratios: pd.Series) -> str:
    """Write the median of the rounds' ratios, and their quartiles."""
    q1, median, q3 = ratios.quantile([0.25, 0.5, 0.75])
    return f'{median:.2f} ({q1:.2f} to {q3:.2f})'


def is_beaten(key: str, times: pd.DataFrame, top1: pd.Series) -> bool:
    """Whether a network that is at least as accurate is faster."""
    rivals = top1.index[(top1 >= top1[key]) & (top1.index != key)]
    return bool((compare(times, key)['q3'][rivals] < 1).any())


def latency_table(recording: Recording, engine: str) -> pd.DataFrame:
    """Make a row for each network, by class and latency.

    ``care`` is the class: the CARE network in the recording with the nearest accuracy. ``x_care``
    is the network's time divided by the time of this CARE in the same round, as a median over the
    rounds: above 1, CARE is faster. ``x_care_q1`` and ``x_care_q3`` are quartiles. ``x_float32`` is
    the int8 time divided by the float32 time, in the same way. ``pareto`` says that no network that
    is at least as accurate is faster, by :func:`compare`. ``ms`` is a median, ``q1`` and ``q3`` are
    quartiles.
    """
    times = pd.DataFrame(recording['milliseconds'][engine])
    table = PEERS.reindex(list(times)).assign(engine=engine)
    table['label'] = table['label'].fillna(table.index.to_series())  # phones measure others too
    table['million'] = pd.Series(recording['parameters']) / 1e6
    if engine in recording['delegates']:
        table['delegates'] = pd.Series(recording['delegates'][engine])
    table[['ms', 'q1', 'q3']] = times.quantile([0.5, 0.25, 0.75]).T
    measured = CARES[CARES.index.isin(times.columns)]
    cares = CARES if measured.empty else measured
    classes = table['top1'].map(lambda top1: (cares - top1).abs().idxmin(), na_action='ignore')
    nearest = times.reindex(columns=classes).set_axis(times.columns, axis='columns')
    table['care'] = classes
    ratios = ['x_care', 'x_care_q1', 'x_care_q3']
    table[ratios] = (times / nearest).quantile([0.5, 0.25, 0.75]).T
    float32 = engine.partition('-')[0]
    if float32 in recording['milliseconds'] and float32 != engine:
        table['x_float32'] = (times / pd.DataFrame(recording['milliseconds'][float32])).median()
    known = table['top1'].dropna()
    table['pareto'] = [key in known and not is_beaten(key, times, known) for key in table.index]
    return table.sort_values(['care', 'ms'])


def rivals(recording: Recording, engine: str) -> dict[str, str]:
    """For each CARE, name the networks of at least its accuracy that are faster, or as fast."""
    times = pd.DataFrame(recording['milliseconds'][engine])
    top1 = PEERS['top1'].reindex(times.columns)
    names = {}
    for key in CARES.index.intersection(times.columns):
        ratios = compare(times, key).drop(index=key)
        ratios = ratios[top1[ratios.index] >= top1[key]].sort_values('median')
        labels = PEERS['label'].reindex(ratios.index)
        faster, slower = ratios['q3'] < 1, ratios['q1'] > 1
        names[f'faster than {PEERS["label"][key]}'] = ', '.join(labels[faster]) or 'none'
        names[f'about as fast as {PEERS["label"][key]}'] = (
            ', '.join(labels[~faster & ~slower]) or 'none'
        )
    return names


def conditions(recording: Recording) -> str:
    """Say in one line what was measured and on what."""
    settings, (height, width) = recording['settings'], recording['settings']['shape']
    return (
        f'{height}x{width}, batch 1, {settings.get("threads", "one thread")}, '
        f'median of {settings["runs"]} rounds; '
        f'{", ".join(recording["versions"])}'
    )


def markdown(recording: Recording) -> str:
    """Write one table for all engines, the networks that beat CARE, and those left out."""
    tables = {engine: latency_table(recording, engine) for engine in recording['milliseconds']}
    networks = pd.concat(tables.values())
    networks = networks[~networks.index.duplicated()].sort_values('care', kind='stable')
    columns = {'class': networks['care'], 'backbone': networks['label']}
    columns['top-1, %'] = networks['top1'].map('{:.1f}'.format, na_action='ignore')
    for engine, table in tables.items():
        star = table['pareto'].map({True: '**', False: ''})
        ratios = [
            ''
            if row.Index == row.care or pd.isna(row.x_care)
            else f' ({row.x_care_q1:.2f} to {row.x_care_q3:.2f})'
            for row in table.itertuples()
        ]
        columns[engine] = star + table['ms'].map('{:.1f}'.format) + star + ratios
        if 'x_float32' in table:
            columns[f'{engine}, x float32'] = table['x_float32'].map('{:.2f}'.format)
    shown = pd.DataFrame(columns, index=networks.index).replace('nan', None)
    shown = shown.dropna(axis='columns', how='all').fillna('')  # phones measure others too
    maps = '' if 'rows' in recording else 'Four maps of an image, '
    explained = 'Milliseconds, and in brackets quartiles of x CARE. Bold: on the Pareto line.'
    parts = [f'{maps}{conditions(recording)}. {explained}']
    parts.append(shown.to_markdown(index=False, disable_numparse=True))
    better = pd.DataFrame({engine: rivals(recording, engine) for engine in tables})
    if not (better := better.dropna(axis='columns', how='all')).empty:
        parts += ['At least as accurate, and', better.to_markdown()]
    for engine, table in tables.items():
        if 'delegates' in table and len(pieces := table[table['delegates'] > 1]):
            named = pieces['label'] + ' ' + pieces['delegates'].map('{:g}'.format)
            parts.append(f'Pieces (delegates) in {engine}, where not one: {", ".join(named)}.')
    parts += [f'Left out: {what}: {reason}.' for what, reason in recording['left_out'].items()]
    if (share := recording.get('processor_share', 1)) < BUSY:
        parts.append(f'The machine was busy: this process had {share:.2f} of a core.')
    return '\n\n'.join(parts) + '\n'


def engines_table(recording: Recording) -> str:
    """Write each network's time in each engine as a share of ONNX Runtime's time in float32.

    Shares are medians over the rounds. A star marks a CARE's share of more than 1.3 times the
    largest share of its peers: an engine that makes less of it than of the others.
    """
    base = pd.DataFrame(recording['milliseconds'][BASE])
    shares = pd.DataFrame(
        {
            engine: (pd.DataFrame(times) / base).median()
            for engine, times in recording['milliseconds'].items()
        }
    )
    ours = shares.index.isin(CARES.index)
    is_late = shares.gt(LATE * shares[~ours].max()) & ours[:, None]
    shown = shares.map('{:.2f}'.format) + is_late.map({True: ' \\*', False: ''}.get)
    shown.index = PEERS['label'].reindex(shares.index)
    shown = shown.replace('nan', '')
    shown.index.name = f'x {BASE}'
    return shown.to_markdown(disable_numparse=True)


def draw(recording: Recording, engine: str) -> Figure:
    """Draw published accuracy over latency, with quartiles and the Pareto line."""
    table = latency_table(recording, engine).dropna(subset='top1')
    figure = Figure(figsize=(10, 8), layout='constrained')
    axes = figure.subplots()
    labels, line = [], table[table['pareto']].sort_values('ms')
    axes.step(line['ms'], line['top1'].cummax(), '--', where='post', color='0.6')
    for _, row in table.iterrows():
        ours = row['timm_model'] == ''
        style = dict(fmt='*', markersize=15) if ours else dict(fmt='o', markersize=6)
        style |= dict(color=f'C{row["care"][-1]}')  # s0 to s2
        quartiles = [[row['ms'] - row['q1']], [row['q3'] - row['ms']]]
        axes.errorbar(row['ms'], row['top1'], xerr=quartiles, **style)
        weight = 'bold' if ours else 'normal'
        labels.append(axes.text(row['ms'], row['top1'], row['label'], fontsize=7, weight=weight))
    axes.set_xscale('log')
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FormatStrFormatter('%g'))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.margins(x=0.08)
    axes.set_xlabel(f'latency in ms, {engine} (colour: nearest CARE; dashed: Pareto line)')
    axes.set_ylabel('published top-1 accuracy on ImageNet-1K, in %')
    axes.set_title(conditions(recording), fontsize=8, wrap=True)
    axes.grid(alpha=0.3, which='both')
    leader = dict(arrowstyle='-', color='0.6', lw=0.5)
    adjust_text(labels, table['ms'], table['top1'], ax=axes, expand=(1.2, 1.4), arrowprops=leader)
    return figure


def write(recording: Recording, out_dir: Path) -> None:
    """Write tables and pictures of a recording, replacing older ones, and print the tables."""
    tables = [latency_table(recording, engine) for engine in recording['milliseconds']]
    save(out_dir / 'latency.csv', pd.concat(tables).round(3).reset_index())
    save(out_dir / 'latency.md', markdown(recording))
    if BASE in recording['milliseconds']:
        save(out_dir / 'engines.md', engines_table(recording) + '\n')
    for engine in recording['milliseconds']:
        if PEERS.index.isin(recording['milliseconds'][engine]).any():
            save(out_dir / f'accuracy_{engine}.png', draw(recording, engine))
    print(f'\n{markdown(recording)}\nWritten to {out_dir}')


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    archs, peers = list(CARES.index), list(PEERS.index.difference(CARES.index, sort=False))
    add = parser.add_argument
    add('--archs', nargs='*', choices=archs, default=archs, help='CARE networks; default: all')
    add('--peers', nargs='*', choices=peers, default=peers, help='default: all; no names: none')
    add('--shape', type=int, nargs=2, default=(512, 512), metavar=('H', 'W'))
    help_engine = f'default: {" ".join(ENGINES)}; OpenVINO needs pip install openvino'
    add('--engine', nargs='+', choices=FILES, default=ENGINES, help=help_engine)
    help_threads = 'default: %(default)s. ExecuTorch takes others only for kept files'
    add('--threads', type=int, default=1, help=help_threads)
    add('--rounds', type=int, default=9, help='default: %(default)s')
    add('--out-dir', type=Path, default=Path('work_dirs/latency'), metavar='DIR')
    add('--keep', type=Path, metavar='DIR', help='keep exported files there, and reuse them')
    add('--from-recording', type=Path, metavar='JSON', help='read this recording, measure nothing')
    arguments = parser.parse_args()
    if any(side <= 0 or side % STRIDES[-1] for side in arguments.shape):
        parser.error('--shape must be multiples of 32, since networks round others up or down')
    return arguments


def main() -> None:
    """Measure, or read a recording; write and print the tables."""
    arguments = parse_args()
    check_writable(arguments.out_dir)
    check_writable(arguments.keep or arguments.out_dir)
    if arguments.from_recording is not None:
        recording = json.loads(arguments.from_recording.read_text(encoding='utf-8'))
    else:
        for engine in arguments.engine:
            BACKENDS[FILES[engine][0]].require()
            if engine.startswith('openvino'):
                require('openvino', PURPOSE, 'bench')
        with TemporaryDirectory() as directory:
            recording = measure(arguments, arguments.keep or Path(directory))
        text = json.dumps(recording, indent=1)
        text = re.sub(r'(?<=[\d\[,])\s+(?=[\d\]])', ' ', text)  # times on one line
        save(arguments.out_dir / 'recording.json', text + '\n')
    write(recording, arguments.out_dir)


if __name__ == '__main__':
    main()
