"""Make a small synthetic data set, to see training and testing work without any download."""

import argparse
import inspect
from pathlib import Path

from mmcare.sample_data import make_ade20k, make_coco, make_imagenet

KINDS = {'coco': make_coco, 'ade20k': make_ade20k, 'imagenet': make_imagenet}
FLAGS = {
    'seed': 'equal seeds give equal files',
    'train': 'number of training images',
    'val': 'number of validation images',
    'size': 'height and width of the images, in pixels',
}


def parse_args() -> argparse.Namespace:
    """Read the command line; each kind's flags and defaults are its function's."""
    parser = argparse.ArgumentParser(description=__doc__)
    kinds = parser.add_subparsers(dest='kind', required=True, metavar='KIND')
    for kind, make in KINDS.items():
        summary, details = inspect.getdoc(make).split('\n\n')[:2]
        one = kinds.add_parser(
            kind,
            help=summary,
            description=f'{summary} {details}',
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        one.add_argument(
            'directory',
            metavar='DIR',
            type=Path,
            help='the directory to make; it must not exist, or be empty',
        )
        for name, parameter in inspect.signature(make).parameters.items():
            if name != 'directory':
                one.add_argument(f'--{name}', type=int, default=parameter.default, help=FLAGS[name])
        one.set_defaults(parser=one)
    return parser.parse_args()


def main() -> None:
    """Make the data set, then say what was written."""
    arguments = vars(parse_args())
    make, parser = KINDS[arguments.pop('kind')], arguments.pop('parser')
    try:
        summary = make(**arguments)
    except (FileExistsError, NotADirectoryError, PermissionError, ValueError) as error:
        parser.error(str(error))
    directory = arguments['directory']
    for split, numbers in summary.items():
        print(f'{split}: ' + ', '.join(f'{number} {what}' for what, number in numbers.items()))
    print(f'Written to {directory}; a look at it: {directory / "preview.png"}')


if __name__ == '__main__':
    main()
