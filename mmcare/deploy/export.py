"""Export of a backbone in several formats, with a report on each."""

import json
import os
import platform
import statistics
import time
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from mmcare.deploy.output import check_writable, moved_into_place
from mmcare.deploy.source import Source
from mmcare.deploy.stage_maps import StageMaps
from mmcare.deploy.to_coreml import (
    COMPRESSIONS,
    PRECISIONS,
    TARGETS,
    check_coreml,
    compress_coreml,
    convert_coreml,
    count_operators,
    prepare_coreml,
    run_coreml,
    save_coreml,
)
from mmcare.deploy.to_onnx import LARGEST_SIDE, check_onnx, export_onnx, onnx_runner
from mmcare.version import __version__

FORMATS = ('coreml', 'onnx')
INPUTS = ('image', 'tensor')
NOT_RUN = 'converted, but not run: that needs macOS'
RUNS = 10


def export_backbone(
    source: Source,
    out_dir: str | os.PathLike,
    shape: tuple[int, int] = (512, 512),
    formats: tuple[str, ...] = FORMATS,
    precision: str = 'float16',
    target: str = 'iOS16',
    input_kind: str = 'image',
    compress: str | None = None,
    dynamic: bool = False,
    beside_unfolded: bool = False,
) -> dict[str, Any]:
    """Fold a backbone and write it, with a report as ``.json`` and ``.txt``.

    Args:
        source: See :func:`mmcare.deploy.load_source`; it is left as it is.
        out_dir: Where the files go, replacing older ones.
        shape: Height and width of the images.
        formats: Of :data:`FORMATS`.
        precision: Of Core ML, one of ``PRECISIONS``.
        target: Oldest system for Core ML, one of ``TARGETS``.
        input_kind: Of Core ML: ``'image'``, with the normalisation inside, or ``'tensor'``,
            normalised. ONNX always takes a normalised tensor.
        compress: Compression of Core ML's weights, one of ``COMPRESSIONS``.
        dynamic: ONNX with free height and width.
        beside_unfolded: Also export the unfolded network, count its operators and, for ONNX,
            measure both in turn on one thread.

    Returns:
        The report.

    Raises:
        ValueError: If an argument is outside of what is allowed.
        ImportError: If a package is missing.
        NotADirectoryError, PermissionError: If ``out_dir`` cannot be written.
        ExportError: If an ONNX file computes something else than PyTorch.
    """
    out_dir = Path(out_dir)
    _check_arguments(source, shape, formats, precision, target, input_kind, compress, dynamic)
    if beside_unfolded and source.backbone.deploy:
        raise ValueError('the weights are folded already: there is no unfolded network to compare')
    check_writable(out_dir)
    if 'coreml' in formats:
        check_coreml(compress)
    if 'onnx' in formats:
        check_onnx()
    folded = deepcopy(source.backbone)
    folded.switch_to_deploy()
    networks = dict(folded=replace(source, backbone=folded))
    if beside_unfolded:
        networks['unfolded'] = source
    report = dict(
        name=source.name,
        arch=source.arch,
        checkpoint=source.weights,
        shape=list(shape),
        parameters=sum(parameter.numel() for parameter in folded.parameters()),
        mmcare_version=__version__,
        torch_version=torch.__version__,
    )
    stem = f'{source.name}_{shape[0]}x{shape[1]}'
    if 'coreml' in formats:
        report['coreml'] = _write_coreml(
            networks, out_dir / f'{stem}.mlpackage', shape, precision, target, input_kind, compress
        )
    if 'onnx' in formats:
        name = f'{source.name}_dynamic' if dynamic else stem
        report['onnx'] = _write_onnx(networks, out_dir / f'{name}.onnx', shape, dynamic)
    for suffix, text in (('json', json.dumps(report, indent=2)), ('txt', format_report(report))):
        with moved_into_place(out_dir / f'{stem}.{suffix}') as temporary:
            temporary.write_text(text + '\n')
    return report


def _write_coreml(
    networks: dict[str, Source],
    path: Path,
    shape: tuple[int, int],
    precision: str,
    target: str,
    input_kind: str,
    compress: str | None,
) -> dict[str, Any]:
    source = networks['folded']
    normalization = source.normalization if input_kind == 'image' else None
    channels = normalization.channels if normalization else None

    def convert(network: Source) -> tuple[StageMaps, Any]:
        maps = prepare_coreml(network.backbone, shape, precision, normalization)
        return maps, convert_coreml(maps, shape, precision, target, channels)

    _, model = convert(source)
    if compress:
        model = compress_coreml(model, compress)
    metadata = dict(
        arch=source.arch,
        checkpoint=source.weights,
        shape=f'{shape[0]}x{shape[1]}',
        version=__version__,
        input=input_kind,
    )
    size = save_coreml(model, path, metadata)
    report = dict(
        file=path.name,
        bytes=size,
        precision=precision,
        target=target,
        input=f'image ({channels})' if channels else 'tensor, normalised',
        compression=compress or 'none',
        operators=count_operators(model),
        deviations=NOT_RUN,
    )
    if platform.system() == 'Darwin':
        report['deviations'] = (
            'not measured for images as input: export with --input tensor to measure them'
            if channels
            else run_coreml(model, StageMaps(source.backbone, shape), shape)
        )
    if 'unfolded' in networks:
        report['operators_unfolded'] = count_operators(convert(networks['unfolded'])[1])
    return report


