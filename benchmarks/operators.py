"""Measure shares of operators and of stages in the time of exported files.

The engines record the times of operators: ExecuTorch in an ETDump, ONNX Runtime in its profile.
Medians over the rounds are used. Stages are found by counting convolutions, with the report
FILE.json that tools/export.py writes. The results are operators.csv (a row for each stage
and kind of operator), operators.md (shares) and operators.png.
"""

import argparse
import json
import re
import sys
import warnings
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure
from recording import describe_machine, save
from torch import Tensor

from mmcare.export import open_exported
from mmcare.files import check_writable

CONVOLUTION = re.compile(r'(Fused)?Conv(olution)?\b|Fully Connected')
GELU = 'Invalid Unary Op'  # how XNNPACK records it in int8
LEAST_SHARE = 0.02  # of the slowest file's time; kinds with less are drawn as one


def read_executorch(path: Path, image: Tensor, rounds: int) -> pd.DataFrame:
    """Return kind and median milliseconds of each operator of a ``.pte`` file, in order."""
    from executorch.devtools import Inspector
    from executorch.extension.pybindings import portable_lib

    with TemporaryDirectory() as directory, warnings.catch_warnings():
        warnings.simplefilter('ignore')  # outputs are not recorded
        module = portable_lib._load_for_executorch(str(path), enable_etdump=True)
        for _ in range(rounds):
            module.forward([image])
        dump = Path(directory, 'dump')
        module.write_etdump_result_to_file(str(dump))
        blocks = Inspector(etdump_path=str(dump)).event_blocks
    events = next(block.events for block in blocks if block.name == 'Execute')
    return pd.DataFrame(
        dict(kind=re.sub(r' #\d+$', '', event.name).replace(GELU, 'GELU'), ms=event.perf_data.p50)
        for event in events
        if event.name
        not in ('DELEGATE_CALL', 'OPERATOR_CALL', 'Method::execute')  # these contain other events
    )


def read_onnx(path: Path, image: Tensor, rounds: int, threads: int) -> pd.DataFrame:
    """Return kind and median milliseconds of each operator of an ``.onnx`` file, in order."""
    import onnxruntime

    with TemporaryDirectory() as directory:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.enable_profiling = True
        options.profile_file_prefix = f'{directory}/profile'
        session = onnxruntime.InferenceSession(path, options, providers=['CPUExecutionProvider'])
        for _ in range(rounds):
            session.run(None, {session.get_inputs()[0].name: image.numpy()})
        events = json.loads(Path(session.end_profiling()).read_text())
    rows = [
        dict(name=event['name'], kind=event['args']['op_name'], ms=event['dur'] / 1e3)
        for event in events
        if event['name'].endswith('_kernel_time')
    ]
    return pd.DataFrame(rows).groupby(['name', 'kind'], sort=False)['ms'].median().reset_index()


def find_stages(events: pd.DataFrame, convolutions: list[list[Any]]) -> list[str]:
    """Return the stage of each operator, which is the stage of the last convolution before it.

    Args:
        events: In order of time.
        convolutions: From the report: each stage and its number of convolutions, in order.

    Raises:
        ValueError: If the numbers of convolutions differ.
    """
    stages = [*chain.from_iterable(repeat(stage, number) for stage, number in convolutions)]
    ordinals = events['kind'].str.match(CONVOLUTION).cumsum()
    if ordinals.iloc[-1] != len(stages):
        raise ValueError(f'{ordinals.iloc[-1]} convolutions were run, the report has {len(stages)}')
    return [stages[max(ordinal - 1, 0)] for ordinal in ordinals]


def profile(path: Path, rounds: int, threads: int) -> pd.DataFrame:
    """Return stage, kind, number and milliseconds of the operators of a file."""
    shape = open_exported(path, threads=threads).input_shape  # sets ExecuTorch's threads
    if not all(isinstance(side, int) for side in shape):
        raise ValueError(f'{path} has a free size: export it for one size')
    image = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    readers = {'.pte': read_executorch, '.onnx': partial(read_onnx, threads=threads)}
    if path.suffix not in readers:
        raise ValueError(f'{path} is neither .pte nor .onnx')
    events = readers[path.suffix](path, image, rounds)
    report = json.loads(Path(f'{path}.json').read_text())
    events['stage'] = find_stages(events, report['convolutions'])
    groups = events.groupby(['stage', 'kind'], sort=False)['ms']
    return groups.agg(number='size', ms='sum').reset_index().assign(file=str(path))


def markdown(table: pd.DataFrame, conditions: str) -> str:
    """Write the shares of stages and of kinds of operators, a column for each file."""
    parts = [f"Milliseconds by the engines' own records, and shares. {conditions}."]
    for column in ('stage', 'kind'):
        times = table.pivot_table('ms', column, 'file', 'sum', 0.0, sort=False)
        shown = times.round(1).astype(str) + ' (' + (times / times.sum()).map('{:.0%}'.format) + ')'
        if column == 'kind':
            shown = shown.loc[times.max(axis='columns').sort_values(ascending=False).index]
        parts.append(shown.to_markdown(stralign='right'))
    return '\n\n'.join(parts) + '\n'


def draw(table: pd.DataFrame) -> Figure:
    """Draw a bar for each file and stage, made of kinds of operators."""
    totals = table.groupby('kind')['ms'].sum()
    rare = totals[totals < LEAST_SHARE * table.groupby('file')['ms'].sum().max()].index
    table = table.assign(kind=table['kind'].where(~table['kind'].isin(rare), 'others'))
    bars = table.pivot_table('ms', ['file', 'stage'], 'kind', 'sum', 0.0, sort=False)
    bars = bars[bars.sum().sort_values(ascending=False).index]
    figure = Figure(figsize=(11, 1.5 + 0.4 * len(bars)), layout='constrained')
    axes = figure.subplots()
    bars.iloc[::-1].plot.barh(stacked=True, ax=axes, width=0.8, colormap='tab20')
    axes.set_yticklabels([f'{file}, {stage}' for file, stage in bars.index[::-1]], fontsize=8)
    axes.set_xlabel('ms an image')
    axes.set_ylabel('')
    axes.legend(fontsize=7, loc='upper left', bbox_to_anchor=(1, 1))
    return figure


def main() -> None:
    """Profile the files, write and print the shares."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add('files', type=Path, nargs='+', metavar='FILE', help='.pte or .onnx, next to its report')
    add('--rounds', type=int, default=20, help='default: %(default)s')
    add('--threads', type=int, default=1, help='default: %(default)s')
    add('--out-dir', type=Path, default=Path('work_dirs/operators'), metavar='DIR')
    arguments = parser.parse_args()
    try:
        check_writable(arguments.out_dir)
        tables = [profile(path, arguments.rounds, arguments.threads) for path in arguments.files]
    except (ImportError, OSError, ValueError) as error:
        sys.exit(f'error: {error}')
    table = pd.concat(tables)
    versions = ', '.join(describe_machine('executorch', 'onnxruntime'))
    conditions = f'Threads: {arguments.threads}, medians of {arguments.rounds} rounds'
    text = markdown(table, f'{conditions}; {versions}')
    for kind, content in dict(csv=table, md=text, png=draw(table)).items():
        save(arguments.out_dir / f'operators.{kind}', content)
    print(f'{text}\nWritten to {arguments.out_dir}')


if __name__ == '__main__':
    main()
