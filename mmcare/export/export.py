"""Export a model to several formats, with a report on each file."""

import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch

from mmcare.export.backends.base import Backend
from mmcare.export.description import describe_file
from mmcare.export.errors import ExportError, Float16Error
from mmcare.export.file_check import ExportedFile, check_file, check_results
from mmcare.export.images import Pictures
from mmcare.export.loading import LoadedModel
from mmcare.export.pipelines import name_steps
from mmcare.export.plan import ExportPlan, plan_export
from mmcare.export.request import ExportRequest
from mmcare.export.tasks import OutputFormat
from mmcare.files import check_writable, moved_into_place, size_of
from mmcare_runtime.verify import write_hash

LOGGER = logging.getLogger('mmcare')


def export_model(
    model: LoadedModel,
    out_dir: str | os.PathLike,
    shape: tuple[int, int] | None = None,
    formats: Sequence[str] = ('coreml', 'onnx'),
    input_kind: str | None = None,
    outputs: str = 'raw',
    letterbox: str = 'top-left',
    precision: str | None = None,
    calibration: int | None = None,
    images: Pictures = None,
    tolerance: float | None = None,
    compare_float16: bool = True,
    batch: int = 1,
    **options: Any,
) -> dict[str, dict[str, Any]]:
    """Fuse a network, and write a file and a report ``FILE.json`` for each format.

    Return the reports by format.

    Args:
        model: See :func:`mmcare.export.load_model`. The model is not changed.
        out_dir: Where the files go; older ones are replaced.
        **options: These, and all other arguments, are those of
            :class:`mmcare.export.request.ExportRequest`.

    Raises:
        ValueError: If the model cannot be exported as requested.
        ExportError: If a format fails; the files of the other formats are written.
        ImportError: If a package that a format needs is missing.
    """
    request = ExportRequest(
        shape=shape,
        formats=formats,
        input_kind=input_kind,
        outputs=outputs,
        letterbox=letterbox,
        precision=precision,
        calibration=calibration,
        images=images,
        tolerance=tolerance,
        compare_float16=compare_float16,
        batch=batch,
        options={name: value for name, value in options.items() if value is not None},
    )
    reports = run_request(model, out_dir, request)
    if options.get('delegate') == 'coreml':  # the name of 1.0
        reports['executorch'] = reports.pop('executorch-coreml')
    return reports


@torch.no_grad()
def run_request(
    model: LoadedModel, out_dir: str | os.PathLike, request: ExportRequest
) -> dict[str, dict[str, Any]]:
    """Write the requested files, see :func:`export_model`."""
    check_writable(Path(out_dir))
    plan = plan_export(model, request)
    reports: dict[str, dict[str, Any]] = {}
    failures: list[ExportError] = []
    for index, backend in enumerate(request.backends, 1):
        LOGGER.info('%d/%d %s', index, len(request.backends), backend.name)
        start = perf_counter()
        try:
            with TemporaryDirectory() as folder:
                report = export_format(plan, backend, Path(folder))
                text = json.dumps(report, indent=2, allow_nan=False)
                Path(folder, f'{report["file"]}.json').write_text(f'{text}\n')
                for name in (report['file'], f'{report["file"]}.json'):
                    with moved_into_place(Path(out_dir, name)) as temporary:
                        shutil.move(Path(folder, name), temporary)
        except ExportError as error:
            failures.append(error)
            LOGGER.info('%s failed: %s', backend.name, error)
            continue
        reports[backend.name] = report
        size, seconds = report['bytes'] / 1e6, perf_counter() - start
        LOGGER.info('%s: %.1f MB, checked, %.0f s', report['file'], size, seconds)
    if failures:
        parts = [part for error in failures for part in ('; ', *error.parts)]
        failed = ExportError(*parts[1:])
        failed.reports = reports
        raise failed from failures[0]
    return reports


def export_format(plan: ExportPlan, backend: Backend, folder: Path) -> dict[str, Any]:
    """Write a file into a folder, check it, and return its report.

    The description of a file that is right in float32 only has ``float16=False``.

    Raises:
        ExportError: If the file cannot be converted, or computes something other than PyTorch.
    """
    try:
        return _export_checked(plan, backend, folder)
    except Float16Error as error:
        LOGGER.warning('%s: only in float32: %s', backend.name, error)
        plan = replace(plan, request=replace(plan.request, compare_float16=False))
        report = _export_checked(plan, backend, folder, float16=False)
        return report | dict(max_rel_error_float16=f'too large: {error}')


