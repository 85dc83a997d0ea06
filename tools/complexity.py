"""Count parameters and multiply-adds of CARE networks, by stage and by part.

mmengine.analysis counts for one image in evaluation mode: each multiply-add of convolutions, linear
layers and matrix products is 1, each element of a batch norm 2 and of a layer norm 5. Tables are
printed, and written as CSV.
"""

import argparse
from pathlib import Path

import pandas as pd

from mmcare.analysis import build_network, compare_with_paper, count_complexity
from mmcare.files import check_writable, moved_into_place
from mmcare.models import CARE


def parse_args() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        'model',
        metavar='MODEL',
        nargs='?',
        help=f'an arch ({", ".join(CARE.arch_zoo)}), with the two heads of its classifier, or '
        'a config (.py) with a CARE backbone; neck and head are counted for classifiers only',
    )
    parser.add_argument(
        '--shape',
        type=int,
        nargs=2,
        default=(224, 224),
        metavar=('H', 'W'),
        help='height and width of the image; default: 224 224',
    )
    parser.add_argument(
        '--no-head', action='store_true', help='leave the heads out; they need mmpretrain'
    )
    parser.add_argument(
        '--paper',
        action='store_true',
        help="also compare the costs in the paper's Tables 2 to 5 with what is counted for their "
        'networks, both heads included; takes a minute',
    )
    parser.add_argument(
        '--out-dir',
        type=Path,
        default=Path('work_dirs/complexity'),
        metavar='DIR',
        help='where the CSV files go; older ones are replaced; default: %(default)s',
    )
    return parser, parser.parse_args()


def main() -> None:
    """Count, print and write."""
    parser, arguments = parse_args()
    if not (arguments.model or arguments.paper):
        parser.error('nothing to do: give MODEL or --paper')
    try:
        check_writable(arguments.out_dir)
        model = build_network(arguments.model, not arguments.no_head) if arguments.model else None
    except (ImportError, OSError, ValueError) as error:
        parser.error(str(error))

    if model:
        height, width = arguments.shape
        table = count_complexity(model, arguments.shape)
        params, macs = table.sum()[['parameters', 'macs']]
        name = f'{Path(arguments.model).stem}_{height}x{width}'
        print(f'{name}: {params:,} parameters, {macs:,} multiply-adds ({macs / 1e9:.4f} GMACs)\n')
        for quantity in table:
            print(f'{quantity}\n{by_stage(table[quantity])}\n')
        write(table.reset_index(), arguments.out_dir / f'{name}.csv')
    if arguments.paper:
        table = compare_with_paper()
        print(f'Costs in the paper and as counted\n{table.to_string(index=False)}\n')
        write(table, arguments.out_dir / 'paper.csv')
    print(f'Written to {arguments.out_dir}')


def by_stage(counts: pd.Series) -> str:
    """Lay out counts with the index (stage, part): parts down, stages across."""
    # Not with sort=False: pandas 2 would put counts into other cells.
    wide = counts.unstack('stage', fill_value=0).loc[counts.index.unique('part')]
    wide.loc['all'] = wide.sum()
    wide = wide.assign(all=wide.sum(axis=1)).map('{:,}'.format)
    return wide.rename_axis(index=None, columns=None).to_string()


def write(table: pd.DataFrame, filename: Path) -> None:
    """Write a CSV file."""
    with moved_into_place(filename) as temporary:
        table.to_csv(temporary, index=False)


if __name__ == '__main__':
    main()
