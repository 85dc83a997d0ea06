"""Export of a network to several formats, with a report on each file."""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from mmcare.export.detectors import describe_decoding, name_outputs
from mmcare.export.formats import FORMATS
from mmcare.export.formats.base import Format, Job
from mmcare.export.load import Source, fix_pools, fold_all
from mmcare.export.pictures import HELD_BACK, choose_pictures, describe_resizing, describe_scores
from mmcare.export.program import LARGEST_SIDE
from mmcare.export.verify import check_file, trial_images
from mmcare.files import check_writable, moved_into_place, size_of
from mmcare.models.averaged_attention import average_attention
from mmcare.models.backbones.care import TOTAL_STRIDE
from mmcare.version import __version__
from mmcare.weights.reading import digest_weights

INPUTS = ('image', 'tensor')
PRECISIONS = ('float32', 'float16', 'int8')
CALIBRATION = 64  # pictures


@torch.no_grad()
def export_backbone(
    source: Source,
    out_dir: str | os.PathLike,
    shape: tuple[int, int] = (512, 512),
    formats: Sequence[str] = ('coreml', 'onnx'),
    input_kind: str | None = None,
    precision: str | None = None,
    calibration: int | None = None,
    images: str | os.PathLike | None = None,
    **options: Any,
) -> dict[str, dict[str, Any]]:
    """Fold a network, write it, and write a report ``FILE.json`` next to each file.

    Args:
        source: See :func:`mmcare.export.load_source`; it is left as it is.
        out_dir: Where the files go, replacing older ones.
        shape: Height and width of the images.
        formats: Keys of :data:`mmcare.export.formats.FORMATS`.
        input_kind: ``'image'``, pixels from 0 to 255, normalised inside, or ``'tensor'``,
            normalised. None: an image for Core ML, a tensor for others.
        precision: ``'float32'``, ``'float16'`` or ``'int8'``. None: float16 for Core ML, float32
            for others.
        calibration: At most so many pictures to quantize with; None: 64.
        images: Folder of pictures to quantize with and to compare on; None: the config's data.
        **options: Of single formats: ``dynamic`` (ONNX), ``target`` and ``compress`` (Core ML).

    Returns:
        The reports by format.

    Raises:
        ValueError: If the network cannot be exported so.
        ExportError: If a file computes something else than PyTorch.
    """
    options = {name: value for name, value in options.items() if value}
    forms = choose_formats(formats, precision, calibration, options)
    kinds = {form: input_kind or form.input for form in forms}
    check_writable(Path(out_dir))
    job = make_job(source, shape, 'image' in kinds.values(), precision, options)
    number = (calibration or CALIBRATION) if precision == 'int8' else 0
    pictures, unread = choose_pictures(source, shape, number, images)
    held = {f'picture{i}': picture for i, picture in enumerate(pictures[-HELD_BACK:], 1)}
    job = replace(job, images={**job.images, **held}, calibration=pictures[:-HELD_BACK])
    reports = {}
    with TemporaryDirectory() as folder:  # so that all files are written, or none
        for form, kind in kinds.items():
            one = leave_free(job) if form.options.keys() & options.keys() >= {'dynamic'} else job
            one = one.of_pixels if kind == 'image' else one
            path = Path(folder, name_file(form, one))
            reports[form.name] = report = write_file(form, one, path)
            if unread and source.config is not None:
                report['pictures'] = f'none compared: {unread}'
            text = json.dumps(report, indent=2, allow_nan=False)
            path.with_name(f'{path.name}.json').write_text(f'{text}\n')
        for path in Path(folder).iterdir():
            with moved_into_place(Path(out_dir, path.name)) as temporary:
                shutil.move(path, temporary)
    return reports


