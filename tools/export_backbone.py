"""Export a CARE backbone to Core ML, ONNX, ExecuTorch, Core AI, ncnn and LiteRT, folded.

SOURCE is an arch or any detection, segmentation or classification config with a CARE backbone. The
backbone alone is built, without the toolbox or compiled ops; its outputs are stage1 to stage4.
--with-neck and --part model export more of the model; they need the config's toolbox. A
report is written next to the files (.json, .txt): size, operators by type, deviations from PyTorch.
"""

import argparse
import sys
from pathlib import Path

try:
    from mmcare.export import export_backbone, load_source
    from mmcare.export.export import INPUTS, format_report
    from mmcare.export.formats import FORMATS
except ImportError as error:  # an older Python or PyTorch
    print(f'error: {error}', file=sys.stderr)
    sys.exit(2)
except KeyboardInterrupt:
    print('stopped: nothing is written', file=sys.stderr)
    sys.exit(130)


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
    help_dynamic = (
        'ONNX for any height and width from 33 to 4096; beyond a backbone, those that 32 divides'
    )
    add('--dynamic', action='store_true', help=help_dynamic)
    able = ' and '.join(name for name, form in FORMATS.items() if form.int8)
    help_quantize = f'{able} with convolutions in int8, calibrated with pictures'
    add('--quantize', choices=('int8',), help=help_quantize)
    help_number = "pictures to calibrate with, of the config's training data; default: %(default)s"
    add('--calibration', type=int, default=64, metavar='N', help=help_number)
    add('--images', metavar='FOLDER', help='calibrate with its pictures instead')
    for form in FORMATS.values():
        for name, option in form.options.items():
            add(f'--{name}', **option)
    return parser.parse_args()


def main() -> None:
    """Export, and print the report."""
    arguments = parse_args()
    try:
        report = export_backbone(
            load_source(arguments.source, arguments.checkpoint, arguments.part),
            arguments.out_dir,
            shape=tuple(arguments.shape),
            formats=tuple(arguments.format),
            input_kind=arguments.input,
            dynamic=arguments.dynamic,
            int8=arguments.quantize == 'int8',
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
    print(format_report(report))
    print(f'Written to {arguments.out_dir}')


if __name__ == '__main__':
    main()
