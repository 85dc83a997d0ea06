"""Export a backbone, or a model with one, to Core ML, ONNX, ExecuTorch, ncnn and LiteRT.

SOURCE is an arch of CARE, a config of mmdet, mmseg or mmpretrain with any backbone, or the name of
one of their own configs, such as mmdet::retinanet/retinanet_r18_fpn_1x_coco.py. By default, only
the backbone is built, without the toolbox or compiled ops; its outputs are stage1 to stage4. --part
neck and --part model export more of the model and need the config's toolbox. Each file is compared
with PyTorch before it is saved, and FILE.json next to it is its report. If a format fails, the
files of the other formats stay, and the status is 1.
"""

import argparse
import atexit
import gc
import logging
import os
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import yaml

try:
    from mmcare.export import load_model
    from mmcare.export.backends import BACKENDS
    from mmcare.export.errors import Argument, ExportError, RequestError
    from mmcare.export.export import LOGGER, run_request
    from mmcare.export.pipelines import LETTERBOXES
    from mmcare.export.request import (
        CALIBRATION,
        INPUT_KINDS,
        OUTPUTS,
        PRECISIONS,
        ExportRequest,
    )
    from mmcare.export.tasks import OPTIONS as TASK_OPTIONS
    from mmcare.export.tasks import PARTS
    from mmcare.weights.reading import CheckpointError, check_exists
except ImportError as error:  # an older Python or PyTorch
    print(f'error: {error}', file=sys.stderr)
    sys.exit(2)
except KeyboardInterrupt:
    print('stopped: nothing is written', file=sys.stderr)
    sys.exit(130)

SHOWN = 'file', 'bytes', 'delegates', 'non_delegated_ops', 'max_rel_error', 'sqnr_db', 'runtime'
SHOWN += 'pictures', 'resize', 'windows', 'padding', 'names'
OPTIONS = dict(TASK_OPTIONS)
for backend in BACKENDS.values():
    OPTIONS |= backend.options
# Options that the library names differently.
FLAGS = dict(formats='format', input_kind='input')
LAST_LINES = 15  # of a converter's log, which are shown if it fails


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add('source', metavar='SOURCE', help='s0, s1, s2, or a config (.py)')
    help_checkpoint = (
        'weights: a published file, or a checkpoint of a backbone or of a whole model, fused or '
        'not; default: random ones, to look at sizes, operators and speed'
    )
    add('checkpoint', metavar='CHECKPOINT', nargs='?', help=help_checkpoint)
    help_part = (
        "neck: backbone and neck, with the neck's outputs neck1, ...; model: a whole classifier, "
        "segmentor or detector, with logits (of a segmentor at the head's stride) or the raw maps "
        'of a one-stage detector; two-stage ones need --outputs decoded; default: backbone'
    )
    add('--part', choices=PARTS, default='backbone', help=help_part)
    help_shape = (
        "of the images; default: the test pipeline's, rounded up to multiples of the stride "
        "where maps are added up, or the windows' if test_cfg.mode is 'slide'; 512 512 for an arch"
    )
    add('--shape', type=int, nargs=2, metavar=('H', 'W'), help=help_shape)
    suffixes = ', '.join(f'{name}: {backend.suffix}' for name, backend in BACKENDS.items())
    help_format = f'{suffixes}; default: coreml onnx'
    add('--format', nargs='+', choices=BACKENDS, default=('coreml', 'onnx'), help=help_format)
    help_out = 'where the files go; older ones are replaced; default: %(default)s'
    add('--out-dir', type=Path, default=Path('work_dirs/export'), metavar='DIR', help=help_out)
    help_input = (
        'image: pixels from 0 to 255, which the file normalizes; tensor: normalized images; '
        'default: image for Core ML, tensor for others'
    )
    add('--input', choices=INPUT_KINDS, help=help_input)
    help_outputs = (
        'decoded: probabilities, a map of class labels (probabilities of all classes where windows '
        'are tested), or boxes, scores, labels and masks, of whole models; probabilities: those of '
        "classifiers and segmentors; raw: the network's outputs; default: raw"
    )
    add('--outputs', choices=OUTPUTS, default='raw', help=help_outputs)
    help_letterbox = (
        'where pictures are in the input of a whole model: center pads on all sides; default: '
        'top-left'
    )
    add('--letterbox', choices=LETTERBOXES, default='top-left', help=help_letterbox)
    help_precision = 'default: float16 for Core ML, float32 for others; int8 needs pictures'
    add('--precision', choices=PRECISIONS, help=help_precision)
    help_number = f'number of pictures for int8; default: {CALIBRATION}'
    add('--calibration', type=int, metavar='N', help=help_number)
    help_images = "pictures for int8 and to check files on; default: those of the config's data"
    add('--images', metavar='FOLDER', help=help_images)
    add('--batch', type=int, default=1, metavar='N', help='images at once, in ONNX; default: 1')
    for name, option in OPTIONS.items():
        add(f'--{name.replace("_", "-")}', **option)
    add('--verbose', action='store_true', help='show what converters print, as it comes')
    return parser.parse_args()


