"""Memory that a training step of a CARE backbone keeps for its backward pass, per image.

Measured on the CPU, with saved_tensors_hooks of PyTorch, as text, CSV and PNG: everything that is
kept, what with_cp=True keeps (the inputs of the blocks), that and the largest block, which is
recomputed, and its share of the first. A GPU needs more: gradients, working memory of its
libraries, and what its allocator rounds up and keeps; and necks and heads.
"""

import argparse
from itertools import product
from pathlib import Path

from mmcare.analysis import plots, report
from mmcare.analysis.memory import (
    PRECISIONS,
    check_image,
    extrapolate_activations,
    measure_activations,
)
from mmcare.analysis.memory_report import memory_rows, memory_text, plot_memory
from mmcare.models import CARE
from mmcare.output import check_writable
from mmcare.sample_data.output import count_with_progress

SHAPES = [(512, 512), (800, 1344)]


def parse_args() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        'archs',
        metavar='ARCH',
        nargs='*',
        help=f'of {", ".join(CARE.arch_zoo)}; default: all of them',
    )
    parser.add_argument(
        '--shape',
        dest='shapes',
        type=int,
        nargs=2,
        action='append',
        metavar=('H', 'W'),
        help='height and width of the image, at least 32 and 33; may be given several times; '
        'default: 512 512 and 800 1344',
    )
    parser.add_argument(
        '--precision',
        choices=PRECISIONS,
        help='default: both; bfloat16 is that of autocast',
    )
    parser.add_argument(
        '--direct',
        action='store_true',
        help='measure at the size itself, which takes minutes, and 8 GB for s2 at 800 1344; '
        'otherwise two small images are measured, and the rest is proportional',
    )
    parser.add_argument(
        '--out-dir',
        type=Path,
        default=Path('work_dirs/memory'),
        metavar='DIR',
        help='where memory.csv and memory.png go, replacing older ones; default: %(default)s',
    )
    return parser, parser.parse_args()


def main() -> None:
    """Check everything, then measure, print and write."""
    parser, arguments = parse_args()
    archs = arguments.archs or list(CARE.arch_zoo)
    for arch in archs:
        if arch not in CARE.arch_zoo:
            parser.error(f'{arch!r} is unknown; choose from {", ".join(CARE.arch_zoo)}')
    try:
        shapes = [check_image(shape) for shape in arguments.shapes or SHAPES]
        check_writable(arguments.out_dir)
        plots.check_matplotlib()
    except (ImportError, OSError, ValueError) as error:
        parser.error(str(error))

    precisions = [arguments.precision] if arguments.precision else list(PRECISIONS)
    cases = list(product(archs, shapes, precisions))
    find = measure_activations if arguments.direct else extrapolate_activations
    measured = [find(*cases[index]) for index in count_with_progress(len(cases), 'measured')]
    print(memory_text(measured))
    report.write_csv(memory_rows(measured), arguments.out_dir / 'memory.csv')
    plot_memory(measured, arguments.out_dir / 'memory.png')
    print(f'\nWritten to {arguments.out_dir}')


if __name__ == '__main__':
    main()
