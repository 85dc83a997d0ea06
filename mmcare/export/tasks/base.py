"""The base class of tasks: a part of a model as a function of images, and its description."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from mmengine.config import Config
from mmengine.registry import DATASETS
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from mmcare.deployment import BackboneInfo
from mmcare.export.errors import Argument, RequestError
from mmcare.export.pipelines import inner_datasets

Shape = tuple[int, int]  # height and width
Options = Mapping[str, Any]
Description = Mapping[str, Any]  # of a file
Outputs = Sequence[Tensor]
RunImages = Callable[[Tensor], Outputs]
Substitutes = list[tuple[Any, str, Callable[..., Any]]]  # owner, method's name, what replaces it


@dataclass(frozen=True)
class OutputFormat:
    """How the users of a backend expect results."""

    # 'matrix': in the network, by matrix products; 'operator': by the backend's operator;
    # 'pipeline': in the file, after the network; 'outside': left to the app.
    nms: str = 'matrix'
    box_format: str = 'xyxy'  # or 'cxcywh'
    relative: bool = False  # boxes are shares of width and height, not pixels
    box_name: str = 'boxes'
    score_name: str = 'scores'
    labels: torch.dtype = torch.int32  # of boxes
    label_map: torch.dtype = torch.uint8
    probabilities: bool = False  # of all classes, in place of a map of labels
    with_batch: bool = False  # if NMS is left to the app, boxes have an axis for images
    with_count: bool = False  # the number of boxes is a result, as in LiteRT's own detectors

    @property
    def has_nms(self) -> bool:
        """Whether the network itself keeps the best boxes, not something that follows it."""
        return self.nms in ('matrix', 'operator')


class PostProcess(nn.Module):
    """Turn the outputs of a network, for one image or several, into results."""

    takes_batches = False  # whether it takes outputs for several images
    outputs: list[dict[str, Any]]  # of each result: name, kind and what else there is to say
    metadata: Mapping[str, Any] = {}  # for the description

    def max_error(self, raw: Outputs, results: Sequence[Any]) -> float:
        """Compare a file's results with those of the network's outputs."""
        return max_rel_error(self(raw), results)


class EachImage(PostProcess):
    """Turn the outputs of a network, for several images, into results, one image after another."""

    def __init__(self, post_process: PostProcess) -> None:
        super().__init__()
        self.post_process = post_process
        self.outputs, self.metadata = post_process.outputs, post_process.metadata

    def forward(self, raw: Outputs) -> tuple[Tensor, ...]:
        """Compute the results for each image, and concatenate them."""
        images = zip(*(x.split(1) for x in raw), strict=True)
        results = zip(*map(self.post_process, images), strict=True)
        return tuple(torch.cat(parts) for parts in results)

    def max_error(self, raw: Outputs, results: Sequence[Any]) -> float:
        """Compare the results for one image."""
        return self.post_process.max_error(raw, results)


class Task(nn.Module):
    """A part of a model as a function of normalized images; the model is set to evaluation.

    Each subclass has a file in this folder, which holds all that exporters know of its heads.

    Args:
        model: The backbone, or the whole model.
        backbone_name: Name of the backbone in the model.
        info: Describes the backbone.
    """

    part = 'model'
    summary = ''  # for messages
    head_name = ''  # attribute of the model
    has_probabilities = False  # of all classes, for the image or for each pixel
    options: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # for add_argument
    operators: tuple[str, ...] = ()  # of decoded files, which a runtime may lack
    model: Any

    def __init__(self, model: nn.Module, backbone_name: str, info: BackboneInfo) -> None:
        super().__init__()
        self.model, self.backbone_name, self.info = model, backbone_name, info
        self.eval().requires_grad_(False)

    @staticmethod
    def fits(model: nn.Module) -> bool:
        """Say whether this task fits a whole model."""
        return False

    @property
    def backbone(self) -> Any:
        """The backbone in the model."""
        return self.model.get_submodule(self.backbone_name)

    @property
    def head(self) -> Any:
        """The head of the model."""
        return getattr(self.model, self.head_name)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Map images (B, C, H, W) to maps of stages or neck, logits, or all maps of a head."""
        return find_tensors(self.model(images))

    def check_request(self, request: Any) -> None:
        """Raise a RequestError if the model cannot be exported as requested.

        Args:
            request: An :class:`mmcare.export.request.ExportRequest` with a shape.
        """
        stride, shape = self.info.stride, request.shape
        if self.pads_to_stride(shape) and any(side % stride for side in shape):
            raise RequestError(
                f'height and width must be multiples of {stride} where maps of different strides '
                f'are added up, got {shape}'
            )
        if request.outputs == 'probabilities' and not self.has_probabilities:
            outputs = Argument('outputs', 'probabilities')
            raise RequestError(outputs, ' is for classifiers and segmentors')

    def pads_to_stride(self, shape: Shape) -> bool:
        """Whether sides of images are multiples of the last stride, as maps are added up."""
        return True

    def name_outputs(self, outputs: Outputs) -> list[str]:
        """Name the outputs, in their order; raise a ValueError if they are not as expected."""
        if len(outputs) != 1:
            raise RequestError(
                f'the {type(self.head).__name__} does not predict from one map of logits: use ',
                Argument('part', 'neck'),
                ' or ',
                Argument('part', 'backbone'),
            )
        return ['logits']

    def describe(self, config: Config | None, outputs: Outputs) -> dict[str, Any]:
        """Describe how outputs are read: ``activation``, classes, and what else there is to say.

        ``activation`` is ``'softmax'``, ``'sigmoid'``, or None if that is not known.
        """
        return dict(activation=None)

    def keeps_best(self, output_format: OutputFormat) -> bool:
        """Say whether only the best results are kept, whose number options of the task set."""
        return False

    def post_process(
        self, outputs: Outputs, shape: Shape, output_format: OutputFormat, options: Options
    ) -> PostProcess:
        """Make the module that turns outputs into results, or raise a ValueError."""
        raise RequestError(
            Argument('outputs', 'decoded'),
            ' is for ',
            Argument('part', 'model'),
            f', and not for {self.summary or self.part}',
        )

    def substitutes(self, run: RunImages, description: Description, image: Tensor) -> Substitutes:
        """Say what is replaced in the model so that a file computes this part of it.

        Args:
            run: Maps normalized images to the outputs of the file.
            description: Of the file.
            image: A normalized image, for the structure of the outputs.
        """
        raise NotImplementedError

    def explain_padding(self, config: Config | None, shape: Shape) -> str:
        """Say where padding changes results that the toolbox gives without it; empty: nowhere."""
        return ''

    def centered_substitutes(self) -> Substitutes:
        """Say what is replaced in the model to move results back from the middle of the image."""
        return []


