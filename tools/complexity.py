"""Parameters and multiply-adds of CARE networks, by stage and by part, as text, CSV and PNG.

Counted by mmengine.analysis for one image, in evaluation mode: a multiply-add of a convolution, a
linear layer or a matrix product is one, batch norm 2 an element, layer norm 5.
"""

import argparse
from pathlib import Path

from torch import nn

from mmcare.analysis import (
    build_model,
    compare_with_paper,
    count_complexity,
    count_mixer,
    mixer_terms,
    network_stages,
    plots,
    report,
)
from mmcare.analysis.counting import check_shape
from mmcare.analysis.mixer import ATTENTION_STAGES
from mmcare.models import CARE
from mmcare.output import check_writable


def parse_args() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        'model',
        metavar='MODEL',
        nargs='?',
        help=f'an arch ({", ".join(CARE.arch_zoo)}), with the two heads of its classifier; or a '
        'config (.py) with a CARE backbone, with neck and head if it is of mmpretrain; of '
        'detectors and segmentors the backbone alone is counted',
    )
    parser.add_argument(
        '--shape',
        type=int,
        nargs=2,
        default=(224, 224),
        metavar=('H', 'W'),
        help='height and width of the image, at least 32 each; default: 224 224',
    )
    parser.add_argument('--no-head', action='store_true', help='leave the heads out')
    parser.add_argument(
        '--paper',
        action='store_true',
        help="also put the figures of the paper's Tables 3 to 5 beside what is counted for their "
        'networks, at 224 x 224 with both heads; takes half a minute',
    )
    parser.add_argument(
        '--omega',
        action='store_true',
        help="also compare the paper's complexity model with the token mixers of stages 3 and 4, "
        'and show where its Proposition 3 holds; for the arch that MODEL is, or for all of them if '
        'it is a config or not given',
    )
    parser.add_argument(
        '--out-dir',
        type=Path,
        default=Path('work_dirs/complexity'),
        metavar='DIR',
        help='where the CSV and PNG files go, replacing older ones; default: %(default)s',
    )
    return parser, parser.parse_args()


def main() -> None:
    """Check everything, then count, print and write."""
    parser, arguments = parse_args()
    if not (arguments.model or arguments.paper or arguments.omega):
        parser.error('nothing to do: give MODEL, --paper or --omega')
    try:
        shape = check_shape(arguments.shape)
        check_writable(arguments.out_dir)
        plots.check_matplotlib()
        model = build_model(arguments.model, not arguments.no_head) if arguments.model else None
    except (ImportError, OSError, TypeError, ValueError) as error:
        parser.error(str(error))

    if model:
        write_complexity(*model, shape, arguments.out_dir)
    if arguments.omega:
        archs = [arguments.model] if arguments.model in CARE.arch_zoo else list(CARE.arch_zoo)
        write_omega(archs, shape, arguments.out_dir)
    if arguments.paper:
        write_paper(arguments.out_dir)
    print(f'Written to {arguments.out_dir}')


def write_complexity(name: str, network: nn.Module, shape: tuple[int, int], out_dir: Path) -> None:
    """A network by stage and part."""
    complexity = count_complexity(network, shape, name)
    stem = f'{name}_{shape[0]}x{shape[1]}'
    print(report.complexity_text(complexity), end='\n\n')
    report.write_csv(report.complexity_rows(complexity), out_dir / f'{stem}.csv')
    plots.plot_complexity(complexity, out_dir / f'{stem}.png')


def write_omega(archs: list[str], shape: tuple[int, int], out_dir: Path) -> None:
    """The complexity model: term by term against the network, and where the proposition holds."""
    rows = []
    for arch in archs:
        for stage in ATTENTION_STAGES:
            terms = mixer_terms(arch, stage, shape)
            counted = count_mixer(arch, stage, shape)['all']
            print(report.mixer_text(f'care_{arch}', terms, counted), end='\n\n')
            rows += report.mixer_rows(f'care_{arch}', terms, counted)
    stages = network_stages()
    print(report.proposition_text(stages), end='\n\n')
    report.write_csv(rows, out_dir / 'omega_terms.csv')
    report.write_csv(report.proposition_rows(stages), out_dir / 'omega_stages.csv')
    plots.plot_proposition(out_dir / 'omega.png')


def write_paper(out_dir: Path) -> None:
    """The paper's tables beside ours."""
    comparisons = compare_with_paper()
    print(report.paper_text(comparisons), end='\n\n')
    report.write_csv(report.paper_rows(comparisons), out_dir / 'paper.csv')
    plots.plot_paper(comparisons, out_dir / 'paper.png')


if __name__ == '__main__':
    main()