def _export_checked(
    plan: ExportPlan, backend: Backend, folder: Path, **described: Any
) -> dict[str, Any]:
    options = plan.request.options
    decoded = plan.choose_output_format(backend)
    file = write_file(plan, backend, decoded, folder, **described)
    precision, path = file.description['precision'], file.path
    report = dict(file=path.name, bytes=size_of(path), **file.description)
    if decoded and backend.is_quantized(precision, options):
        # Results have no signal-to-noise ratio: a second file has the raw outputs.
        with TemporaryDirectory() as raw_folder:
            raw_file = write_file(plan, backend, None, Path(raw_folder))
            report |= check_file(plan, backend, raw_file)
            report |= check_results(plan, backend, file, raw_file)
    else:
        report |= check_file(plan, backend, file)
    backend.check_rest(path, file.description)
    if plan.reference.why_float32:
        report['reference'] = f'computed in float32: {plan.reference.why_float32}'
    return report | dict(file.result.facts) | _say_what_is_missing(plan, report)


def write_file(
    plan: ExportPlan,
    backend: Backend,
    decoded: OutputFormat | None,
    folder: Path,
    **described: Any,
) -> ExportedFile:
    """Write a file of a backend into a folder, with raw outputs or decoded ones.

    ``described`` is what else its description says.
    """
    request, options, model = plan.request, plan.request.options, plan.model
    input_kind = request.input_kind_of(backend)
    precision = request.precision or backend.default_precision
    settings = dict(precision=precision, **backend.settings(options))
    graph = plan.graph(input_kind, decoded, backend.separate_convolutions)
    outputs = graph.post_process(plan.outputs) if graph.post_process else plan.outputs
    uint8 = backend.uint8_input and input_kind == 'image'
    input_settings = dict(
        kind=input_kind,
        letterbox=request.letterbox,
        dtype='uint8' if uint8 else 'float32',
        loader=plan.images.loader,
    )
    description = describe_file(
        plan.description,
        model,
        graph,
        outputs,
        dict(format=backend.format or backend.name, **settings, **backend.described, **described),
        input_settings,
        backend.layout,
    )
    unnamed = backend.unnamed_precision or backend.default_precision
    words = [model.name] if model.task.part == 'backbone' else [model.name, model.task.part]
    words.append('{}x{}'.format(*plan.shape))
    words += [request.outputs] if decoded else []
    words += [f'batch{request.batch}'] if request.batch > 1 else []
    words += ['center'] if request.letterbox == 'center' else []
    words += [value for value in settings.values() if value != unnamed]
    path = folder / ('_'.join(words) + backend.suffix)
    calibration = [plan.to_input(pixels, input_kind) for pixels in plan.images.calibration]
    LOGGER.info('writing %s', path.name)
    try:
        result = backend.write(graph, path, description, options, calibration)
    except ExportError:
        raise
    except Exception as error:  # converters raise their own classes
        raise ExportError(f'{backend.name} cannot convert {path.name}: {error}') from error
    description['file_sha256'] = write_hash(path)
    return ExportedFile(path, graph, description, result)


def _say_what_is_missing(plan: ExportPlan, report: Mapping[str, Any]) -> dict[str, str]:
    config, reason = plan.model.config, plan.images.why_no_pictures
    missing = {}
    if reason and config is not None:
        missing['pictures'] = f'none compared: {reason}'
    slides = report.get('slide') is not None
    if slides and not report['slide']['size']:
        missing['windows'] = (
            'padded where a picture is smaller, which mmseg computes at its own size: for equal '
            f'results, set model.data_preprocessor.test_cfg=dict(size={(*report["shape"],)})'
        )
    if padding := plan.model.task.explain_padding(config, plan.shape):
        missing['padding'] = padding
    if config is not None and report['inputs'][0]['resize'] is None and not slides:
        missing['resize'] = 'none in the test pipeline: larger pictures cannot be tested'
    resize = name_steps(config).get('Resize', {}) if config is not None else {}
    if resize.get('scale') and not resize.get('keep_ratio', False) and not slides:
        missing['resize'] = 'to fit, with the ratio kept; Resize of the test pipeline stretches'
    if plan.model.task.part == 'model' and 'classes' not in report:
        missing['names'] = 'left out: the test data do not name as many classes as the head has'
    return missing


# Names of version 1.0.
Export, prepare_export = ExportPlan, plan_export
