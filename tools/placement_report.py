"""Tell where the operators of a Core ML model run: neural engine, or not, and why.

MODEL is an .mlpackage with an ML Program. Its operators are checked against what Apple documents
and others have measured about the neural engine; nothing is run, and a model that keeps all rules
may still run elsewhere. A table and a JSON file are written.

Exit status: 0 if everything is expected on the neural engine, 1 if not, 2 for bad input.
"""

import argparse
import logging
import sys
from pathlib import Path

from mmcare.export.placement import report_placement


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('model', metavar='MODEL', type=Path, help='an .mlpackage')
    parser.add_argument(
        '--out-dir',
        type=Path,
        default=Path('work_dirs/placement'),
        metavar='DIR',
        help='where NAME_placement.json and .txt go, replacing older ones; default: %(default)s',
    )
    return parser.parse_args()


def main() -> None:
    """Check, print the table, and exit with what came out."""
    arguments = parse_args()
    # Elsewhere than on macOS, coremltools warns of every part of it that is not there.
    logging.getLogger('coremltools').setLevel(logging.ERROR)
    try:
        report, text = report_placement(arguments.model, arguments.out_dir)
    except (ImportError, OSError, ValueError) as error:
        print(f'error: {error}', file=sys.stderr)
        sys.exit(2)
    print(text)
    print(f'Written to {arguments.out_dir}')
    sys.exit(0 if report['all_on_neural_engine'] else 1)


if __name__ == '__main__':
    main()
