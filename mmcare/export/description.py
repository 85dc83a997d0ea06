"""Describe a file for those who run it without PyTorch; docs/description.md lists the keys."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmcare.export.graph import Graph
from mmcare.export.loading import LoadedModel
from mmcare.export.pipelines import describe_resizing
from mmcare.version import __version__
from mmcare.weights.reading import digest_weights
from mmcare_runtime.verify import NO_HASH


def describe_model(
    model: LoadedModel, shape: tuple[int, int], outputs: Sequence[Tensor]
) -> dict[str, Any]:
    """Describe a model, the same for every format.

    Args:
        model: What is exported.
        shape: Height and width of the images.
        outputs: Of the network.
    """
    task = model.task
    return dict(
        name=model.name,
        part=task.part,
        arch=task.info.arch,
        checkpoint=model.checkpoint,
        sha256=digest_weights(task.model.state_dict(), {}),
        mmcare_version=__version__,
        torch_version=str(torch.__version__),  # plain, for YAML
        shape=[*shape],
        **task.describe(model.config, outputs),
        **model.metadata,
    )


def describe_file(
    described: Mapping[str, Any],
    model: LoadedModel,
    graph: Graph,
    outputs: Sequence[Tensor],
    settings: Mapping[str, Any],
    input_settings: Mapping[str, Any],
    layout: str,
) -> dict[str, Any]:
    """Describe a file that computes a graph.

    Args:
        described: See :func:`describe_model`.
        model: What is exported.
        graph: What the file computes.
        outputs: Of the file.
        settings: ``format``, ``precision``, and what else the backend names.
        input_settings: ``kind``, ``dtype``, ``letterbox`` and ``loader`` of the input.
        layout: ``'NCHW'`` or ``'NHWC'``.
    """
    results = graph.post_process.outputs if graph.post_process else [{}] * len(outputs)
    tensors = [
        _describe_tensor(name, x, result.get('layout', layout))
        for name, x, result in zip(
            ['image', *graph.output_names], [graph.example, *outputs], [{}, *results], strict=True
        )
    ]
    shape = (graph.example.shape[2], graph.example.shape[3])
    tensors[0] |= _describe_input(model, shape, input_settings)
    metadata = dict(described, parameters=graph.parameters, file_sha256=NO_HASH)
    if graph.post_process is not None:
        metadata.pop('decode', None)
        metadata |= dict(activation=None, **graph.post_process.metadata)
        for tensor, result in zip(tensors[1:], results, strict=True):
            tensor |= result
    return {**metadata, **settings, 'inputs': tensors[:1], 'outputs': tensors[1:]}


def _describe_tensor(name: str, x: Tensor, layout: str) -> dict[str, Any]:
    if x.dim() != 4:
        return dict(name=name, shape=[*x.shape], layout=None)
    order = [0, 2, 3, 1] if layout == 'NHWC' else [0, 1, 2, 3]
    return dict(name=name, shape=[x.shape[axis] for axis in order], layout=layout)


def _describe_input(
    model: LoadedModel, shape: tuple[int, int], settings: Mapping[str, Any]
) -> dict[str, Any]:
    padding = [0.0] * model.task.info.in_channels
    described: dict[str, Any] = dict(channels=None, mean=None, std=None, padding=padding)
    if model.normalization:
        described = model.normalization.describe(settings['kind'], settings['dtype'])
    return {**described, **settings, 'resize': describe_resizing(model.config, shape)}
