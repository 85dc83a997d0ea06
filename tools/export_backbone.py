"""Export a CARE backbone, or a model with one, to Core ML, ONNX, ExecuTorch, ncnn and LiteRT.

SOURCE is an arch or any detection, segmentation or classification config with a CARE backbone. By
default, only the backbone is built, without the toolbox or compiled ops; its outputs are stage1 to
stage4. --part neck and --part model export more of the model and need the config's toolbox. Each
file is compared with PyTorch before it is saved, and FILE.json next to it is its report.
"""

import argparse
import sys
from pathlib import Path

import yaml

try:
    from mmcare.export import export_model, load_source
    from mmcare.export.backends import BACKENDS
    from mmcare.export.export import CALIBRATION, INPUT_KINDS, PRECISIONS
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
    help_precision = 'default: float16 for Core ML, float32 for others; int8 needs pictures'
    add('--precision', choices=PRECISIONS, help=help_precision)
    help_number = f'number of pictures for int8; default: {CALIBRATION}'
    add('--calibration', type=int, metavar='N', help=help_number)
    help_images = "pictures for int8 and to check files on; default: those of the config's data"
    add('--images', metavar='FOLDER', help=help_images)
    for backend in BACKENDS.values():
        for name, option in backend.options.items():
            add(f'--{name}', **option)
    return parser.parse_args()


def main() -> None:
    """Export, and print what was written."""
    arguments = parse_args()
    names = [name for backend in BACKENDS.values() for name in backend.options]
    try:
        reports = export_model(
            load_source(arguments.source, arguments.checkpoint, arguments.part),
            arguments.out_dir,
            shape=arguments.shape and tuple(arguments.shape),
            formats=tuple(arguments.format),
            input_kind=arguments.input,
            precision=arguments.precision,
            calibration=arguments.calibration,
            images=arguments.images,
            **{name: getattr(arguments, name) for name in names},
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


if __name__ == '__main__':
    main()
