"""Test exported files in the test loop of the config's toolbox, and time them.

A file computes its part of the model; the rest of the model takes its weights from --checkpoint.
Files of whole models need no checkpoint. Files run on one thread of the CPU. PyTorch computes
.mlpackage files, which are not timed. The time of a file that takes several images is divided by
their number. Images are resized to fit the files' height and width, with the ratio kept, and
padded. Where the config tests a segmentor on windows (test_cfg.mode='slide'), or with --tile slide,
files compute windows; boxes of windows are merged. The table has megabytes, milliseconds per image
or window (median of interleaved rounds) and the config's metrics. With --checkpoint, the first row
is PyTorch as the toolbox tests the config, unchanged; if PyTorch's metrics at the files' height and
width differ, they are the second row. PyTorch's time is that of the part, or, next to decoded
files, of the toolbox's ``predict``.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

try:
    from mmcare.export.evaluation import pad_images, replaced_part, sliced
except ImportError as error:  # an older Python or PyTorch
    print(f'error: {error}', file=sys.stderr)
    sys.exit(2)
except KeyboardInterrupt:
    print('stopped: nothing is written', file=sys.stderr)
    sys.exit(130)
import pandas as pd
from mmengine.config import Config, DictAction
from mmengine.runner import Runner

from mmcare.analysis.timing import measure_in_turn
from mmcare.export.loading import read_config, read_normalization
from mmcare.export.opening import open_exported
from mmcare.export.preprocessing import fit_config, is_slid
from mmcare.export.tasks import make_task
from mmcare.files import check_writable_file, moved_into_place, size_of
from mmcare.models import CARE
from mmcare.models.loading import load_strictly
from mmcare.weights.reading import CheckpointError, load_weights
from mmcare_runtime.text import escape
from mmcare_runtime.tiles import TILES

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
        help='.onnx, .pte, .ncnn, .tflite or .mlpackage, from tools/export.py',
    )
    parser.add_argument(
        '--checkpoint', metavar='CHECKPOINT', help='weights; also tested in PyTorch'
    )
    parser.add_argument(
        '--tile',
        choices=TILES,
        help='slide: files see windows of their size; default: as the config tests',
    )
    parser.add_argument('--float16', action='store_true', help='compute .tflite files in float16')
    parser.add_argument(
        '--no-verify', action='store_true', help='open files that other tools have rewritten, too'
    )
    parser.add_argument('--out', type=Path, metavar='JSON', help='also write the table here')
    parser.add_argument('--work-dir', help="where logs go; default: the config's")
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, help='changes of the config')
    return parser.parse_args()


def build_runner(arguments: argparse.Namespace, config: Config) -> Runner:
    """Build the runner of a config, with the weights of the checkpoint if one is given."""
    try:
        runner = Runner.from_cfg(config)
    except (LookupError, TypeError) as error:  # a name or an argument that does not exist
        raise ValueError(f'{arguments.config} cannot be built: {error}') from error
    if arguments.checkpoint:
        weights = load_weights(arguments.checkpoint)
        load_strictly(runner.model, weights, (CARE,), arguments.checkpoint)
    return runner


def choose_tile(tile: str | None, config: Config, programs: Mapping[Path, Any]) -> str:
    """Choose whether files see whole pictures or windows; by default as the config says."""
    tile = tile or ('slide' if is_slid(config) else 'whole')
    if tile == 'slide':
        for file, program in programs.items():
            kind = (program.description.get('outputs') or [{}])[0].get('kind')
            detects = kind == 'boxes' or program.description.get('decode')
            if not detects and 'mode' not in (config.model.get('test_cfg') or {}):
                raise ValueError(f'--tile slide is for segmentors and detectors, not for {file}')
            if kind == 'labels':
                raise ValueError(
                    f'{file} has labels, which cannot be averaged: export it with --outputs '
                    'probabilities or raw, or test it with --tile whole'
                )
    return tile


def measure(arguments: argparse.Namespace) -> pd.DataFrame:
    """Test and time the files, and the checkpoint if one is given; return a row for each."""
    options = dict(float16=arguments.float16, verify=not arguments.no_verify)
    programs = {file: open_exported(file, **options) for file in arguments.files}
    shapes = {program.input_shape for program in programs.values()}
    batch_size, _, *sides = next(iter(shapes))
    size = tuple(side for side in sides if isinstance(side, int))
    if len(shapes) != 1 or len(size) != 2 or not isinstance(batch_size, int):
        raise ValueError(
            f'the files take {", ".join(map(str, shapes))}, not images (N, C, H, W) of one shape: '
            'export them for one --shape and one --batch'
        )
    letterboxes = {program.letterbox for program in programs.values()}
    if len(letterboxes) > 1:
        raise ValueError('the files have pictures at different places: test them one by one')
    config = read_config(arguments.config)
    config.merge_from_dict(arguments.cfg_options or {})
    config.work_dir = arguments.work_dir or config.get(
        'work_dir', f'work_dirs/{Path(arguments.config).stem}'
    )
    config.load_from, config.resume = None, False
    if not config.get('test_dataloader'):
        raise ValueError(f'{arguments.config} has no test_dataloader: name a config with test data')
    tile = choose_tile(arguments.tile, config, programs)
    slices = tile == 'slide' and 'mode' not in (config.model.get('test_cfg') or {})
    metrics = {}
    if arguments.checkpoint:
        try:
            metrics = build_runner(arguments, config.copy()).test()
        except RuntimeError as error:  # such as for sizes that a head cannot compute
            print(f'PyTorch cannot test the config unchanged: {error}', file=sys.stderr)
    normalization = read_normalization(config)  # with the Pad that the next line removes
    tile = 'whole' if slices else tile
    fit_config(config, size, tile)
    runner = build_runner(arguments, config)
    pad_images(runner.model, size, normalization, *letterboxes, tile)

    def test() -> dict[str, float]:
        try:
            return runner.test()
        except RuntimeError as error:
            raise ValueError(f'the model cannot be tested on images of {size}: {error}') from error

    batch = runner.model.eval().data_preprocessor(next(iter(runner.test_dataloader)))
    picture = batch['inputs'][..., : size[0], : size[1]]
    pictures = picture.cpu().repeat(batch_size, 1, 1, 1).numpy()
    rows: dict[str, dict[str, float]] = {}
    runs: dict[str, Callable[[], object]] = {}
    for file, program in programs.items():
        model, checked = runner.model, bool(arguments.checkpoint)
        replaced = sliced if slices else replaced_part
        with replaced(model, program, checked) as part:
            if part != 'model' and not arguments.checkpoint:
                raise ValueError(
                    f'{file} holds the {part} alone: give the weights of the rest with '
                    '--checkpoint CHECKPOINT'
                )
            rows[str(file)] = {'MB': size_of(file) / 1e6, 'ms': 0.0, **test()}
        if program.timed:
            runs[str(file)] = partial(program.run, pictures)
        if arguments.checkpoint and PYTORCH not in runs:
            model = deepcopy(runner.model).cpu()
            network = make_task(model, part)
            weights = sum(value.nbytes for value in network.state_dict().values())
            runs[PYTORCH] = partial(network, picture.cpu())
            has_results = 'kind' in program.description['outputs'][0]
            if has_results and tile == 'whole':  # by the toolbox's operators
                runs[PYTORCH] = partial(model.predict, picture.cpu(), batch['data_samples'])
    times = measure_in_turn(runs, ROUNDS).median()
    times[times.index != PYTORCH] /= batch_size
    if arguments.checkpoint:
        fitted = test()
        name = PYTORCH if fitted == metrics else f'{PYTORCH}, {size[0]}x{size[1]}'
        times = times.rename({PYTORCH: name})
        of_pytorch = {PYTORCH: metrics, name: fitted} if metrics else {name: fitted}
        rows = {
            key: dict(MB=weights / 1e6, ms=0.0, **row) for key, row in of_pytorch.items()
        } | rows
    table = pd.DataFrame(rows).T
    table['ms'] = times
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
    except (CheckpointError, ImportError, OSError, ValueError) as error:
        print(f'error: {escape(" ".join(str(error).split()))}', file=sys.stderr)
        sys.exit(2)
    print(table.to_string(float_format='{:.4f}'.format))
    if arguments.out:
        with moved_into_place(arguments.out) as temporary:
            known = {name: row.dropna().to_dict() for name, row in table.iterrows()}
            temporary.write_text(json.dumps(known, indent=2) + '\n')


if __name__ == '__main__':
    main()
