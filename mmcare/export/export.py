"""Export of a network to several formats, with a report on each."""

import json
import os
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import yaml

from mmcare.compatibility import require
from mmcare.export.coreai import write_coreai
from mmcare.export.coreml import write_coreml
from mmcare.export.detectors import describe_decoding, name_outputs, separate_convolutions
from mmcare.export.executorch import write_executorch
from mmcare.export.load import Source, fix_pools, fold
from mmcare.export.ncnn import write_ncnn
from mmcare.export.onnx import write_onnx
from mmcare.export.pictures import read_pictures
from mmcare.export.program import LARGEST_SIDE, export_program
from mmcare.export.verify import trial_images
from mmcare.files import check_writable, moved_into_place, size_of
from mmcare.models.backbones.care import TOTAL_STRIDE
from mmcare.version import __version__

# With the packages that they need.
FORMATS = {
    'coreml': ('coremltools',),
    'onnx': ('onnx', 'onnxscript', 'onnxruntime'),
    'executorch': ('executorch',),
    'coreai': ('coreai_torch',),
    'ncnn': ('pnnx', 'ncnn'),
}
EXTRAS = dict(coreai='coreai', ncnn='ncnn')  # of mmcare, other than export
HELD_BACK = 2  # pictures to compare on, not to calibrate with
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
    int8: bool = False,
    calibration: int = 64,
    images: str | os.PathLike | None = None,
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
        dynamic: ONNX with free height and width; multiples of 32, except for a backbone.
        int8: Quantize; for ExecuTorch only.
        calibration: Pictures to quantize with, at most.
        images: Folder of these; None: the config's training data.

    Returns:
        The report.

    Raises:
        ValueError: If the network cannot be exported so.
        ImportError: If a package is missing.
        OSError: If ``out_dir`` cannot be written.
        ExportError: If a file that can be run here computes something else than PyTorch.
    """
    out_dir = Path(out_dir)
    network, part = source.network, source.network.part
    normalization = source.normalization if input_kind == 'image' else None
    if not all(TOTAL_STRIDE <= side <= LARGEST_SIDE for side in shape):
        raise ValueError(f'height and width must be 32 to {LARGEST_SIDE} pixels, got {shape}')
    if dynamic and 'onnx' not in formats:
        raise ValueError('dynamic sizes are for onnx; other formats are exported at one size')
    if int8 and set(formats) != {'executorch'}:
        raise ValueError('only executorch takes int8: name it as the one format')
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
            require(package, f'export with --format {kind}', EXTRAS.get(kind, 'export'))
    if compress and compress.startswith('palettize'):
        require('sklearn', f'compression by {compress}, through scikit-learn,')
    outputs = network(torch.zeros(1, network.in_channels, *shape))
    step = 1 if part == 'backbone' else TOTAL_STRIDE  # of free sides
    if (
        part != 'backbone'
        and any(side % TOTAL_STRIDE for side in shape)
        and (dynamic or outputs[0].dim() == 4)
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
    pictures, unread = [], ''
    try:
        if int8:
            pictures = read_pictures(source, shape, calibration + HELD_BACK, images)
            if len(pictures) <= HELD_BACK:
                raise ValueError(f'{len(pictures)} are too few, {HELD_BACK} are held back')
        else:
            pictures = read_pictures(source, shape, HELD_BACK, None, 'test_dataloader')
    except Exception as error:  # whatever a data set of others raises where it has no data
        if int8:
            raise ValueError(
                f'no pictures to calibrate with: {error}; give a config with training data, or a '
                'folder of pictures with --images'
            ) from error
        unread = ' '.join(f'{type(error).__name__}: {error}'.split())
    trials = trial_images(network.in_channels, shape)
    trials |= {f'picture{i + 1}': picture for i, picture in enumerate(pictures[-HELD_BACK:])}
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
        torch_version=str(torch.__version__),  # plain, for YAML
    )
    if unread and source.config is not None:
        report['pictures'] = f'none compared: {unread}'
    if part == 'model' and (decode := describe_decoding(network.model)):
        report['decode'] = decode
    separate_convolutions(folded)
    base = source.name if part == 'backbone' else f'{source.name}_{part}'
    stem = f'{base}_{shape[0]}x{shape[1]}' + '_int8' * int8
    paths = dict(
        coreml=out_dir / f'{stem}.mlpackage',
        onnx=out_dir / (f'{base}_dynamic.onnx' if dynamic else f'{stem}.onnx'),
        executorch=out_dir / f'{stem}.pte',
        coreai=out_dir / f'{stem}.aimodel',
        ncnn=out_dir / f'{stem}.ncnn',
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
        free = export_program(folded, network.in_channels, shape, step) if dynamic else program
        report['onnx'] = write_onnx(free, paths['onnx'], names, network, trials, step * dynamic)
    if 'executorch' in formats:
        report['executorch'] = write_executorch(
            program,
            paths['executorch'],
            names,
            network,
            trials,
            pictures[:-HELD_BACK] if int8 else None,
        )
    if 'coreai' in formats:
        report['coreai'] = write_coreai(program, names, paths['coreai'])
    if 'ncnn' in formats:
        report['ncnn'] = write_ncnn(folded, paths['ncnn'], network, trials)
    for kind in set(formats):
        report[kind] = dict(file=paths[kind].name, bytes=size_of(paths[kind]), **report[kind])
    for suffix, text in (('json', json.dumps(report, indent=2)), ('txt', format_report(report))):
        with moved_into_place(out_dir / f'{stem}.{suffix}') as temporary:
            temporary.write_text(text + '\n')
    return report


def format_report(report: dict[str, Any]) -> str:
    """Write a report as text: YAML."""
    return yaml.safe_dump(report, sort_keys=False, default_flow_style=None, width=100).rstrip()
