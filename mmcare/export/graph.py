"""What a file computes: a network changed step by step, from its input to its outputs."""

import logging
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from mmcare.deployment import BackboneInfo, fuse_all, prepare_backbone
from mmcare.export import rewrites
from mmcare.export.loading import LoadedModel, Normalization
from mmcare.export.tasks import PostProcess

LOGGER = logging.getLogger('mmcare')


@dataclass(frozen=True)
class Graph:
    """A network that maps a file's input to the file's outputs."""

    network: nn.Module
    example: Tensor  # an input (B, C, H, W)
    output_names: Sequence[str]
    info: BackboneInfo
    parameters: int  # of the fused network
    post_process: PostProcess | None = None  # the network's last part

    @cached_property
    def program(self) -> ExportedProgram:
        """The network as a program of torch.export."""
        LOGGER.info('tracing the network')
        return rewrites.export_program(self.network, self.example)


def build_graph(
    model: LoadedModel,
    shape: tuple[int, int],
    normalization: Normalization | None,
    output_names: Sequence[str],
    post_process: PostProcess | None,
    separate_convolutions: bool,
    batch: int = 1,
) -> Graph:
    """Change a copy of a network step by step.

    Args:
        model: The model, which is not changed.
        shape: Height and width of the images.
        normalization: Normalizes pixels inside the network. None: the network takes normalized
            images.
        output_names: Names of the network's outputs.
        post_process: Turns these outputs into results; None: files have the outputs themselves.
        separate_convolutions: Whether modules that share a convolution get a copy each.
        batch: Number of images.
    """
    info = model.task.info
    example = torch.zeros(batch, info.in_channels, *shape)
    network: Any = deepcopy(model.task)
    fuse_all(network)
    prepare_backbone(network.backbone, example[:1])
    parameters = sum(parameter.numel() for parameter in network.parameters())
    rewrites.use_matrix_pools(network, example)
    rewrites.fix_encodings(network, example)
    if separate_convolutions:
        rewrites.separate_convolutions(network)
    if normalization is not None:
        pads = any(side % info.stride for side in shape)
        first_conv = None if pads else info.first_conv
        mean, std = normalization.mean, normalization.std
        network = rewrites.normalize_inside(network, mean, std, first_conv)
    if post_process is not None:
        network = nn.Sequential(network, post_process)
        output_names = [output['name'] for output in post_process.outputs]
    return Graph(network, example, output_names, info, parameters, post_process)
