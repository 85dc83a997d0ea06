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
    'size': 'height and width of the images, in pixels, at least 64',
}


def main() -> None:
    """Make the data set that the command line asks for; each kind's defaults are its function's."""
    parser = argparse.ArgumentParser(description=__doc__)
    kinds = parser.add_subparsers(dest='kind', required=True, metavar='KIND')
    for kind, make in KINDS.items():
        summary, details = inspect.getdoc(make).split('\n\n')[:2]
        command = kinds.add_parser(
            kind,
            help=summary,
            description=f'{summary} {details}',
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        command.add_argument('directory', metavar='DIR', type=Path, help='a new or empty directory')
        for name, text in FLAGS.items():
            default = inspect.signature(make).parameters[name].default
            command.add_argument(f'--{name}', type=int, default=default, help=text)
    arguments = vars(parser.parse_args())
    try:
        KINDS[arguments.pop('kind')](**arguments)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(f'Written to {arguments["directory"]}')


if __name__ == '__main__':
    main()
