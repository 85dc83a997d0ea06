"""Export a CARE backbone to Core ML and ONNX: folded, with outputs stage1 to stage4.

SOURCE is an arch or any detection, segmentation or classification config with a CARE backbone; the
backbone alone is built, so neither the toolbox nor compiled ops are needed. --with-neck and
--part model take what stands behind it along; they need the config's toolbox. Beside the files a
report is written, as .json and .txt: size, operators by type, deviations from PyTorch.
"""

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from mmcare.checkpoint import CheckpointError
from mmcare.deploy.export import FORMATS, INPUTS, export_backbone, format_report
from mmcare.deploy.source import load_source
from mmcare.deploy.to_coreml import COMPRESSIONS, PRECISIONS, TARGETS
from mmcare.deploy.to_onnx import OPSET, ExportError


class OneLineParser(argparse.ArgumentParser):
    """A parser that says in one line what is wrong, as the rest of the tool does."""

    def error(self, message: str) -> NoReturn:
        """Leave with exit status 2."""
        self.exit(2, f'error: {message} (--help shows all options)\n')


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('source', metavar='SOURCE', help='s0, s1, s2, or a config (.py)')
    parser.add_argument(
        'checkpoint',
        metavar='CHECKPOINT',
        nargs='?',
        help='weights: a published file, or a checkpoint of a backbone or of a whole model, folded '
        'or not; default: random ones, to look at sizes, operators and speed',
    )
    part = parser.add_mutually_exclusive_group()
    part.add_argument(
        '--part',
        choices=('backbone', 'model'),
        default='backbone',
        help='model: a whole classifier or segmentor (EncoderDecoder); its output is logits, of '
        "a segmentor at the head's stride; default: backbone",
    )
    part.add_argument(
        '--with-neck',
        action='store_const',
        const='neck',
        dest='part',
        help="backbone and neck (FPN) of a detector or segmentor; outputs are the neck's, neck1 "
        'and so on',
    )
    parser.add_argument(
        '--shape',
        type=int,
        nargs=2,
        default=(512, 512),
        metavar=('H', 'W'),
        help='height and width of the images; default: 512 512',
    )
    parser.add_argument(
        '--format', nargs='+', choices=FORMATS, default=FORMATS, help='default: both'
    )
    parser.add_argument(
        '--out-dir',
        type=Path,
        default=Path('work_dirs/export'),
        metavar='DIR',
        help='where the files go, replacing older ones; default: %(default)s',
    )
    parser.add_argument(
        '--precision', choices=PRECISIONS, default='float16', help='of Core ML; default: float16'
    )
    parser.add_argument(
        '--target',
        choices=TARGETS,
        default='iOS16',
        help='oldest system that is to run the Core ML model; default: iOS16',
    )
    parser.add_argument(
        '--input',
        choices=INPUTS,
        default='image',
        help="of Core ML: an image, with the config's normalisation inside, or a normalised tensor "
        '(what ONNX always takes); default: image',
    )
    parser.add_argument(
        '--compress',
        choices=COMPRESSIONS,
        help="compress Core ML's weights; palettising needs scikit-learn",
    )
    parser.add_argument(
        '--dynamic',
        action='store_true',
        help=f'ONNX (opset {OPSET}) for any height and width that 32 divides, up to 4096',
    )
    parser.add_argument(
        '--beside-unfolded',
        action='store_true',
        help='also export the unfolded network, to compare its operators and its time in ONNX '
        'Runtime; no file of it is kept',
    )
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
            precision=arguments.precision,
            target=arguments.target,
            input_kind=arguments.input,
            compress=arguments.compress,
            dynamic=arguments.dynamic,
            beside_unfolded=arguments.beside_unfolded,
        )
    except (CheckpointError, ExportError, ImportError, OSError, TypeError, ValueError) as error:
        line = ' '.join(str(error).split())
        print(f'error: {line}', file=sys.stderr)
        sys.exit(2)
    print(format_report(report))
    print(f'Written to {arguments.out_dir}')


if __name__ == '__main__':
    main()
