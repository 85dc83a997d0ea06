"""Export a CARE backbone to Core ML, ONNX, ExecuTorch, ncnn and LiteRT, folded.

SOURCE is an arch or any detection, segmentation or classification config with a CARE backbone. The
backbone alone is built, without the toolbox or compiled ops; its outputs are stage1 to stage4.
--with-neck and --part model export more of the model; they need the config's toolbox. Each file is
compared with PyTorch before it is saved, and FILE.json next to it is its report.
"""

import argparse
import sys
from pathlib import Path

import yaml

try:
    from mmcare.export import export_model, load_source
    from mmcare.export.backends import FORMATS
    from mmcare.export.export import CALIBRATION, INPUTS, PRECISIONS
except ImportError as error:  # an older Python or PyTorch
    print(f'error: {error}', file=sys.stderr)
    sys.exit(2)
except KeyboardInterrupt:
    print('stopped: nothing is written', file=sys.stderr)
    sys.exit(130)

SHOWN = 'file', 'bytes', 'delegates', 'outside', 'deviations', 'quantization', 'runtime', 'pictures'


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add('source', metavar='SOURCE', help='s0, s1, s2, or a config (.py)')
    help_checkpoint = (
        'weights: a published file, or a checkpoint of a backbone or of a whole model, folded or '
        'not; default: random ones, to look at sizes, operators and speed'
    )
    add('checkpoint', metavar='CHECKPOINT', nargs='?', help=help_checkpoint)
    part = parser.add_mutually_exclusive_group()
    help_part = (
        'model: a whole classifier, segmentor or one-stage detector; outputs are logits (of a '
        "segmentor at the head's stride) or the raw maps of a detector; default: backbone"
    )
    part.add_argument('--part', choices=('backbone', 'model'), default='backbone', help=help_part)
    help_neck = "backbone and neck of a detector or segmentor; outputs are the neck's: neck1, ..."
    part.add_argument(
        '--with-neck', action='store_const', const='neck', dest='part', help=help_neck
    )
    help_shape = 'of the images; default: 512 512'
    add('--shape', type=int, nargs=2, default=(512, 512), metavar=('H', 'W'), help=help_shape)
    endings = ', '.join(f'{name}: {form.ending}' for name, form in FORMATS.items())
    help_format = f'{endings}; default: coreml onnx'
    add('--format', nargs='+', choices=FORMATS, default=('coreml', 'onnx'), help=help_format)
    help_out = 'where the files go, replacing older ones; default: %(default)s'
    add('--out-dir', type=Path, default=Path('work_dirs/export'), metavar='DIR', help=help_out)
    help_input = (
        'pixels from 0 to 255, normalised inside as the config says, or a normalised tensor; '
        'default: image for Core ML, tensor for others'
    )
    add('--input', choices=INPUTS, help=help_input)
    help_precision = 'default: float16 for Core ML, float32 for others; int8 needs pictures'
    add('--precision', choices=PRECISIONS, help=help_precision)
    help_number = f"pictures for int8, of the config's training data; default: {CALIBRATION}"
    add('--calibration', type=int, metavar='N', help=help_number)
    add('--images', metavar='FOLDER', help='take its pictures for int8 and to compare on')
    for form in FORMATS.values():
        for name, option in form.options.items():
            add(f'--{name}', **option)
    return parser.parse_args()


def main() -> None:
    """Export, and print what was written."""
    arguments = parse_args()
    try:
        reports = export_model(
            load_source(arguments.source, arguments.checkpoint, arguments.part),
            arguments.out_dir,
            shape=tuple(arguments.shape),
            formats=tuple(arguments.format),
            input_kind=arguments.input,
            precision=arguments.precision,
            calibration=arguments.calibration,
            images=arguments.images,
            **{
                name: getattr(arguments, name) for form in FORMATS.values() for name in form.options
            },
        )
    except KeyboardInterrupt:
        print('stopped: nothing is written', file=sys.stderr)
        sys.exit(130)
    # RuntimeError: CheckpointError and ExportError; LookupError: names that no registry has.
    except (ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
        print(f'error: {" ".join(str(error).split())}', file=sys.stderr)
        sys.exit(2)
    for report in reports.values():
        shown = {key: report[key] for key in SHOWN if key in report}
        print(yaml.safe_dump(shown, sort_keys=False, default_flow_style=None, width=100))
    print(f'Written to {arguments.out_dir}')


if __name__ == '__main__':
    main()
