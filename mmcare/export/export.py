"""Export a model to several formats, with a report on each file."""

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from mmcare.export.backends import BACKENDS
from mmcare.export.backends.base import Backend, WriteResult
from mmcare.export.check import (
    FLOAT16,
    QUANTIZED_LAYERS,
    QUANTIZED_RESULTS,
    Checker,
    ExportError,
    Run,
)
from mmcare.export.description import describe_file, describe_model
from mmcare.export.graph import Graph, build_graph
from mmcare.export.images import Images, Pictures, load_images
from mmcare.export.loading import LoadedModel
from mmcare.export.preprocessing import choose_shape, name_steps
from mmcare.export.reference import Reference
from mmcare.export.request import LARGEST_SIDE, ExportRequest, quote
from mmcare.export.tasks import OPTIONS as TASK_OPTIONS
from mmcare.export.tasks import OutputFormat, PostProcess
from mmcare.export.tasks.base import EachImage, max_rel_error, of_each_image
from mmcare.files import check_writable, moved_into_place, size_of
from mmcare_runtime import Model
from mmcare_runtime.files import write_hash

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
        out_dir: Where the files go, replacing older ones.
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
    return run_request(model, out_dir, request)


@torch.no_grad()
def run_request(
    model: LoadedModel, out_dir: str | os.PathLike, request: ExportRequest
) -> dict[str, dict[str, Any]]:
    """Write the requested files, see :func:`export_model`."""
    check_writable(Path(out_dir))
    export = prepare_export(model, request)
    reports: dict[str, dict[str, Any]] = {}
    failures: dict[str, Exception] = {}
    for index, backend in enumerate(request.backends, 1):
        LOGGER.info('%d/%d %s: started', index, len(request.backends), backend.name)
        start = perf_counter()
        try:
            with TemporaryDirectory() as folder:
                report = export_format(export, backend, Path(folder))
                text = json.dumps(report, indent=2, allow_nan=False)
                Path(folder, f'{report["file"]}.json').write_text(f'{text}\n')
                for name in (report['file'], f'{report["file"]}.json'):
                    with moved_into_place(Path(out_dir, name)) as temporary:
                        shutil.move(Path(folder, name), temporary)
        except ExportError as error:
            failures[backend.name] = error
            LOGGER.info('%s failed: %s', backend.name, error)
            continue
        reports[backend.name] = report
        checked = report.get('sqnr_db') or dict(max_rel_error=report['max_rel_error']['random'])
        size, seconds = report['bytes'] / 1e6, perf_counter() - start
        LOGGER.info('%s: %.1f MB, checked: %s, %.0f s', report['file'], size, checked, seconds)
    if failures:
        failed = ExportError('; '.join(map(str, failures.values())))
        failed.reports = reports
        raise failed from next(iter(failures.values()))
    return reports


@dataclass(frozen=True, eq=False)
class Export:
    """What all formats have in common."""

    model: LoadedModel
    request: ExportRequest
    shape: tuple[int, int]
    images: Images
    reference: Reference
    outputs: Sequence[Tensor]  # of the network, for a batch
    output_names: Sequence[str]
    description: Mapping[str, Any]  # of the model

    def choose_output_format(self, backend: Backend) -> OutputFormat | None:
        """Choose how files give results; return None if they have the network's outputs."""
        outputs = self.request.outputs
        if outputs == 'raw':
            return None
        output_format = backend.choose_output_format(self.request.options)
        return replace(output_format, probabilities=outputs == 'probabilities')

    def post_process(self, output_format: OutputFormat) -> PostProcess:
        """Return the module that turns outputs into results."""
        options, batch = self.request.options, self.request.batch
        post_process = self.model.task.post_process(
            self.outputs, self.shape, output_format, options
        )
        is_single = batch > 1 and not post_process.takes_batches
        return EachImage(post_process) if is_single else post_process

    @cached_property
    def graph(self) -> Callable[[str, OutputFormat | None, bool], Graph]:
        """Return :meth:`build_graph` with a cache, since formats share what files compute."""
        return cache(self.build_graph)

    def build_graph(
        self, input_kind: str, output_format: OutputFormat | None, separate_convolutions: bool
    ) -> Graph:
        """Build what files compute; raw outputs if there is no output format."""
        return build_graph(
            self.model,
            self.shape,
            self.model.normalization if input_kind == 'image' else None,
            self.output_names,
            self.post_process(output_format) if output_format else None,
            separate_convolutions,
            self.request.batch,
        )

    def batch(self, name: str) -> list[str]:
        """Name the images of a batch: first the image ``name``, then enforced images."""
        images = self.images.checked
        others = [other for other in images if images[other].enforced and other != name]
        return [*islice(cycle([name, *others]), self.request.batch)]

    def to_input(self, pixels: Tensor, input_kind: str) -> Tensor:
        """Turn pixels into what files take."""
        normalization = self.model.normalization
        if input_kind == 'image' or normalization is None:
            return pixels
        return normalization.normalize(pixels)


