"""Convert CARE weights between the published files and those of MM toolboxes, either way.

A published file (CARETrans_S0.pth.tar, a timm training checkpoint) becomes the checkpoint of an MM
classifier, with the keys `backbone.*` and `head.*`. A checkpoint of an S0, S1 or S2, or of a model
with one as its backbone, becomes a published file with the backbone and, if there are any, the two
ImageNet heads. If a published file has EMA weights, these are used.
"""

import argparse

from mmcare.convert import convert_checkpoint
from mmcare.weights.reading import CheckpointError


def main() -> None:
    """Convert, and say what was written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('source', metavar='SRC', help='checkpoint to read; may be .safetensors')
    parser.add_argument(
        'destination',
        metavar='DST',
        help='checkpoint to write; an older one is replaced; .safetensors or any other ending',
    )
    arguments = parser.parse_args()
    try:
        print(convert_checkpoint(arguments.source, arguments.destination))
    except (CheckpointError, OSError, ValueError) as error:
        parser.exit(2, f'error: {error}\n')


if __name__ == '__main__':
    main()
