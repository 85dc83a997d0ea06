"""Export of a backbone, alone or with neck or head, in several formats, with a report on each."""

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

from mmcare.deploy.parts import Graph, attach, fix_pools, fold_behind
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
from mmcare.output import check_writable, moved_into_place
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
    """Fold a network and write it, with a report as ``.json`` and ``.txt``.

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
    folded = _fold(source, shape)
    report = dict(
        name=source.name,
        part=source.part,
        arch=source.arch,
        checkpoint=source.weights,
        shape=list(shape),
        parameters=sum(parameter.numel() for parameter in folded.network.parameters()),
        mmcare_version=__version__,
        torch_version=torch.__version__,
    )
    base = source.name if source.part == 'backbone' else f'{source.name}_{source.part}'
    stem = f'{base}_{shape[0]}x{shape[1]}'
    unfolded = source if beside_unfolded else None
    if 'coreml' in formats:
        path = out_dir / f'{stem}.mlpackage'
        report['coreml'] = _write_coreml(
            folded, unfolded, path, shape, precision, target, input_kind, compress
        )
    if 'onnx' in formats:
        path = out_dir / (f'{base}_dynamic.onnx' if dynamic else f'{stem}.onnx')
        report['onnx'] = _write_onnx(source, folded, path, shape, dynamic, beside_unfolded)
    for suffix, text in (('json', json.dumps(report, indent=2)), ('txt', format_report(report))):
        with moved_into_place(out_dir / f'{stem}.{suffix}') as temporary:
            temporary.write_text(text + '\n')
    return report


def _fold(source: Source, shape: tuple[int, int]) -> Source:
    """A folded copy; what is behind a backbone takes images of one size if it pools to bins."""
    backbone, behind = deepcopy(source.backbone), deepcopy(source.behind)
    backbone.switch_to_deploy()
    if behind is not None:
        fold_behind(behind)
        fix_pools(behind, backbone, shape)
    return replace(source, backbone=backbone, behind=behind)


def _write_coreml(
    source: Source,
    unfolded: Source | None,
    path: Path,
    shape: tuple[int, int],
    precision: str,
    target: str,
    input_kind: str,
    compress: str | None,
) -> dict[str, Any]:
    normalization = source.normalization if input_kind == 'image' else None
    channels = normalization.channels if normalization else None

    def convert(network: Source) -> Any:
        graph = prepare_coreml(network.backbone, shape, precision, normalization, network.behind)
        return convert_coreml(graph, shape, precision, target, channels)

    model = convert(source)
    if compress:
        model = compress_coreml(model, compress)
    metadata = dict(
        arch=source.arch,
        part=source.part,
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
            else run_coreml(model, source.network, source.backbone.in_channels, shape)
        )
    if unfolded is not None:
        report['operators_unfolded'] = count_operators(convert(unfolded))
    return report


def _write_onnx(
    source: Source,
    folded: Source,
    path: Path,
    shape: tuple[int, int],
    dynamic: bool,
    beside_unfolded: bool,
) -> dict[str, Any]:
    size = None if dynamic else shape

    def make_graph(network: Source) -> StageMaps | Graph:
        return attach(StageMaps(network.backbone, size), network.behind)

    # Compared with the network as its users know it, not as it is exported.
    report = export_onnx(make_graph(folded), shape, path, dynamic, source.network)
    if beside_unfolded:
        with TemporaryDirectory() as directory:
            other = Path(directory, 'unfolded.onnx')
            unfolded = export_onnx(make_graph(source), shape, other, dynamic)
            report['operators_unfolded'] = unfolded['operators']
            files = dict(folded=path, unfolded=other)
            report['milliseconds'] = _measure(files, source.backbone.in_channels, shape)
    return report


def _measure(files: dict[str, Path], channels: int, shape: tuple[int, int]) -> dict[str, float]:
    """Median processor time of each file in ONNX Runtime, on one thread, measured in turn."""
    image = torch.rand(1, channels, *shape)
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
    dense = source.behind is not None and source.behind.dense
    if dense and any(side % 32 for side in shape):
        raise ValueError(
            f'behind a backbone, maps of different strides are added up: for {source.part} height '
            f'and width are multiples of 32, got {tuple(shape)}'
        )
    if dynamic and dense and source.part == 'model':
        raise ValueError(
            'the heads of segmentors resize maps to sizes that they fix: no dynamic sizes for a '
            'whole segmentor, only for a backbone, a neck or a classifier'
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
