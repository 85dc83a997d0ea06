"""Export of a network to several formats, with a report on each."""

import json
import os
import shutil
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml

from mmcare.export.detectors import describe_decoding, name_outputs, separate_convolutions
from mmcare.export.formats import FORMATS
from mmcare.export.formats.base import Format, Job
from mmcare.export.load import Source, fix_pools, fold
from mmcare.export.pictures import describe_classes, read_pictures
from mmcare.export.program import LARGEST_SIDE
from mmcare.export.verify import trial_images, verify
from mmcare.files import check_writable, moved_into_place, size_of
from mmcare.models.backbones.care import TOTAL_STRIDE
from mmcare.version import __version__

HELD_BACK = 2  # pictures to compare on, not to calibrate with
SAME = ('part', 'arch', 'checkpoint', 'shape', 'mmcare_version')  # of reports that are joined
INPUTS = ('image', 'tensor')


@torch.no_grad()
def export_backbone(
    source: Source,
    out_dir: str | os.PathLike,
    shape: tuple[int, int] = (512, 512),
    formats: tuple[str, ...] = ('coreml', 'onnx'),
    input_kind: str | None = None,
    dynamic: bool = False,
    int8: bool = False,
    calibration: int = 64,
    images: str | os.PathLike | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Fold a network and write it, with a report as ``.json`` and ``.txt``.

    The report keeps its entries of files in other formats that were written before.

    Args:
        source: See :func:`mmcare.export.load_source`; it is left as it is.
        out_dir: Where the files go, replacing older ones.
        shape: Height and width of the images.
        formats: Keys of :data:`mmcare.export.formats.FORMATS`.
        input_kind: ``'image'``, pixels from 0 to 255, normalised inside, or ``'tensor'``,
            normalised. None: an image for Core ML, a tensor for others.
        dynamic: ONNX with free height and width; multiples of 32, except for a backbone.
        int8: Quantize, for ExecuTorch and LiteRT.
        calibration: Pictures to quantize with, at most.
        images: Folder of these; None: the config's training data.
        **options: Of single formats: Core ML's ``precision``, ``target`` and ``compress``, see
            :class:`mmcare.export.formats.coreml.CoreML`.

    Returns:
        The report.

    Raises:
        ValueError: If the network cannot be exported so.
        ExportError: If a file that can be run here computes something else than PyTorch.
    """
    out_dir = Path(out_dir)
    network, part, normalization = source.network, source.network.part, source.normalization
    forms = {
        FORMATS[name]: input_kind or FORMATS[name].input for name in FORMATS if name in formats
    }
    known = {name: one for form in FORMATS.values() for name, one in form.options.items()}
    if unknown := {*formats} - {*FORMATS} | {*options} - {*known}:
        raise ValueError(f'unknown formats or options: {", ".join(sorted(unknown))}')
    options = {name: one.get('default') for name, one in known.items()} | options
    if not all(TOTAL_STRIDE <= side <= LARGEST_SIDE for side in shape):
        raise ValueError(f'height and width must be 32 to {LARGEST_SIDE} pixels, got {shape}')
    if dynamic and not any(form.dynamic for form in forms):
        able = ', '.join(name for name, form in FORMATS.items() if form.dynamic)
        raise ValueError(f'dynamic sizes are for {able}; other formats are exported at one size')
    if int8 and not all(form.int8 for form in forms):
        able = ', '.join(name for name, form in FORMATS.items() if form.int8)
        raise ValueError(f'int8 is for {able}: name no other format')
    if 'image' in forms.values():
        if normalization is None:
            raise ValueError('the config has no mean and std of images: use --input tensor')
        if not network.in_channels == len(normalization.mean) == 3:
            raise ValueError(
                f'images have 3 channels, the network takes {network.in_channels}: use --input '
                'tensor'
            )
    check_writable(out_dir)
    for form in forms:
        form.check(options)
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
    if part == 'model':
        report |= describe_decoding(network.model) | describe_classes(source)
    separate_convolutions(folded)
    base = source.name if part == 'backbone' else f'{source.name}_{part}'
    stem = f'{base}_{shape[0]}x{shape[1]}' + '_int8' * int8
    job = Job(
        folded,
        network,  # as its users know it, not as it is exported
        names,
        trials,
        pictures[:-HELD_BACK] if int8 else None,
        normalization=normalization,
        options=options,
        report=report,
    )
    other = shape[0] + step, max(shape[1] - step, TOTAL_STRIDE)
    another = trial_images(network.in_channels, other)['random']
    free = replace(job, step=step, images={**trials, 'random, another size': another})
    with suppress(OSError, ValueError):  # there may be no earlier report
        earlier = json.loads((out_dir / f'{stem}.json').read_text())
        if all(earlier.get(key) == report[key] for key in SAME):
            for name in [name for name in FORMATS if name in earlier.keys() - formats]:
                if (out_dir / earlier[name]['file']).exists():
                    report[name] = earlier[name]
    with TemporaryDirectory() as folder:  # so that all files are written, or none
        for form, kind in forms.items():
            one = free if dynamic and form.dynamic else job
            if kind == 'image':
                one = one.of_pixels
            name = f'{base}_dynamic' if one.step else stem
            report[form.name] = write_file(form, one, Path(folder, f'{name}{form.ending}'))
        Path(folder, f'{stem}.json').write_text(json.dumps(report, indent=2) + '\n')
        Path(folder, f'{stem}.txt').write_text(format_report(report) + '\n')
        for path in Path(folder).iterdir():
            with moved_into_place(out_dir / path.name) as temporary:
                shutil.move(path, temporary)
    return report


def write_file(form: Format, job: Job, path: Path) -> dict[str, Any]:
    """Write a file, compare it with the network, and return its entry of the report.

    Raises:
        ExportError: If the outputs differ.
    """
    with moved_into_place(path) as temporary:
        entries = form.write(job, temporary)
        if form.runtime and 'deviations' not in entries:
            run = form.open(temporary).run
            entries['deviations'] = verify(run, job, form.runtime, path.name)
    return dict(file=path.name, bytes=size_of(path), **form.describe(job), **entries)


def format_report(report: dict[str, Any]) -> str:
    """Write a report as text: YAML."""
    return yaml.safe_dump(report, sort_keys=False, default_flow_style=None, width=100).rstrip()