def _write_onnx(
    networks: dict[str, Source], path: Path, shape: tuple[int, int], dynamic: bool
) -> dict[str, Any]:
    # Not as it is exported, but as its users know it: the whole backbone, folded only if it was.
    reference = networks.get('unfolded', networks['folded']).backbone
    size = None if dynamic else shape
    maps = StageMaps(networks['folded'].backbone, size)
    report = export_onnx(maps, shape, path, dynamic, reference)
    if 'unfolded' in networks:
        with TemporaryDirectory() as directory:
            other = Path(directory, 'unfolded.onnx')
            unfolded = export_onnx(StageMaps(reference, size), shape, other, dynamic)
            report['operators_unfolded'] = unfolded['operators']
            report['milliseconds'] = _measure(dict(folded=path, unfolded=other), maps, shape)
    return report


def _measure(files: dict[str, Path], maps: StageMaps, shape: tuple[int, int]) -> dict[str, float]:
    """Median processor time of each file in ONNX Runtime, on one thread, measured in turn."""
    image = torch.rand(1, maps.backbone.in_channels, *shape)
    runners = {name: onnx_runner(file) for name, file in files.items()}
    times: dict[str, list[float]] = {name: [] for name in runners}
    for count in range(RUNS + 1):
        for name, run in runners.items():
            start = time.process_time()
            run(image)
            if count:  # the first run sets things up
                times[name].append(1000 * (time.process_time() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def format_report(report: dict[str, Any]) -> str:
    """Write a report as text."""
    lines = [
        f'{report["name"]}, weights: {report["checkpoint"]}, '
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
        else:
            lines.append(f'  opset {part["opset"]}, height and width: {part["height_and_width"]}')
        deviations = part['deviations']
        if isinstance(deviations, str):
            lines.append(f'  {deviations}')
        else:
            lines.append("  largest deviation from PyTorch, as a share of a map's maximum:")
            lines += [f'    {name:24}{value:9.1e}' for name, value in deviations.items()]
        lines += _operator_table(part['operators'], part.get('operators_unfolded'))
        if 'milliseconds' in part:
            times = part['milliseconds']
            lines.append(
                f'  ONNX Runtime, one thread, processor time: folded {times["folded"]:.1f} ms, '
                f'unfolded {times["unfolded"]:.1f} ms, ratio '
                f'{times["folded"] / times["unfolded"]:.2f}'
            )
    return '\n'.join(lines)


def _operator_table(folded: dict[str, int], unfolded: dict[str, int] | None) -> list[str]:
    columns = [folded] if unfolded is None else [folded, unfolded]
    names = sorted(set().union(*columns), key=lambda name: -max(c.get(name, 0) for c in columns))
    heads = ['', 'unfolded'][: len(columns)]
    lines = ['  ' + f'{"operators":24}' + ''.join(f'{head:>9}' for head in heads)]
    for name in names:
        lines.append(f'    {name:22}' + ''.join(f'{c.get(name, 0):9}' for c in columns))
    lines.append(f'    {"all":22}' + ''.join(f'{sum(c.values()):9}' for c in columns))
    return [line.rstrip() for line in lines]


def _check_arguments(
    source: Source,
    shape: tuple[int, int],
    formats: tuple[str, ...],
    precision: str,
    target: str,
    input_kind: str,
    compress: str | None,
    dynamic: bool,
) -> None:
    if len(shape) != 2 or not all(
        isinstance(side, int) and 32 <= side <= LARGEST_SIDE for side in shape
    ):
        raise ValueError(
            f'shape must be height and width from 32 to {LARGEST_SIDE} pixels, got {tuple(shape)}'
        )
    for name, value, allowed in (
        *(('formats', value, FORMATS) for value in formats),
        ('precision', precision, PRECISIONS),
        ('target', target, TARGETS),
        ('input', input_kind, INPUTS),
        ('compress', compress, (None, *COMPRESSIONS)),
    ):
        if value not in allowed:
            raise ValueError(f'{name} must be of {allowed}, got {value!r}')
    if not formats:
        raise ValueError(f'formats must name at least one of {FORMATS}')
    if dynamic and 'onnx' not in formats:
        raise ValueError('dynamic sizes are for onnx; Core ML is exported at one size')
    if dynamic and any(side % 32 for side in shape):
        raise ValueError(
            f'with dynamic sizes height and width are multiples of 32, got {tuple(shape)}'
        )
    if 'coreml' in formats and input_kind == 'image':
        channels = source.backbone.in_channels
        if source.normalization is None:
            raise ValueError(
                'the config names no mean and std for images (data_preprocessor); use --input '
                'tensor and normalise yourself'
            )
        if channels != 3 or len(source.normalization.mean) != 3:
            raise ValueError(
                f'images have 3 channels, the backbone takes {channels}; use --input tensor'
            )
