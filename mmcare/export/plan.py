"""What all formats of an export have in common, computed once."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor

from mmcare.export.backends import BACKENDS
from mmcare.export.backends.base import Backend
from mmcare.export.description import describe_model
from mmcare.export.errors import Argument, RequestError
from mmcare.export.graph import Graph, build_graph
from mmcare.export.images import Images, load_images
from mmcare.export.loading import LoadedModel
from mmcare.export.pipelines import choose_shape
from mmcare.export.reference import Reference
from mmcare.export.request import LARGEST_SIDE, ExportRequest, name_formats
from mmcare.export.tasks import OPTIONS as TASK_OPTIONS
from mmcare.export.tasks import OutputFormat, PostProcess, Task
from mmcare.export.tasks.base import EachImage

LOGGER = logging.getLogger('mmcare')


@dataclass(frozen=True, eq=False)
class ExportPlan:
    """What all formats have in common."""

    model: LoadedModel
    request: ExportRequest  # with a shape
    shape: tuple[int, int]
    images: Images
    reference: Reference
    outputs: Sequence[Tensor]  # of the network, for a batch
    output_names: Sequence[str]
    description: Mapping[str, Any]  # of the model
    graphs: dict[Any, Graph] = field(default_factory=dict)  # what was built already

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

    def graph(
        self, input_kind: str, output_format: OutputFormat | None, separate_convolutions: bool
    ) -> Graph:
        """Build what files compute, with raw outputs if there is no output format.

        Formats share graphs: each is built once.
        """
        key = input_kind, output_format, separate_convolutions
        if key not in self.graphs:
            self.graphs[key] = build_graph(
                self.model,
                self.shape,
                self.model.normalization if input_kind == 'image' else None,
                self.output_names,
                self.post_process(output_format) if output_format else None,
                separate_convolutions,
                self.request.batch,
            )
        return self.graphs[key]

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


def plan_export(model: LoadedModel, request: ExportRequest) -> ExportPlan:
    """Compare a request with the model, and compute what all formats need.

    Raises:
        ValueError: If the model cannot be exported as requested.
    """
    LOGGER.info('preparing %s', model.name)
    task = model.task
    stride = task.info.stride
    shape = request.shape
    if shape is None:
        shape, reason = choose_shape(model.config, 1)
        if task.pads_to_stride(shape):
            shape, reason = choose_shape(model.config, stride)
        LOGGER.info('images of height %d and width %d: %s', *shape, reason)
    if not all(stride <= side <= LARGEST_SIDE for side in shape):
        raise RequestError(
            f'height and width must be {stride} to {LARGEST_SIDE} pixels, got {shape}'
        )
    takes_pixels = any(request.input_kind_of(backend) == 'image' for backend in request.backends)
    if takes_pixels:
        _check_pixels(model)
    if model.normalization and len(model.normalization.mean) != task.info.in_channels:
        means = len(model.normalization.mean)
        raise RequestError(
            f"the config's mean has {means} values, the network {task.info.in_channels} channels"
        )
    request = replace(request, shape=shape)
    task.check_request(request)
    outputs = _compute(task, shape)
    names = task.name_outputs(outputs)
    outputs = [output.repeat_interleave(request.batch, 0) for output in outputs]
    _check_options(task, request)
    number = request.number_of_calibration_images
    images = load_images(model, shape, number, request.images, request.letterbox)
    bits = images.loader['bits'] or 'an unknown number of'
    if takes_pixels and bits != 8:
        raise RequestError(
            Argument('input_kind', 'image'),
            f' takes bytes, and pictures have {bits} bits: use ',
            Argument('input_kind', 'tensor'),
        )
    reference = Reference(model, images.checked)
    description = describe_model(model, shape, outputs)
    plan = ExportPlan(model, request, shape, images, reference, outputs, names, description)
    for backend in request.backends:
        output_format = plan.choose_output_format(backend)
        if output_format is None:
            continue
        if lacking := [name for name in task.operators if name in backend.lacks]:
            raise RequestError(
                f'{backend.name} has neither {" nor ".join(lacking)}, which {task.summary} need: '
                'use ',
                Argument('part', 'neck'),
                ', or leave out the format',
            )
        plan.post_process(output_format)  # raises an error before files are written
    return plan


def _check_pixels(model: LoadedModel) -> None:
    """Raise a RequestError if files of a model cannot take pixels."""
    channels, tensor = model.task.info.in_channels, Argument('input_kind', 'tensor')
    if model.normalization is None:
        raise RequestError('the config has no mean and std of images: use ', tensor)
    if not channels == len(model.normalization.mean) == 3:
        raise RequestError(f'images have 3 channels, the network {channels}: use ', tensor)


def _compute(task: Task, shape: tuple[int, int]) -> Sequence[Tensor]:
    """Compute an image, or raise a RequestError that says why that is not possible."""
    try:
        return task(torch.zeros(1, task.info.in_channels, *shape))
    except Exception as error:  # networks of others raise anything
        size = getattr(task.backbone, 'img_size', None)
        fixed = f'; the img_size of its backbone is {size}' if size else ''
        text = f'the network cannot compute images of {shape}{fixed}: {error}'
        raise RequestError(text) from error


def _check_options(task: Task, request: ExportRequest) -> None:
    """Raise a RequestError if an option is not for the task, or not for these formats with it."""
    summary = task.summary or task.part
    for name in request.options.keys() & {'nms', *TASK_OPTIONS}:
        known = task.keeps_best(OutputFormat()) if name == 'nms' else name in task.options
        if not known:
            raise RequestError(Argument(name), f' is not for {summary}')
    for name in request.options.keys() & TASK_OPTIONS.keys():
        able = [
            backend
            for backend in BACKENDS.values()
            if task.keeps_best(backend.choose_output_format(request.options))
        ]
        if not {*able} & {*request.backends}:
            raise RequestError(Argument(name), ' is for ', name_formats(able))