def make_request(arguments: argparse.Namespace) -> ExportRequest:
    """Turn the command line into a request, which is validated before anything is loaded."""
    options = {name: getattr(arguments, name) for name in OPTIONS}
    return ExportRequest(
        shape=arguments.shape and tuple(arguments.shape),
        formats=tuple(arguments.format),
        input_kind=arguments.input,
        outputs=arguments.outputs,
        letterbox=arguments.letterbox,
        precision=arguments.precision,
        calibration=arguments.calibration,
        images=arguments.images,
        batch=arguments.batch,
        options={name: value for name, value in options.items() if value is not None},
    )


@contextmanager
def others_in_a_log() -> Iterator[str]:
    """Show what mmcare logs; send what other libraries print, including native code, to a file."""
    sys.stdout.flush()
    streams = os.dup(1), os.dup(2)
    with (
        NamedTemporaryFile('w', prefix='mmcare-export-', suffix='.log', delete=False) as log,
        os.fdopen(streams[1], 'w') as terminal,
    ):
        handler = logging.StreamHandler(terminal)
        LOGGER.addHandler(handler)
        LOGGER.setLevel(logging.INFO)
        LOGGER.propagate = False
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            yield log.name
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            LOGGER.removeHandler(handler)
            for descriptor, stream in enumerate(streams, 1):
                os.dup2(stream, descriptor)
            os.close(streams[0])


@contextmanager
def everything_shown() -> Iterator[None]:
    """Show what mmcare logs together with what other libraries print."""
    handler = logging.StreamHandler()
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)


def silence() -> None:
    """Drop what native code prints when the process ends, after the news."""
    sys.stderr.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def discard(log: str | None) -> None:
    """Remove a log that nobody is told of."""
    if log:
        Path(log).unlink(missing_ok=True)


def to_option(argument: Argument) -> str:
    """Write an argument of the library, such as precision='int8', as an option of this command."""
    name = FLAGS.get(argument.name, argument.name).replace('_', '-')
    return f'--{name} {", ".join(map(str, argument.values))}'.strip()


def print_error(error: Exception) -> None:
    """Print an error on one line, with options in place of arguments of the library."""
    text = error.write(to_option) if isinstance(error, RequestError | ExportError) else str(error)
    print(f'error: {" ".join(text.split())}', file=sys.stderr)


def print_reports(reports: Mapping[str, Mapping[str, Any]], out_dir: Path) -> None:
    """Print what was written."""
    for report in reports.values():
        shown = {key: report[key] for key in SHOWN if key in report}
        print(yaml.safe_dump(shown, sort_keys=False, default_flow_style=None, width=100))
    for report in [*reports.values()][:1]:
        height, width = report['shape']
        print(f'Written to {out_dir}, for images of height {height} and width {width}')


def main() -> None:
    """Export, and print what was written."""
    arguments, log = parse_args(), None
    # Graphs are many small objects: by default, Python looks for garbage among all of them, and
    # among what was imported, hundreds of times.
    gc.freeze()
    gc.set_threshold(50_000)
    if not arguments.verbose:
        atexit.register(silence)
    try:
        if arguments.checkpoint:
            check_exists(arguments.checkpoint)  # converters and toolboxes take seconds to import
        with everything_shown() if arguments.verbose else others_in_a_log() as log:
            request = make_request(arguments)  # imports converters, whose native code prints
            LOGGER.info('loading %s', arguments.source)
            model = load_model(arguments.source, arguments.checkpoint, arguments.part)
            reports = run_request(model, arguments.out_dir, request)
    except KeyboardInterrupt:
        print('stopped: what is complete is written', file=sys.stderr)
        discard(log)
        sys.exit(130)
    except ExportError as error:
        print_reports(error.reports, arguments.out_dir)
        if log:
            with open(log, errors='replace') as lines:
                sys.stderr.writelines(['The last lines of the log:\n', *deque(lines, LAST_LINES)])
            print(f'What other libraries print is in {log}', file=sys.stderr)
        print_error(error)
        sys.exit(1)
    except (CheckpointError, ImportError, OSError, ValueError) as error:
        print_error(error)
        discard(log)
        sys.exit(2)
    print_reports(reports, arguments.out_dir)
    if log:
        print(f'What other libraries print is in {log}')
    first = next(iter(reports.values()))
    if first['part'] == 'model':
        file = arguments.out_dir / first['file']
        print(f'To draw results: python -m mmcare_runtime {file} PICTURE ...')


if __name__ == '__main__':
    main()
