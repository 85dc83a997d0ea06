"""Export of a network to several formats, with a report on each."""

import json
import os
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from mmcare.compatibility import require
from mmcare.export.coreai import write_coreai
from mmcare.export.coreml import write_coreml
from mmcare.export.detectors import describe_decoding, name_outputs, separate_convolutions
from mmcare.export.executorch import write_executorch
from mmcare.export.load import Source, fix_pools, fold
from mmcare.export.onnx import write_onnx
from mmcare.export.program import LARGEST_SIDE, export_program
from mmcare.files import check_writable, moved_into_place
from mmcare.models.backbones.care import TOTAL_STRIDE
from mmcare.version import __version__

# With the packages that they need.
FORMATS = {
    'coreml': ('coremltools',),
    'onnx': ('onnx', 'onnxscript', 'onnxruntime'),
    'executorch': ('executorch',),
    'coreai': ('coreai_torch',),
}
INPUTS = ('image', 'tensor')


@torch.no_grad()
def export_backbone(
    source: Source,
    out_dir: str | os.PathLike,
    shape: tuple[int, int] = (512, 512),
    formats: tuple[str, ...] = ('coreml', 'onnx'),
    precision: str = 'float16',
    target: str = 'iOS16',
    input_kind: str = 'image',
    compress: str | None = None,
    dynamic: bool = False,
) -> dict[str, Any]:
    """Fold a network and write it, with a report as ``.json`` and ``.txt``.

    Args:
        source: See :func:`mmcare.export.load_source`; it is left as it is.
        out_dir: Where the files go, replacing older ones.
        shape: Height and width of the images.
        formats: Of :data:`FORMATS`.
        precision: Of Core ML, ``'float16'`` or ``'float32'``.
        target: Oldest system for Core ML: ``'iOS16'``, ``'iOS17'`` or ``'iOS18'``.
        input_kind: Of Core ML: ``'image'``, normalised inside, or ``'tensor'``, normalised.
            The other formats always take a normalised tensor.
        compress: Compression of Core ML's weights, one of ``COMPRESSIONS``.
        dynamic: ONNX with free height and width, multiples of 32.

    Returns:
        The report.

    Raises:
        ValueError: If the network cannot be exported so.
        ImportError: If a package is missing.
        OSError: If ``out_dir`` cannot be written.
        ExportError: If an ONNX or ExecuTorch file computes something else than PyTorch.
    """
    out_dir = Path(out_dir)
    network, part = source.network, source.network.part
    normalization = source.normalization if input_kind == 'image' else None
    if not all(TOTAL_STRIDE <= side <= LARGEST_SIDE for side in shape):
        raise ValueError(f'height and width must be 32 to {LARGEST_SIDE} pixels, got {shape}')
    if dynamic and 'onnx' not in formats:
        raise ValueError('dynamic sizes are for onnx; other formats are exported at one size')
    if 'coreml' in formats and input_kind == 'image':
        if normalization is None:
            raise ValueError('the config has no mean and std of images: use --input tensor')
        if not network.in_channels == len(normalization.mean) == 3:
            raise ValueError(
                f'images have 3 channels, the network takes {network.in_channels}: use --input '
                'tensor'
            )
    check_writable(out_dir)
    for kind in formats:
        for package in FORMATS[kind]:
            extra = 'coreai' if kind == 'coreai' else 'export'
            require(package, f'export with --format {kind}', extra)
    if compress and compress.startswith('palettize'):
        require('sklearn', f'compression by {compress}, through scikit-learn,')
    outputs = network(torch.zeros(1, network.in_channels, *shape))
    if any(side % TOTAL_STRIDE for side in shape) and (
        dynamic or (part != 'backbone' and outputs[0].dim() == 4)
    ):
        raise ValueError(
            'height and width must be multiples of 32 where they are free and where maps of '
            f'different strides are added up, got {shape}'
        )
    if dynamic and part == 'model' and hasattr(network.model, 'decode_head'):
        raise ValueError('heads of segmentors fix sizes: no dynamic sizes with --part model')
    names = {
        'backbone': [f'stage{index + 1}' for index in network.backbone.out_indices],
        'neck': [f'neck{index + 1}' for index in range(len(outputs))],
        'model': name_outputs(network.model, outputs) if part == 'model' else [],
    }[part]
    folded = deepcopy(network)
    fold(folded)
    if not dynamic:
        fix_pools(folded, shape)
    report: dict[str, Any] = dict(
        name=source.name,
        part=part,
        arch=source.arch,
        checkpoint=source.weights,
        shape=list(shape),
        parameters=sum(parameter.numel() for parameter in folded.parameters()),
        outputs=[
            dict(name=name, shape=list(output.shape))
            for name, output in zip(names, outputs, strict=True)
        ],
        mmcare_version=__version__,
        torch_version=torch.__version__,
    )
    if part == 'model' and (decode := describe_decoding(network.model)):
        report['decode'] = decode
    separate_convolutions(folded)
    base = source.name if part == 'backbone' else f'{source.name}_{part}'
    stem = f'{base}_{shape[0]}x{shape[1]}'
    paths = dict(
        coreml=out_dir / f'{stem}.mlpackage',
        onnx=out_dir / (f'{base}_dynamic.onnx' if dynamic else f'{stem}.onnx'),
        executorch=out_dir / f'{stem}.pte',
        coreai=out_dir / f'{stem}.aimodel',
    )
    if 'coreml' in formats:
        report['coreml'] = write_coreml(
            folded,
            names,
            paths['coreml'],
            shape,
            precision,
            target,
            normalization,
            compress,
            metadata=dict(
                arch=source.arch,
                part=part,
                checkpoint=source.weights,
                shape=f'{shape[0]}x{shape[1]}',
                version=__version__,
                input=input_kind,
            ),
            reference=network,
        )
    if {'executorch', 'coreai'} & set(formats) or ('onnx' in formats and not dynamic):
        program = export_program(folded, network.in_channels, shape)
    # What can be run is compared with the network as its users know it, not as it is exported.
    if 'onnx' in formats:
        free = export_program(folded, network.in_channels, shape, True) if dynamic else program
        report['onnx'] = write_onnx(free, names, paths['onnx'], shape, network, dynamic)
    if 'executorch' in formats:
        report['executorch'] = write_executorch(program, paths['executorch'], network)
    if 'coreai' in formats:
        report['coreai'] = write_coreai(program, names, paths['coreai'])
    for kind in set(formats):
        files = [paths[kind], *paths[kind].rglob('*')]  # a package is a directory
        size = sum(file.stat().st_size for file in files if file.is_file())
        report[kind] = dict(file=paths[kind].name, bytes=size, **report[kind])
    for suffix, text in (('json', json.dumps(report, indent=2)), ('txt', format_report(report))):
        with moved_into_place(out_dir / f'{stem}.{suffix}') as temporary:
            temporary.write_text(text + '\n')
    return report


