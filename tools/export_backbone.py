"""Export a CARE backbone, or a model with one, to Core ML, ONNX, ExecuTorch, ncnn and LiteRT.

SOURCE is an arch or any detection, segmentation or classification config with a CARE backbone. By
default, only the backbone is built, without the toolbox or compiled ops; its outputs are stage1 to
stage4. --part neck and --part model export more of the model and need the config's toolbox. Each
file is compared with PyTorch before it is saved, and FILE.json next to it is its report.
"""

import argparse
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile

import yaml

try:
    from mmcare.export import export_model, load_source
    from mmcare.export.backends import BACKENDS
    from mmcare.export.export import CALIBRATION, INPUT_KINDS, LOGGER, OUTPUTS, PRECISIONS
    from mmcare.export.preprocessing import LETTERBOXES
    from mmcare.export.source import PARTS
    from mmcare.export.verify import ExportError
    from mmcare.weights.reading import CheckpointError
except ImportError as error:  # an older Python or PyTorch
    print(f'error: {error}', file=sys.stderr)
    sys.exit(2)
except KeyboardInterrupt:
    print('stopped: nothing is written', file=sys.stderr)
    sys.exit(130)

SHOWN = 'file', 'bytes', 'delegates', 'outside', 'deviations', 'quantization', 'runtime'
SHOWN += 'pictures', 'resize', 'names'

OPTIONS = {
    name: option for backend in BACKENDS.values() for name, option in backend.options.items()
}


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
        "segmentor or one-stage detector, with logits (of a segmentor at the head's stride) or the "
        'raw maps of a detector; default: backbone'
    )
    add('--part', choices=PARTS, default='backbone', help=help_part)
    help_shape = "of the images; default: the test pipeline's, rounded up to 32; 512 512 of an arch"
    add('--shape', type=int, nargs=2, metavar=('H', 'W'), help=help_shape)
    endings = ', '.join(f'{name}: {backend.ending}' for name, backend in BACKENDS.items())
    help_format = f'{endings}; default: coreml onnx'
    add('--format', nargs='+', choices=BACKENDS, default=('coreml', 'onnx'), help=help_format)
    help_out = 'where the files go, replacing older ones; default: %(default)s'
    add('--out-dir', type=Path, default=Path('work_dirs/export'), metavar='DIR', help=help_out)
    help_input = (
        'image: pixels from 0 to 255, which the file normalizes; tensor: normalized images; '
        'default: image for Core ML, tensor for others'
    )
    add('--input', choices=INPUT_KINDS, help=help_input)
    help_outputs = (
        'decoded: probabilities, a map of class labels, or boxes, scores and labels, of whole '
        "models; raw: the network's outputs; default: raw"
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
    for name, option in OPTIONS.items():
        add(f'--{name.replace("_", "-")}', **option)
    return parser.parse_args()


@contextmanager
def others_in_a_log() -> Iterator[str]:
    """Show what mmcare logs; send what other libraries print, also natively, to a file."""
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


def main() -> None:
    """Export, and print what was written."""
    arguments = parse_args()
    try:
        with others_in_a_log() as log:
            reports = export_model(
                load_source(arguments.source, arguments.checkpoint, arguments.part),
                arguments.out_dir,
                shape=arguments.shape and tuple(arguments.shape),
                formats=tuple(arguments.format),
                input_kind=arguments.input,
                outputs=arguments.outputs,
                letterbox=arguments.letterbox,
                precision=arguments.precision,
                calibration=arguments.calibration,
                images=arguments.images,
                **{name: getattr(arguments, name) for name in OPTIONS},
            )
    except KeyboardInterrupt:
        print('stopped: nothing is written', file=sys.stderr)
        sys.exit(130)
    except (CheckpointError, ExportError, ImportError, OSError, ValueError) as error:
        print(f'error: {" ".join(str(error).split())}', file=sys.stderr)
        sys.exit(2)
    for report in reports.values():
        shown = {key: report[key] for key in SHOWN if key in report}
        print(yaml.safe_dump(shown, sort_keys=False, default_flow_style=None, width=100))
    height, width = report['shape']
    print(f'Written to {arguments.out_dir}, for images of height {height} and width {width}')
    print(f'What other libraries print is in {log}')


if __name__ == '__main__':
    main()
