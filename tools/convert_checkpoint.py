"""Convert CARE weights between the published files and those of MM toolboxes, either way.

A published file (CARETrans_S0.pth.tar, a timm training checkpoint) becomes the checkpoint of an
MM classifier: `backbone.*` and `head.*`. Any checkpoint with an S0, S1 or S2 in it (of a
classifier, a detector, a segmentor, or the backbone alone) becomes a published one: the backbone,
and the two ImageNet heads if they are there. EMA weights are taken if a published file has them.
"""

import argparse
import sys

from mmcare.convert import convert_checkpoint
from mmcare.weights.reading import CheckpointError


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('source', metavar='SRC', help='checkpoint to read, also .safetensors')
    parser.add_argument(
        'destination',
        metavar='DST',
        help='checkpoint to write, replaced if it exists; .safetensors or any other ending',
    )
    return parser.parse_args()


def main() -> None:
    """Convert, and say what was written."""
    arguments = parse_args()
    try:
        print(convert_checkpoint(arguments.source, arguments.destination))
    except (CheckpointError, OSError) as error:
        print(f'error: {error}', file=sys.stderr)
        sys.exit(2)


if __name__ == '__main__':
    main()
