"""Test an exported file in the toolbox's own test loop, in place of the network.

The file is run on the CPU, by one thread. Images are resized to fit in its height and width, the
ratio kept, and padded. A whole model needs no checkpoint. A backbone, with or without neck,
replaces these alone; the rest takes its weights from --checkpoint.
"""

import argparse
import json
import sys
from pathlib import Path

import pandas as pd
from mmengine.config import Config, DictAction
from mmengine.runner import Runner

from mmcare.export.evaluate import fit_config, pad_images, replaced_part
from mmcare.export.runtime import open_exported
from mmcare.files import check_writable_file, moved_into_place
from mmcare.weights.reading import load_weights
from mmcare.weights.whole import CheckpointError


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('config', metavar='CONFIG', help='config of the model, with test data')
    parser.add_argument(
        'file', type=Path, metavar='FILE', help='.onnx or .pte, of tools/export_backbone.py'
    )
    parser.add_argument(
        '--checkpoint', metavar='CHECKPOINT', help='also test this in PyTorch, in the same way'
    )
    parser.add_argument(
        '--out', type=Path, metavar='JSON', help='where the metrics go, as {exported, pytorch}'
    )
    parser.add_argument('--work-dir', help="where logs go; default: the config's")
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, help='changes of the config')
    return parser.parse_args()


def measure(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Test the file, and the checkpoint if one is given; return the metrics of each."""
    program = open_exported(arguments.file)
    size = tuple(side for side in program.input_shape[2:] if isinstance(side, int))
    if len(size) != 2:
        raise ValueError(
            f'{arguments.file} takes {program.input_shape}, not images (1, C, H, W) of one size: '
            'export it without --dynamic'
        )
    config = Config.fromfile(arguments.config)
    config.merge_from_dict(arguments.cfg_options or {})
    config.work_dir = arguments.work_dir or config.get(
        'work_dir', f'work_dirs/{Path(arguments.config).stem}'
    )
    config.load_from, config.resume = None, False
    if not config.get('test_dataloader'):
        raise ValueError(f'{arguments.config} has no test_dataloader: name a config with test data')
    fit_config(config, size)
    runner = Runner.from_cfg(config)
    pad_images(runner.model, size)
    if arguments.checkpoint:
        try:
            runner.model.load_state_dict(load_weights(arguments.checkpoint))
        except RuntimeError as error:
            raise CheckpointError(f'{arguments.checkpoint} does not fit. {error}') from error
    with replaced_part(runner.model, program, bool(arguments.checkpoint)) as part:
        if part != 'model' and not arguments.checkpoint:
            raise ValueError(
                f'{arguments.file} holds the {part} alone: give the weights of the rest with '
                '--checkpoint CHECKPOINT'
            )
        metrics = {'exported': runner.test()}
    return metrics | ({'pytorch': runner.test()} if arguments.checkpoint else {})


def main() -> None:
    """Test, and say what was measured."""
    arguments = parse_args()
    try:
        if arguments.out:
            check_writable_file(arguments.out)
        metrics = measure(arguments)
    # RuntimeError: CheckpointError, and what PyTorch says of sizes that a network cannot take.
    except (ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
        print(f'error: {" ".join(str(error).split())}', file=sys.stderr)
        sys.exit(2)
    print(pd.DataFrame(metrics).to_string(float_format='{:.4f}'.format))
    if arguments.out:
        with moved_into_place(arguments.out) as temporary:
            temporary.write_text(json.dumps(metrics, indent=2, default=float) + '\n')


if __name__ == '__main__':
    main()
