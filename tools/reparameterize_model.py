"""Fuse a model's checkpoint, to compute the same outputs in evaluation mode with fewer operators.

Batch norms of a CARE backbone are fused into its convolutions, and the two classification heads
into one. To load the result, set `deploy=True` for backbone and head, as the tool prints. A fused
model cannot be trained. The model's toolbox must be installed.
"""

import argparse

from mmcare.convert import fuse_checkpoint


def main() -> None:
    """Fuse, and say what was fused."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('config', metavar='CONFIG', help='config of the model, not fused')
    parser.add_argument(
        'checkpoint', metavar='CHECKPOINT', help='its weights, which must fill the whole model'
    )
    parser.add_argument(
        'destination',
        metavar='OUT',
        help='checkpoint to write; an older one is replaced; .safetensors or any other ending',
    )
    arguments = parser.parse_args()
    try:
        print(fuse_checkpoint(arguments.config, arguments.checkpoint, arguments.destination))
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        parser.exit(2, f'error: {error}\n')


if __name__ == '__main__':
    main()
