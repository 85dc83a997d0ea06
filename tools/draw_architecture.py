"""Draw a CARE network: its four stages, and one block opened, as the module tree has them.

The network is built and an image runs through it; every number and name in the picture is read
off the modules and off the tensors that pass.
"""

import argparse
from pathlib import Path

from mmcare.analysis.architecture import describe_architecture
from mmcare.analysis.architecture_plot import plot_architecture
from mmcare.models import CARE
from mmcare.output import check_writable_file


def parse_args() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        'arch',
        metavar='ARCH',
        nargs='?',
        default='s0',
        choices=list(CARE.arch_zoo),
        help=f'{", ".join(CARE.arch_zoo)}; default: %(default)s',
    )
    parser.add_argument(
        '--shape',
        type=int,
        nargs=2,
        default=(224, 224),
        metavar=('H', 'W'),
        help='height and width of the image, at least 32 each; default: 224 224',
    )
    parser.add_argument(
        '--block',
        type=int,
        default=3,
        metavar='STAGE',
        help='the stage whose first block is opened, 1 to 4; default: %(default)s',
    )
    parser.add_argument(
        '--out',
        type=Path,
        metavar='FILE',
        help='PNG to write, replaced if it exists; default: work_dirs/architecture/care_ARCH.png',
    )
    return parser, parser.parse_args()


def main() -> None:
    """Describe, then draw."""
    parser, arguments = parse_args()
    filename = arguments.out or Path('work_dirs/architecture') / f'care_{arguments.arch}.png'
    if filename.suffix != '.png':
        parser.error(f'--out {filename} must end in .png')
    try:
        check_writable_file(filename)
        architecture = describe_architecture(arguments.arch, arguments.shape, arguments.block)
        plot_architecture(architecture, filename)
    except (ImportError, OSError, TypeError, ValueError) as error:
        parser.error(str(error))
    print(f'Written to {filename}')


if __name__ == '__main__':
    main()
