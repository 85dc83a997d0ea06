"""Test exported files in the toolbox's own test loop, in place of the network, and time them.

Files are run on the CPU, by one thread; PyTorch computes .mlpackage files, which are not timed.
Images are resized to fit in their height and width, the ratio kept, and padded. Whole models need
no checkpoint. A backbone, with or without neck, replaces these alone; the rest takes its weights
from --checkpoint. A table is printed: megabytes, milliseconds an image (median, all in turn in this
process), and the config's metrics.
"""

import argparse
import json
import sys
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path

try:
    from mmcare.export.evaluate import fit_config, pad_images, replaced_part, take_normalized
except ImportError as error:  # an older Python or PyTorch
    print(f'error: {error}', file=sys.stderr)
    sys.exit(2)
except KeyboardInterrupt:
    print('stopped: nothing is written', file=sys.stderr)
    sys.exit(130)
import pandas as pd
from mmengine.config import Config, DictAction
from mmengine.runner import Runner

from mmcare.export.load import Network
from mmcare.export.runtime import measure_in_turn, open_exported
from mmcare.files import check_writable_file, moved_into_place, size_of
from mmcare.weights.reading import load_weights
from mmcare.weights.whole import CheckpointError

ROUNDS = 5
PYTORCH = 'PyTorch'


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('config', metavar='CONFIG', help='config of the model, with test data')
    parser.add_argument(
        'files',
        type=Path,
        nargs='+',
        metavar='FILE',
        help='.onnx, .pte, .ncnn, .tflite or .mlpackage, of tools/export_backbone.py',
    )
    parser.add_argument(
        '--checkpoint', metavar='CHECKPOINT', help='also test this in PyTorch, in the same way'
    )
    parser.add_argument('--float16', action='store_true', help='compute .tflite files in float16')
    parser.add_argument('--out', type=Path, metavar='JSON', help='where the table goes, row by row')
    parser.add_argument('--work-dir', help="where logs go; default: the config's")
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, help='changes of the config')
    return parser.parse_args()


def measure(arguments: argparse.Namespace) -> pd.DataFrame:
    """Test and time the files, and the checkpoint if one is given; return a row for each."""
    programs = {file: open_exported(file, arguments.float16) for file in arguments.files}
    shapes = {program.input_shape for program in programs.values()}
    size = tuple(side for side in next(iter(shapes))[2:] if isinstance(side, int))
    if len(shapes) != 1 or len(size) != 2:
        raise ValueError(
            f'the files take {", ".join(map(str, shapes))}, not images (1, C, H, W) of one size: '
            'export them for one --shape, without --dynamic'
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
    batch = next(iter(runner.test_dataloader))
    picture = runner.model.eval().data_preprocessor(batch)['inputs']
    rows: dict[str, dict[str, float]] = {}
    runs: dict[str, Callable[[], object]] = {}
    for file, opened in programs.items():
        program = take_normalized(opened, runner.model)
        with replaced_part(runner.model, program, bool(arguments.checkpoint)) as part:
            if part != 'model' and not arguments.checkpoint:
                raise ValueError(
                    f'{file} holds the {part} alone: give the weights of the rest with '
                    '--checkpoint CHECKPOINT'
                )
            rows[str(file)] = {'MB': size_of(file) / 1e6, 'ms': 0.0, **runner.test()}
        if program.timed:
            runs[str(file)] = partial(program.run, picture.cpu())
        if arguments.checkpoint and PYTORCH not in runs:
            network = Network(deepcopy(runner.model).cpu(), part)
            weights = sum(one.nbytes for one in network.state_dict().values())
            runs[PYTORCH] = partial(network, picture.cpu())
    if arguments.checkpoint:
        rows = {PYTORCH: {'MB': weights / 1e6, 'ms': 0.0, **runner.test()}, **rows}
    table = pd.DataFrame(rows).T
    table['ms'] = measure_in_turn(runs, ROUNDS).median()
    return table


def main() -> None:
    """Test, and say what was measured."""
    arguments = parse_args()
    try:
        if arguments.out:
            check_writable_file(arguments.out)
        table = measure(arguments)
    except KeyboardInterrupt:
        print('stopped: nothing is written', file=sys.stderr)
        sys.exit(130)
    # RuntimeError: CheckpointError, and what PyTorch says of sizes that a network cannot take.
    except (ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
        print(f'error: {" ".join(str(error).split())}', file=sys.stderr)
        sys.exit(2)
    print(table.to_string(float_format='{:.4f}'.format))
    if arguments.out:
        with moved_into_place(arguments.out) as temporary:
            known = {name: row.dropna().to_dict() for name, row in table.iterrows()}
            temporary.write_text(json.dumps(known, indent=2) + '\n')


if __name__ == '__main__':
    main()