def choose_formats(
    formats: Sequence[str], precision: str | None, calibration: int | None, options: Mapping
) -> list[Format]:
    """Find formats by name; raise if one lacks the precision, or a package, or all an option."""
    if unknown := {*formats} - {*FORMATS}:
        raise ValueError(f'unknown formats: {", ".join(sorted(unknown))}')
    forms = [form for name, form in FORMATS.items() if name in formats]
    for option in options:
        able = [name for name, form in FORMATS.items() if option in form.options]
        if not {*able} & {*formats}:
            raise ValueError(f'--{option} is for {", ".join(able) or "no format"}: name it')
    if precision and not all(precision in form.precisions for form in forms):
        able = [name for name, form in FORMATS.items() if precision in form.precisions]
        raise ValueError(f'--precision {precision} is for {", ".join(able)}: name no other format')
    if calibration is not None and precision != 'int8':
        raise ValueError('--calibration is for --precision int8')
    for form in forms:
        form.require()
    return forms


def make_job(
    source: Source,
    shape: tuple[int, int],
    pixels: bool,
    precision: str | None,
    options: Mapping[str, Any],
) -> Job:
    """Fold a copy of a network for images of a size, and describe it; raise if it cannot be."""
    network, part, dynamic = source.network, source.network.part, 'dynamic' in options
    normalization: Any = source.normalization
    if not all(TOTAL_STRIDE <= side <= LARGEST_SIDE for side in shape):
        raise ValueError(f'height and width must be 32 to {LARGEST_SIDE} pixels, got {shape}')
    if pixels and normalization is None:
        raise ValueError('the config has no mean and std of images: use --input tensor')
    if pixels and not network.in_channels == len(normalization.mean) == 3:
        raise ValueError(
            f'images have 3 channels, the network takes {network.in_channels}: use --input tensor'
        )
    outputs = network(torch.zeros(1, network.in_channels, *shape))
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
    names = name_outputs(network, outputs)
    folded = deepcopy(network)
    fold_all(folded)
    average_attention(folded)
    if not dynamic:
        fix_pools(folded, shape)
    about: dict[str, Any] = dict(
        name=source.name,
        part=part,
        arch=source.arch,
        checkpoint=source.weights,
        sha256=digest_weights(network.model.state_dict(), {}),
        mmcare_version=__version__,
        torch_version=str(torch.__version__),  # plain, for YAML
        shape=[*shape],
        parameters=sum(parameter.numel() for parameter in folded.parameters()),
        activation=None,
    )
    if part == 'model':
        about |= describe_scores(source, outputs[0].shape[1]) | describe_decoding(network.model)
    return Job(
        folded,
        network,  # as its users know it, not as it is exported
        names,
        trial_images(network.in_channels, shape),
        precision=precision,
        normalization=normalization,
        resize=describe_resizing(source.config, shape),
        options=options,
        about=about,
    )


def leave_free(job: Job) -> Job:
    """Make the job for any height and width, also compared at another one."""
    channels, height, width = job.size
    step = 1 if job.about['part'] == 'backbone' else TOTAL_STRIDE
    other = trial_images(channels, (height + step, max(width - step, TOTAL_STRIDE)))
    return replace(job, step=step, images={**job.images, 'random, another size': other['random']})


def name_file(form: Format, job: Job) -> str:
    """Name a file by what is in it, its size, and what is not the format's default."""
    name, part, (height, width) = (job.about[key] for key in ('name', 'part', 'shape'))
    marks = [one for one in form.settings(job).values() if one != next(iter(form.precisions))]
    size = 'dynamic' if job.step else f'{height}x{width}'
    return '_'.join([name, *[part] * (part != 'backbone'), size, *marks]) + form.ending


def write_file(form: Format, job: Job, path: Path) -> dict[str, Any]:
    """Write a file and return its report, or raise an ExportError if it differs from PyTorch."""
    description = form.describe(job)
    with moved_into_place(path) as temporary:
        written = form.write(job, temporary, description)
        compared = check_file(form, job, temporary, description, written)
    return dict(file=path.name, bytes=size_of(path), **description, **compared, **written.facts)