def format_report(report: dict[str, Any]) -> str:
    """Write a report as text."""
    lines = [
        f'{report["name"]} ({report["part"]}), weights: {report["checkpoint"]}, '
        f'{report["parameters"] / 1e6:.2f} M parameters, '
        f'{report["shape"][0]}x{report["shape"][1]}'
    ]
    for kind in FORMATS:
        if kind not in report:
            continue
        part = report[kind]
        lines += ['', f'{kind}: {part["file"]}, {part["bytes"] / 1e6:.2f} MB']
        if kind == 'coreml':
            lines.append(
                f'  ML Program, {part["precision"]}, {part["target"]} or later, input: '
                f'{part["input"]}, compression: {part["compression"]}'
            )
        elif kind == 'onnx':
            lines.append(f'  opset {part["opset"]}, height and width: {part["height_and_width"]}')
        elif kind == 'executorch':
            outside = ', '.join(part['outside']) or 'none'
            lines.append(f'  XNNPACK, float32, delegates: {part["delegates"]}, outside: {outside}')
        deviations = part['deviations']
        if isinstance(deviations, str):
            lines.append(f'  {deviations}')
        else:
            lines.append("  largest deviation from PyTorch, as a share of an output's maximum:")
            lines += [f'    {name:24}{value:9.1e}' for name, value in deviations.items()]
        operators = {**part['operators'], 'all': sum(part['operators'].values())}
        lines.append('  operators:')
        lines += [f'    {name:28}{number:5}' for name, number in operators.items()]
    return '\n'.join(lines)
