"""Export mmseg's decode heads to each format at several sizes, and compare them with PyTorch.

The heads are narrow, on a backbone of four convolutions at CARE's strides: what is exported here is
the head. The table has the largest deviation over all sizes, as a share of the largest magnitude,
in float32 and, where it is computed, in float16.
"""

import argparse
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
import torch
from mmengine.config import ConfigDict
from mmengine.model import BaseModule
from mmengine.registry import MODELS
from recording import describe_machine, save
from torch import Tensor, nn

from mmcare.export import export_model
from mmcare.export.backends import BACKENDS
from mmcare.export.check import ExportError
from mmcare.export.loading import IMAGENET, LoadedModel
from mmcare.export.tasks import make_task
from mmcare.files import check_writable
from mmcare.models.deployment import BackboneInfo

WIDTHS = (16, 16, 32, 64)  # of the maps at strides 4, 8, 16 and 32
COMMON = dict(channels=16, num_classes=5, norm_cfg=dict(type='BN'), align_corners=False)
LAST = dict(**COMMON, in_channels=WIDTHS[3], in_index=3)
ALL = dict(**COMMON, in_channels=WIDTHS, in_index=(0, 1, 2, 3))
# Of the segmentor, or of the only head of an EncoderDecoder.
HEADS: Mapping[str, Any] = {
    'FCN': dict(type='FCNHead', num_convs=1, **LAST),
    'FPN': dict(type='FPNHead', feature_strides=(4, 8, 16, 32), **ALL),
    'UPer': dict(type='UPerHead', **ALL),
    'PSP': dict(type='PSPHead', **LAST),
    'ASPP': dict(type='ASPPHead', dilations=(1, 6, 12), **LAST),
    'DepthwiseSeparableASPP': dict(
        type='DepthwiseSeparableASPPHead',
        dilations=(1, 6, 12),
        c1_in_channels=WIDTHS[0],
        c1_channels=8,
        **LAST,
    ),
    'DA': dict(type='DAHead', pam_channels=8, **LAST),
    'Enc': dict(
        type='EncHead', num_codes=8, **{**ALL, 'in_channels': WIDTHS[1:], 'in_index': (1, 2, 3)}
    ),
    'LightHam': dict(type='LightHamHead', ham_channels=16, ham_kwargs=dict(MD_R=8), **ALL),
    'SegFormer': dict(type='SegformerHead', **ALL),
    'Segmenter': dict(
        type='SegmenterMaskTransformerHead',
        num_layers=1,
        num_heads=2,
        embed_dims=16,
        **{**LAST, 'channels': 16, 'norm_cfg': dict(type='LN')},
    ),
    'cascade of FCN and OCR': [
        dict(type='FCNHead', num_convs=1, **LAST),
        dict(type='OCRHead', ocr_channels=8, **LAST),
    ],
    'cascade with PointHead': [
        dict(type='FPNHead', feature_strides=(4, 8, 16, 32), **ALL),
        dict(
            type='PointHead',
            num_fcs=1,
            **{**ALL, 'in_channels': WIDTHS[:1], 'in_index': [0], 'norm_cfg': None},
        ),
    ],
}
# The last three are PointHead's.
TEST = dict(mode='whole', subdivision_steps=1, subdivision_num_points=8, scale_factor=2)
NAMES = dict(coreml='Core ML', onnx='ONNX', executorch='ExecuTorch', ncnn='ncnn', litert='LiteRT')