def find_tensors(outputs: Any) -> tuple[Tensor, ...]:
    """Return the tensors in what a model returns: a tensor, a list, a dictionary, ..."""
    return tuple(x for x in tree_leaves(outputs) if isinstance(x, Tensor))


def in_structure(run: RunImages, outputs: Any) -> Callable[[Tensor], Any]:
    """Let a function return its tensors as others are; the reverse of :func:`find_tensors`."""
    leaves, structure = tree_flatten(outputs)

    def restore(images: Tensor) -> Any:
        tensors = iter(run(images))
        return tree_unflatten(
            [next(tensors) if isinstance(x, Tensor) else x for x in leaves], structure
        )

    return restore


def is_of_class(instance: object, name: str) -> bool:
    """Say whether an object is of a class, or of a subclass, without importing a toolbox."""
    return any(base.__name__ == name for base in type(instance).__mro__)


def describe_classes(config: Config | None, number: int) -> dict[str, Any]:
    """Return ``classes`` and ``palette`` of the test data, if the head has as many classes."""
    if config is None or not config.get('test_dataloader'):
        return {}
    dataset, dataset_type = test_dataset(config)
    load = getattr(dataset_type, '_load_metainfo', None)  # functions have none
    metainfo = load(deepcopy(dataset.get('metainfo'))) if load else {}
    if load and dataset.get('classes'):  # mmpretrain's argument: names, or a file of names
        metainfo = load(dict(metainfo, classes=dataset.classes))
    described = {}
    for key, convert in (('classes', str), ('palette', list)):  # numbers may be names of classes
        values = metainfo.get(key) or ()
        if len(values) == number and not isinstance(values, str):
            described[key] = [convert(value) for value in values]
    return described


def test_dataset(config: Config) -> tuple[Any, Any]:
    """Return the config of the test data set, and its class, or the function that makes it."""
    dataset = inner_datasets(config.test_dataloader.dataset)[0]
    dataset_type: Any = dataset.type
    if isinstance(dataset_type, str):
        with DATASETS.switch_scope_and_registry(config.get('default_scope')) as registry:
            dataset_type = registry.get(dataset_type)
    return dataset, dataset_type


def of_each_image(
    max_error: Callable[[Outputs, Sequence[Any]], float],
) -> Callable[[Outputs, Sequence[Any]], float]:
    """Let a function that compares the results for one image compare those for several."""

    def largest(expected: Outputs, results: Sequence[Any]) -> float:
        def of_image(row: int) -> float:
            wanted, got = ([x[row : row + 1] for x in xs] for xs in (expected, results))
            return max_error(wanted, got)

        return np.max([of_image(row) for row in range(len(expected[0]))])  # not max(), see below

    return largest


def max_rel_error(expected: Sequence[Tensor], results: Sequence[Any]) -> float:
    """Return the largest error of outputs, as a share of each output's largest magnitude."""
    # Not max(): it would pass over a NaN.
    return np.max(
        [
            np.abs(wanted.numpy() - output).max() / max(wanted.abs().max().item(), 1e-30)
            for wanted, output in zip(expected, results, strict=True)
        ]
    )