def prepare_export(model: LoadedModel, request: ExportRequest) -> Export:
    """Compare a request with the model, and compute what all formats need.

    Raises:
        ValueError: If the model cannot be exported as requested.
    """
    task, normalization = model.task, model.normalization
    shape, reason = (request.shape, '') if request.shape else choose_shape(model.config)
    if reason:
        LOGGER.info('images of height %d and width %d: %s', *shape, reason)
    stride, channels = task.info.stride, task.info.in_channels
    if not all(stride <= side <= LARGEST_SIDE for side in shape):
        raise ValueError(f'height and width must be {stride} to {LARGEST_SIDE} pixels, got {shape}')
    takes_pixels = any(request.input_kind_of(backend) == 'image' for backend in request.backends)
    if takes_pixels:
        if normalization is None:
            raise ValueError("the config has no mean and std of images: use input_kind='tensor'")
        if not channels == len(normalization.mean) == 3:
            raise ValueError(
                f"images have 3 channels, the network {channels}: use input_kind='tensor'"
            )
    task.check_shape(shape)
    task.check_outputs(request.outputs)
    if request.letterbox == 'center':
        task.check_centered()
    try:
        outputs = task(torch.zeros(1, channels, *shape))
    except RuntimeError as error:
        raise ValueError(f'the network cannot compute images of {shape}: {error}') from error
    names = task.name_outputs(outputs)
    outputs = [output.repeat_interleave(request.batch, 0) for output in outputs]
    if 'nms' in request.options and not task.keeps_best(OutputFormat()):
        raise ValueError(f'nms= is not for {task.summary or task.part}')
    for name in request.options.keys() & TASK_OPTIONS.keys():
        if name not in task.options:
            raise ValueError(f'{name}= is not for {task.summary or task.part}')
        able = [
            backend.name
            for backend in BACKENDS.values()
            if task.keeps_best(backend.choose_output_format(request.options))
        ]
        if not {*able} & {*request.formats}:
            raise ValueError(f'{name}= is for formats={quote(able)}')
    number = request.number_of_calibration_images
    images = load_images(model, shape, number, request.images, request.letterbox)
    bits = images.loader['bits'] or 'an unknown number of'
    if takes_pixels and bits != 8:
        raise ValueError(
            f"input_kind='image' takes bytes, and pictures have {bits} bits: use "
            "input_kind='tensor'"
        )
    reference = Reference(model, images.checked)
    description = describe_model(model, shape, outputs)
    export = Export(model, request, shape, images, reference, outputs, names, description)
    for backend in request.backends:
        output_format = export.choose_output_format(backend)
        if output_format:
            export.post_process(output_format)  # raises an error before files are written
    return export


def export_format(export: Export, backend: Backend, folder: Path) -> dict[str, Any]:
    """Write a file into a folder, check it, and return its report.

    Raises:
        ExportError: If the file cannot be converted, or computes something other than PyTorch.
    """
    options = export.request.options
    decoded = export.choose_output_format(backend)
    file = write_file(export, backend, decoded, folder)
    precision, path = file.description['precision'], file.path
    report = dict(file=path.name, bytes=size_of(path), **file.description)
    if decoded and backend.is_quantized(precision, options):
        # Results have no signal-to-noise ratio: a second file has the raw outputs.
        with TemporaryDirectory() as raw_folder:
            raw_file = write_file(export, backend, None, Path(raw_folder))
            report |= check_file(export, backend, raw_file)
            report |= check_results(export, backend, file, raw_file)
    else:
        report |= check_file(export, backend, file)
    if export.reference.why_float32:
        report['reference'] = f'computed in float32: {export.reference.why_float32}'
    return report | dict(file.result.facts) | _say_what_is_missing(export, report)


