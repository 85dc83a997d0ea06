"""Show what an exported file of a whole model finds in pictures, by what the file says of itself.

Boxes, the shares of classes, or their probabilities are printed, and drawn into DIR. Neither the
config nor PyTorch's checkpoint is needed.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import cv2
import mmcv
import numpy as np

try:
    from mmcare.export import open_exported
except ImportError as error:  # an older Python or PyTorch
    print(f'error: {error}', file=sys.stderr)
    sys.exit(2)


def main() -> None:
    """Open the file once, and go through the pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('file', metavar='FILE', help='.onnx, .pte, .ncnn, .tflite or .mlpackage')
    parser.add_argument('pictures', nargs='+', type=Path, metavar='PICTURE')
    parser.add_argument('--score', type=float, default=0.3, help='of boxes; default: %(default)s')
    help_out = 'default: %(default)s'
    parser.add_argument(
        '--out-dir', type=Path, default=Path('predictions'), metavar='DIR', help=help_out
    )
    arguments = parser.parse_args()
    try:
        names = {picture.name for picture in arguments.pictures}
        folders = {picture.resolve().parent for picture in arguments.pictures}
        if len(names) < len(arguments.pictures) or arguments.out_dir.resolve() in folders:
            raise ValueError('a picture would be overwritten: give others, or another --out-dir')
        program = open_exported(arguments.file)
        for picture in arguments.pictures:
            found, pixels = program.predict(picture), mmcv.imread(str(picture))
            print(f'{picture}: {"; ".join(describe(found, arguments.score)) or "nothing"}')
            drawn = draw(pixels, found, program.description, arguments.score)
            mmcv.imwrite(drawn, str(arguments.out_dir / picture.name))
    except (ImportError, OSError, ValueError) as error:
        print(f'error: {" ".join(str(error).split())}', file=sys.stderr)
        sys.exit(2)
    print(f'Drawn into {arguments.out_dir}')


def describe(found: dict[str, Any], least: float) -> list[str]:
    """Say in words what was found."""
    names, labels = found['names'] or range(10_000), found['labels']
    if 'scores' not in found:
        labels, numbers = np.unique(labels, return_counts=True)
        shares = numbers / numbers.sum()
        return [f'{names[label]} {share:.1%}' for label, share in zip(labels, shares, strict=True)]
    scored = [
        f'{names[label]} {score:.3f}' for label, score in zip(labels, found['scores'], strict=True)
    ]
    if 'boxes' not in found:
        return scored[:5]
    boxes = found['boxes'].astype(float).round(1).tolist()
    number = (found['scores'] >= least).sum()
    return [f'{text} {box}' for text, box in zip(scored, boxes, strict=True)][:number]


def draw(pixels: Any, found: dict[str, Any], description: Any, least: float) -> Any:
    """Draw boxes, the colours of classes, or the name of the class onto a picture."""
    names, labels = found['names'] or range(10_000), found['labels']
    if 'boxes' in found:
        rows = np.column_stack([found['boxes'], found['scores']])
        return mmcv.imshow_det_bboxes(pixels, rows, labels, found['names'], least, show=False)
    if 'scores' in found:
        text = f'{names[labels[0]]} {found["scores"][0]:.2f}'
        return cv2.putText(pixels, text, (5, 25), cv2.FONT_HERSHEY_SIMPLEX, 0.8, (0, 255, 0), 2)
    palette = description.get('palette') or np.random.default_rng(0).integers(0, 256, (256, 3))
    colours = np.array(palette)[labels % len(palette), ::-1]
    return (pixels // 2 + colours // 2).astype(np.uint8)


if __name__ == '__main__':
    main()