class FourConvolutions(BaseModule):
    """Maps at strides 4, 8, 16 and 32."""

    def __init__(self) -> None:
        super().__init__()
        widths, strides = (3, *WIDTHS), (4, 2, 2, 2)
        self.stages = nn.ModuleList(
            nn.Conv2d(before, width, 3, stride, padding=1)
            for before, width, stride in zip(widths[:-1], widths[1:], strides, strict=True)
        )

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Map images to four maps."""
        maps = []
        for stage in self.stages:
            images = stage(images).relu()
            maps.append(images)
        return tuple(maps)


def build(head: Any) -> LoadedModel:
    """Build a segmentor with a head, or a cascade of heads; all weights affect the outputs."""
    torch.manual_seed(0)
    heads = head if isinstance(head, list) else [head]
    kind = dict(type='EncoderDecoder', decode_head=head)
    if len(heads) > 1:
        kind.update(type='CascadeEncoderDecoder', num_stages=len(heads))
    backbone = dict(type=FourConvolutions)
    config = dict(**kind, backbone=backbone, test_cfg=TEST, _scope_='mmseg')
    model = MODELS.build(ConfigDict(config)).eval().requires_grad_(False)
    for name, tensor in model.state_dict().items():
        if name.endswith('running_var'):
            tensor.uniform_(0.5, 2)
        elif name.endswith('running_mean'):
            tensor.normal_()
        elif tensor.dim() > 1 and tensor.is_floating_point():
            tensor.normal_(std=(1.5 / tensor[0].numel()) ** 0.5)
        elif name.endswith('gamma'):  # DAHead's, which start at 0
            tensor.fill_(0.5)
    task = make_task(model, 'model', BackboneInfo(output_names=(), stride=32))
    return LoadedModel('heads', 'random', task, IMAGENET)


def compare(head: Any, shape: tuple[int, int], formats: Sequence[str]) -> dict[str, Any]:
    """Export to formats; return, for each, an error as a number, or what failed as a string."""
    with TemporaryDirectory() as folder:
        failure = ''
        try:
            reports: Mapping[str, Any] = export_model(build(head), folder, shape, formats)
        except ExportError as error:
            reports, failure = error.reports, str(error)
        except ValueError as error:
            return dict.fromkeys(formats, str(error))
    results: dict[str, Any] = {}
    for name in formats:
        if name not in reports:
            results[name] = failure
            continue
        for key, end in (('max_rel_error', ''), ('max_rel_error_float16', '_float16')):
            errors = reports[name].get(key)
            if isinstance(errors, dict):
                results[name + end] = max(errors[image] for image in ('random', 'smooth'))
    return results


def describe(cells: pd.Series) -> str:
    """Write the results of a head in a format, at all sizes."""
    failed = cells[cells.map(lambda cell: isinstance(cell, str))]
    if len(failed):
        return f'fails at {", ".join(failed.index)}'
    return f'{cells.max():.0e}'


def main() -> None:
    """Export each head, write the results as CSV, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add('--heads', nargs='+', choices=HEADS, default=[*HEADS])
    add('--formats', nargs='+', choices=BACKENDS, default=[*BACKENDS])
    add('--shapes', nargs='+', default=['128x128', '256x256', '320x480', '512x512'])
    add('--out-dir', type=Path, default=Path('work_dirs/heads'), metavar='DIR')
    arguments = parser.parse_args()
    warnings.simplefilter('ignore')
    check_writable(arguments.out_dir)
    rows = []
    for head in arguments.heads:
        for shape in arguments.shapes:
            height, width = map(int, shape.split('x'))
            results = compare(HEADS[head], (height, width), arguments.formats)
            print(head, shape, results, file=sys.stderr, flush=True)
            rows += [
                dict(head=head, shape=shape, format=name, result=result)
                for name, result in results.items()
            ]
            save(arguments.out_dir / 'heads.csv', pd.DataFrame(rows))
    table = pd.DataFrame(rows).set_index('shape').groupby(['head', 'format'], sort=False)['result']
    cells = table.apply(describe).unstack(sort=False)
    cells.columns = [
        NAMES[name.removesuffix('_float16')] + ', float16' * name.endswith('_float16')
        for name in cells.columns
    ]
    versions = ', '.join(describe_machine('mmsegmentation'))
    print(f'{cells.to_markdown()}\n\n{versions}')


if __name__ == '__main__':
    main()