@dataclass(frozen=True)
class ExportedFile:
    """A file that was written but not checked yet."""

    path: Path
    graph: Graph
    description: Mapping[str, Any]
    result: WriteResult


def write_file(
    export: Export, backend: Backend, decoded: OutputFormat | None, folder: Path
) -> ExportedFile:
    """Write a file of a backend into a folder, with raw outputs or decoded ones."""
    request, options, model = export.request, export.request.options, export.model
    input_kind = request.input_kind_of(backend)
    precision = backend.choose_precision(request.precision, options)
    settings = dict(precision=precision, **backend.settings(options))
    graph = export.graph(input_kind, decoded, backend.separate_convolutions)
    outputs = graph.post_process(export.outputs) if graph.post_process else export.outputs
    uint8 = backend.uint8_input and input_kind == 'image'
    input_settings = dict(
        kind=input_kind,
        letterbox=request.letterbox,
        dtype='uint8' if uint8 else 'float32',
        loader=export.images.loader,
    )
    description = describe_file(
        export.description,
        model,
        graph,
        outputs,
        dict(format=backend.name, **settings),
        input_settings,
        backend.layout,
    )
    default = next(iter(backend.precisions))
    words = [model.name] if model.task.part == 'backbone' else [model.name, model.task.part]
    words.append('{}x{}'.format(*export.shape))
    words += [request.outputs] if decoded else []
    words += [f'batch{request.batch}'] if request.batch > 1 else []
    words += ['center'] if request.letterbox == 'center' else []
    words += [value for value in settings.values() if value != default]
    path = folder / ('_'.join(words) + backend.suffix)
    calibration = [export.to_input(pixels, input_kind) for pixels in export.images.calibration]
    try:
        result = backend.write(graph, path, description, options, calibration)
    except ExportError:
        raise
    except Exception as error:  # converters raise their own classes
        raise ExportError(f'{backend.name} cannot convert {path.name}: {error}') from error
    description['file_sha256'] = write_hash(path)
    return ExportedFile(path, graph, description, result)


def check_file(export: Export, backend: Backend, file: ExportedFile) -> dict[str, Any]:
    """Compare a file with PyTorch, and return entries of its report.

    If the runtime chooses the dtype, the file is also compared in float16.
    """
    request, runtime, options = export.request, backend.runtime, export.request.options
    precision, cross_check = file.description['precision'], file.result.cross_check
    checker = make_checker(export, file)
    run = open_run(backend, file.path)
    half, why_no_half = open_float16(backend, file.path, request)
    entries: dict[str, Any] = {}
    if backend.is_quantized(precision, options):
        name = 'sqnr_db'
        entries['calibration_images'] = len(export.images.calibration)
        entries[name] = checker.sqnr_db(run, cross_check, file.result.cross_check_name)
        if half:
            entries[f'{name}_float16'] = checker.sqnr_db(half, run, 'float32', may_be_better=True)
    else:
        name = 'max_rel_error'
        tolerance = request.tolerance
        if tolerance is None:
            tolerance = backend.precisions[precision]
        assert tolerance is not None, 'others are quantized'
        if cross_check:
            checker.max_rel_errors(cross_check, tolerance, file.result.cross_check_name)
        entries[name] = checker.max_rel_errors(run, tolerance, runtime)
        if half:
            limit = max(FLOAT16, tolerance)
            errors = checker.max_rel_errors(half, limit, f'{runtime} in float16')
            entries[f'{name}_float16'] = errors
    if why_no_half:
        entries[f'{name}_float16'] = why_no_half
    return entries


