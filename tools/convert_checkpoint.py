"""Convert CARE weights between the published files and those of MM toolboxes, either way.

A published file (CARETrans_S0.pth.tar, a timm training checkpoint) becomes the checkpoint of an
MM classifier: `backbone.*` and `head.*`. Any checkpoint with a CARE backbone in it (of a
classifier, a detector, a segmentor, or the backbone alone) becomes a published one: the backbone,
and the two ImageNet heads if they are there.
"""

import argparse
import sys
from pathlib import Path

from mmcare.checkpoint import CheckpointError, convert_checkpoint
from mmcare.output import check_writable_file


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('source', metavar='SRC', help='checkpoint to read; .safetensors too')
    parser.add_argument(
        'destination',
        metavar='DST',
        help='checkpoint to write, replaced if it exists; .safetensors or any other ending',
    )
    parser.add_argument(
        '--ema',
        action='store_true',
        help='take state_dict_ema of a published file instead of state_dict',
    )
    return parser.parse_args()


def main() -> None:
    """Convert, and say what was taken and written."""
    arguments = parse_args()
    try:
        check_writable_file(Path(arguments.destination))
        print(convert_checkpoint(arguments.source, arguments.destination, arguments.ema))
    except (CheckpointError, OSError) as error:
        print(f'error: {error}', file=sys.stderr)
        sys.exit(2)


if __name__ == '__main__':
    main()
