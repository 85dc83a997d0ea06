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
files, of the toolbox's ``predict``. What the toolbox prints goes to a log, next to the table of
--out or else in the work directory.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

try:
    from mmcare.export.in_toolbox import pad_images, replaced_part, sliced
except ImportError as error:  # an older Python or PyTorch
    print(f'error: {error}', file=sys.stderr)
    sys.exit(2)
except KeyboardInterrupt:
    print('stopped: nothing is written', file=sys.stderr)
    sys.exit(130)
import pandas as pd
from mmengine.config import Config, DictAction
from mmengine.runner import Runner
from torch import Tensor

from mmcare.analysis.timing import measure_in_turn
from mmcare.export.loading import read_config, read_normalization
from mmcare.export.opening import open_exported
from mmcare.export.pipelines import fit_config, is_slid
from mmcare.export.tasks import make_task
from mmcare.files import check_writable_file, moved_into_place, size_of
from mmcare.weights.reading import CheckpointError, check_exists, load_weights
from mmcare.weights.strict import load_strictly
from mmcare_runtime.schema import find_differences
from mmcare_runtime.text import escape
from mmcare_runtime.tiles import TILES

ROUNDS = 5
PYTORCH = 'PyTorch'
WIDTH = 100  # of the printed table
# What a description says and metrics depend on, besides the images.
DECISIVE = ('activation', 'align_corners', 'classes', 'reduce_zero_label', 'threshold')
SCREEN = sys.stderr  # also while what others print goes to the log


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
    parser.add_argument(
        '--out',
        type=Path,
        metavar='JSON',
        help='also write the table here; an older one is replaced',
    )
    parser.add_argument('--work-dir', help="folder for logs; default: the config's")
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, help='changes of the config')
    return parser.parse_args()


def open_files(arguments: argparse.Namespace) -> dict[Path, Any]:
    """Open the files, which must take images of one shape, with pictures at one place."""
    options = dict(float16=arguments.float16, verify=not arguments.no_verify)
    programs = {file: open_exported(file, **options) for file in arguments.files}
    shapes = {program.input_shape for program in programs.values()}
    batch_size, _, *size = next(iter(shapes))
    fixed = all(isinstance(number, int) for number in (batch_size, *size))
    if len(shapes) != 1 or len(size) != 2 or not fixed:
        raise ValueError(
            f'the files take {", ".join(map(str, shapes))}, not images (N, C, H, W) of one shape: '
            'export them for one --shape and one --batch'
        )
    if len({program.letterbox for program in programs.values()}) > 1:
        raise ValueError('the files have pictures at different places: test them one by one')
    return programs


def read_test_config(arguments: argparse.Namespace) -> Config:
    """Read the config, with the changes of the command line."""
    config = read_config(arguments.config)
    config.merge_from_dict(arguments.cfg_options or {})
    folder = arguments.work_dir or config.get(
        'work_dir', f'work_dirs/{Path(arguments.config).stem}'
    )
    # A runner writes its config into its folder, where the training has written its own.
    config.work_dir = str(Path(folder, 'eval_exported'))
    config.load_from, config.resume = None, False
    if not config.get('test_dataloader'):
        raise ValueError(f'{arguments.config} has no test_dataloader: name a config with test data')
    return config


def has_mode(config: Config) -> bool:
    """Say whether the toolbox chooses between whole pictures and windows, as mmseg does."""
    return 'mode' in (config.model.get('test_cfg') or {})


def choose_tile(tile: str | None, config: Config, programs: Mapping[Path, Any]) -> str:
    """Choose whether files see whole pictures or windows; by default as the config says."""
    tile = tile or ('slide' if is_slid(config) else 'whole')
    if tile == 'slide':
        for file, program in programs.items():
            kind = (program.description.get('outputs') or [{}])[0].get('kind')
            detects = kind == 'boxes' or program.description.get('decode')
            if not detects and not has_mode(config):
                raise ValueError(f'--tile slide is for segmentors and detectors, not for {file}')
            if kind == 'labels':
                raise ValueError(
                    f'{file} has labels, which cannot be averaged: export it with --outputs '
                    'probabilities or raw, or test it with --tile whole'
                )
    return tile


