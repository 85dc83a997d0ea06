"""Compare a written file with PyTorch, on all images and in float16 as well."""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmcare.export.backends.base import Backend, WriteResult
from mmcare.export.check import (
    FLOAT16,
    QUANTIZED_LAYERS,
    QUANTIZED_RESULTS,
    Checker,
    RunFile,
)
from mmcare.export.errors import ExportError, Float16Error
from mmcare.export.graph import Graph
from mmcare.export.plan import ExportPlan
from mmcare.export.request import ExportRequest
from mmcare.export.tasks.base import max_rel_error, of_each_image
from mmcare_runtime import Model

LOGGER = logging.getLogger('mmcare')


@dataclass(frozen=True)
class ExportedFile:
    """A file that was written but not checked yet."""

    path: Path
    graph: Graph
    description: Mapping[str, Any]
    result: WriteResult


def check_file(plan: ExportPlan, backend: Backend, file: ExportedFile) -> dict[str, Any]:
    """Compare a file with PyTorch, and return entries of its report.

    If the runtime chooses the dtype, the file is also compared in float16.
    """
    request, runtime, options = plan.request, backend.runtime, plan.request.options
    precision, cross_check = file.description['precision'], file.result.cross_check
    LOGGER.info('comparing %s with PyTorch', file.path.name)
    checker = make_checker(plan, file)
    run = open_run(backend, file)
    half, why_no_half = open_float16(backend, file.path, request)
    entries: dict[str, Any] = {}
    if backend.is_quantized(precision, options):
        name = 'sqnr_db'
        entries['calibration_images'] = len(plan.images.calibration)
        entries[name] = checker.sqnr_db(run, cross_check, file.result.cross_check_name)
        if half:
            entries[f'{name}_float16'] = checker.sqnr_db(half, run, 'float32', may_be_better=True)
        for engine, compute in file.result.engines.items():
            ratios = checker.sqnr_db(compute, run, runtime, may_be_better=True, run_name=engine)
            entries[f'{name}_{engine.lower()}'] = ratios
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
            LOGGER.info('comparing %s in float16', file.path.name)
            limit = max(FLOAT16, tolerance)
            with failures_in_float16():
                errors = checker.max_rel_errors(half, limit, f'{runtime} in float16')
            entries[f'{name}_float16'] = errors
    if why_no_half:
        entries[f'{name}_float16'] = why_no_half
    return entries


def check_results(
    plan: ExportPlan, backend: Backend, file: ExportedFile, raw_file: ExportedFile
) -> dict[str, Any]:
    """Compare a quantized file's results with those decoded from a raw file's outputs."""
    checker = make_checker(plan, file)
    run, raw_run = (open_run(backend, x) for x in (file, raw_file))

    def expected(name: str) -> list[Tensor]:
        return [torch.from_numpy(output) for output in raw_run(checker.inputs[name])]

    post_process = file.graph.post_process
    has_layers = post_process is not None and any(True for _ in post_process.parameters())
    tolerance = QUANTIZED_LAYERS if has_layers else QUANTIZED_RESULTS
    errors = checker.max_rel_errors(run, tolerance, backend.runtime, expected)
    return dict(max_rel_error=errors)


def make_checker(plan: ExportPlan, file: ExportedFile) -> Checker:
    """Gather the images that a file is compared on, and the outputs to compare it with."""
    (described,), images = file.description['inputs'], plan.images.checked
    inputs = {
        name: plan.to_input(
            torch.cat([images[x].pixels for x in plan.batch(name)]), described['kind']
        )
        for name, image in images.items()
        if described['dtype'] != 'uint8' or image.fits_bytes
    }
    post_process, is_batch = file.graph.post_process, plan.request.batch > 1
    max_error = post_process.max_error if post_process else max_rel_error

    def expected(name: str) -> Sequence[Tensor]:
        rows = map(plan.reference.outputs, plan.batch(name))
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


def open_float16(
    backend: Backend, path: Path, request: ExportRequest
) -> tuple[RunFile | None, str]:
    """Open a file in float16, or say why not; do neither if the file fixes its dtype."""
    if backend.fixes_precision:
        return None, ''
    if not request.compare_float16:
        return None, 'not compared: switched off'
    runtime = f'{backend.runtime} in float16'
    with failures_in_float16(), failures_of(runtime, path):
        opened = backend.open_float16(path)
    if opened is None:
        return None, 'not compared: nothing here computes it so'
    return as_run(opened, runtime, path), ''


def open_run(backend: Backend, file: ExportedFile) -> RunFile:
    """Open the network of a file to be run on tensors."""
    with failures_of(backend.runtime, file.path):
        opened = backend.open_network(file.path, file.description)
    return as_run(opened, backend.runtime, file.path)


def as_run(opened: Model, runtime: str, path: Path) -> RunFile:
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


@contextmanager
def failures_in_float16() -> Iterator[None]:
    """Turn an ExportError into a Float16Error, which does not say that the file is not written."""
    try:
        yield
    except ExportError as error:
        text = re.sub(r'(; \S+ is|, which is) not written', '', str(error))
        raise Float16Error(text) from error