def check_results(
    export: Export, backend: Backend, file: ExportedFile, raw_file: ExportedFile
) -> dict[str, Any]:
    """Compare a quantized file's results with those decoded from a raw file's outputs."""
    checker = make_checker(export, file)
    run, raw_run = (open_run(backend, x.path) for x in (file, raw_file))

    def expected(name: str) -> list[Tensor]:
        return [torch.from_numpy(output) for output in raw_run(checker.inputs[name])]

    post_process = file.graph.post_process
    has_layers = post_process is not None and any(True for _ in post_process.parameters())
    tolerance = QUANTIZED_LAYERS if has_layers else QUANTIZED_RESULTS
    errors = checker.max_rel_errors(run, tolerance, backend.runtime, expected)
    return dict(max_rel_error=errors)


def make_checker(export: Export, file: ExportedFile) -> Checker:
    """Gather the images that a file is compared on, and the outputs to compare it with."""
    (described,), images = file.description['inputs'], export.images.checked
    inputs = {
        name: export.to_input(
            torch.cat([images[x].pixels for x in export.batch(name)]), described['kind']
        )
        for name, image in images.items()
        if described['dtype'] != 'uint8' or image.fits_bytes
    }
    post_process, is_batch = file.graph.post_process, export.request.batch > 1
    max_error = post_process.max_error if post_process else max_rel_error

    def expected(name: str) -> Sequence[Tensor]:
        rows = map(export.reference.outputs, export.batch(name))
        outputs = [torch.cat(parts) for parts in zip(*rows, strict=True)]
        return [output.float() for output in outputs] if post_process else outputs

    return Checker(
        file.path.name,
        inputs,
        enforced=[name for name in inputs if images[name].enforced],
        pictures=[name for name in inputs if images[name].is_picture] or ['smooth'],
        expected=expected,
        max_error=of_each_image(max_error) if is_batch else max_error,
        output_names=file.graph.output_names,
    )


def open_float16(backend: Backend, path: Path, request: ExportRequest) -> tuple[Run | None, str]:
    """Open a file in float16, or say why not; do neither if the file fixes its dtype."""
    if backend.fixes_precision(request.options):
        return None, ''
    if not request.compare_float16:
        return None, 'not compared: switched off'
    runtime = f'{backend.runtime} in float16'
    with failures_of(runtime, path):
        opened = backend.open_float16(path)
    if opened is None:
        return None, 'not compared: nothing here computes it so'
    return as_run(opened, runtime, path), ''


def open_run(backend: Backend, path: Path) -> Run:
    """Open a file to be run on tensors."""
    with failures_of(backend.runtime, path):
        opened = backend.open(path)
    return as_run(opened, backend.runtime, path)


def as_run(opened: Model, runtime: str, path: Path) -> Run:
    """Let an open file take tensors."""

    def run(image: Tensor) -> Sequence[Any]:
        with failures_of(runtime, path):
            return opened.run(image.numpy())

    return run


@contextmanager
def failures_of(runtime: str, path: Path) -> Iterator[None]:
    """Turn whatever a runtime raises into an ExportError that names the runtime."""
    try:
        yield
    except Exception as error:  # runtimes raise their own classes
        text = ' '.join(str(error).split())
        message = f'{runtime} cannot compute {path.name}, which is not written: {text}'
        raise ExportError(message) from error


def _say_what_is_missing(export: Export, report: Mapping[str, Any]) -> dict[str, str]:
    config, reason = export.model.config, export.images.why_no_pictures
    missing = {}
    if reason and config is not None:
        missing['pictures'] = f'none compared: {reason}'
    slides = report.get('slide') is not None
    if config is not None and report['inputs'][0]['resize'] is None and not slides:
        missing['resize'] = 'none in the test pipeline: larger pictures cannot be tested'
    resize = name_steps(config).get('Resize', {}) if config is not None else {}
    if resize.get('scale') and not resize.get('keep_ratio', False) and not slides:
        missing['resize'] = 'to fit, with the ratio kept; Resize of the test pipeline stretches'
    if export.model.task.part == 'model' and 'classes' not in report:
        missing['names'] = 'left out: the test data do not name as many classes as the head has'
    return missing