@contextmanager
def printed_to(log: Path) -> Iterator[None]:
    """Write to a file what is printed."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open('w', encoding='utf-8') as file, redirect_stdout(file), redirect_stderr(file):
        yield


def build_runner(arguments: argparse.Namespace, config: Config) -> Runner:
    """Build the runner of a config, with the weights of the checkpoint if one is given."""
    try:
        runner = Runner.from_cfg(config)
    except (LookupError, TypeError) as error:  # a name or an argument that does not exist
        raise ValueError(f'{arguments.config} cannot be built: {error}') from error
    if arguments.checkpoint:
        weights = load_weights(arguments.checkpoint)
        load_strictly(runner.model, weights, arguments.checkpoint)
    return runner


def test_unchanged(arguments: argparse.Namespace, config: Config) -> dict[str, float]:
    """Test the checkpoint as the toolbox does; return no metrics if PyTorch cannot."""
    print(f'testing {PYTORCH}', file=SCREEN)
    try:
        return build_runner(arguments, config.copy()).test()
    except RuntimeError as error:  # such as for sizes that a head cannot compute
        print(f'PyTorch cannot test the config unchanged: {error}', file=SCREEN)
        return {}


def build_fitted(
    arguments: argparse.Namespace, config: Config, programs: Mapping[Path, Any], tile: str
) -> Runner:
    """Build a runner whose model sees images of the files' size; change the config.

    Raises:
        ValueError: If a file says something else of itself than the config does.
    """
    program = next(iter(programs.values()))
    size = program.input_shape[2:]
    normalization = read_normalization(config)  # with the Pad that fit_config removes
    fitted = config.copy()
    fit_config(fitted, size, tile)
    runner = build_runner(arguments, fitted)
    pad_images(runner.model, size, normalization, program.letterbox, tile)
    runner.model.eval()
    for file, program in programs.items():
        compare_with_config(file, program, config, normalization, runner.model)
    return runner


def compare_with_config(
    file: Path, program: Any, config: Config, normalization: Any, model: Any
) -> None:
    """Raise a ValueError if a file was exported from a config with other images or classes."""
    said = program.description
    if not said:
        return  # as replaced_part says
    task = make_task(model, said['part'])
    parameter = next(model.parameters())  # perhaps on a GPU
    outputs = task(parameter.new_zeros(1, task.info.in_channels, *program.input_shape[2:]))
    wanted = {k: v for k, v in task.describe(config, outputs).items() if k in DECISIVE}
    if normalization is not None:
        channels = normalization.expand(task.info.in_channels)
        images = said.get('inputs', ())
        wanted['inputs'] = [channels.describe(x['kind'], x['dtype']) for x in images]
    if differences := [*find_differences(said, wanted)]:
        raise ValueError(f'{file} is not of this config: {"; ".join(differences)}')


def test_fitted(runner: Runner, name: str, size: tuple[int, int]) -> dict[str, float]:
    """Test a model that sees images of one size."""
    print(f'testing {name}', file=SCREEN)
    try:
        return runner.test()
    except RuntimeError as error:
        raise ValueError(f'the model cannot be tested on images of {size}: {error}') from error


def test_file(
    runner: Runner, file: Path, program: Any, slices: bool, checked: bool
) -> tuple[str, dict[str, float]]:
    """Test a file in its model; return the file's part of the model, and metrics.

    Args:
        runner: From :func:`build_fitted`.
        file: Its path.
        program: The file, opened.
        slices: Whether the file computes windows of pictures, in place of the toolbox.
        checked: Whether the model has the weights of a checkpoint, which the file must have.
    """
    replaced = sliced if slices else replaced_part
    with replaced(runner.model, program, checked) as part:
        if part != 'model' and not checked:
            raise ValueError(
                f'{file} holds the {part} alone: give the weights of the rest with '
                '--checkpoint CHECKPOINT'
            )
        return part, test_fitted(runner, str(file), program.input_shape[2:])


def pytorch_part(
    model: Any, part: str, decodes: bool, picture: Tensor, samples: Any
) -> tuple[float, Callable[[], object]]:
    """Return megabytes of a part of a model, and a function that computes it for a picture.

    Args:
        model: Of a toolbox.
        part: See :func:`mmcare.export.load_model`.
        decodes: Whether the function computes results, by the toolbox's operators.
        picture: Of shape (1, C, H, W), normalized.
        samples: The picture's data samples.
    """
    model = deepcopy(model).cpu()
    network = make_task(model, part)
    weights = sum(value.nbytes for value in network.state_dict().values())
    run = partial(model.predict, picture, samples) if decodes else partial(network, picture)
    return weights / 1e6, run


def measure(
    arguments: argparse.Namespace, config: Config, programs: Mapping[Path, Any], tile: str
) -> pd.DataFrame:
    """Test and time the files, and the checkpoint if one is given; return a row for each."""
    first, checked = next(iter(programs.values())), bool(arguments.checkpoint)
    batch_size, size = first.input_shape[0], first.input_shape[2:]
    slices = tile == 'slide' and not has_mode(config)
    tile = 'whole' if slices else tile
    unchanged = test_unchanged(arguments, config) if checked else {}
    runner = build_fitted(arguments, config, programs, tile)
    batch = runner.model.data_preprocessor(next(iter(runner.test_dataloader)))
    picture = batch['inputs'][..., : size[0], : size[1]].cpu()

    tested = {
        file: test_file(runner, file, program, slices, checked)
        for file, program in programs.items()
    }
    rows = {
        str(file): {'MB': size_of(file) / 1e6, 'ms': 0.0, **metrics}
        for file, (_, metrics) in tested.items()
    }
    images = picture.repeat(batch_size, 1, 1, 1).numpy()
    runs: dict[str, Callable[[], object]] = {
        str(file): partial(program.run, images)
        for file, program in programs.items()
        if program.timed
    }
    timed_files = [*runs]
    if checked:
        fitted = test_fitted(runner, f'{PYTORCH} at {size[0]}x{size[1]}', size)
        name = PYTORCH if fitted == unchanged else f'{PYTORCH}, {size[0]}x{size[1]}'
        part, _ = next(iter(tested.values()))
        decodes = tile == 'whole' and 'kind' in first.description['outputs'][0]
        megabytes, runs[name] = pytorch_part(
            runner.model, part, decodes, picture, batch['data_samples']
        )
        in_pytorch = {PYTORCH: unchanged, name: fitted} if unchanged else {name: fitted}
        rows = {
            key: {'MB': megabytes, 'ms': 0.0, **metrics} for key, metrics in in_pytorch.items()
        } | rows
    print('timing', file=SCREEN)
    times = measure_in_turn(runs, ROUNDS).median()
    times[timed_files] /= batch_size
    table = pd.DataFrame(rows).T
    table['ms'] = times
    return table


def lay_out(table: pd.DataFrame) -> str:
    """Lay out a row for each file; columns that do not fit into the width go on below."""
    table = table.rename(index=shorten(table.index), columns=shorten(table.columns))
    return table.to_string(float_format='{:.4f}'.format, line_width=WIDTH)


def shorten(names: Iterable[str]) -> dict[str, str]:
    """Map names to their parts after the last slash, where no two are equal."""
    ends = {name: name.rpartition('/')[2] for name in names}
    return {name: end for name, end in ends.items() if [*ends.values()].count(end) == 1}


def main() -> None:
    """Test, and say what was measured."""
    arguments = parse_args()
    try:
        if arguments.checkpoint:
            check_exists(arguments.checkpoint)
        if arguments.out:
            check_writable_file(arguments.out)
        programs = open_files(arguments)
        config = read_test_config(arguments)
        tile = choose_tile(arguments.tile, config, programs)
        log = Path(f'{arguments.out or config.work_dir}.log')
        print(f'what the toolbox prints goes to {log}', file=SCREEN)
        with printed_to(log):
            table = measure(arguments, config, programs, tile)
    except KeyboardInterrupt:
        print('stopped: nothing is written', file=sys.stderr)
        sys.exit(130)
    except (CheckpointError, ImportError, OSError, ValueError) as error:
        print(f'error: {escape(" ".join(str(error).split()))}', file=sys.stderr)
        sys.exit(2)
    if arguments.out:
        with moved_into_place(arguments.out) as temporary:
            known = {name: row.dropna().to_dict() for name, row in table.iterrows()}
            temporary.write_text(json.dumps(known, indent=2) + '\n')
    print(lay_out(table))


if __name__ == '__main__':
    main()
