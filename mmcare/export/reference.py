"""Compute what files should: the outputs of the network before it was fused, in float64."""

import logging
from collections.abc import Mapping, Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn

from mmcare.export.images import CheckImage
from mmcare.export.loading import LoadedModel

LOGGER = logging.getLogger('mmcare')


class Reference:
    """Outputs for each image, computed once for all files.

    Images on which errors raise are computed in float64, since float32 loses digits of small
    ELU + 1; others in float32, which takes a fraction of the time. Networks that make tensors in
    float32 on the way run in float32: ``why_float32`` then has PyTorch's message.
    """

    def __init__(self, model: LoadedModel, images: Mapping[str, CheckImage]) -> None:
        self.model, self.images = model, images
        self.why_float32 = ''
        self._outputs: dict[str, Sequence[Tensor]] = {}
        self._network: nn.Module | None = None  # in float64

    @torch.no_grad()
    def outputs(self, name: str) -> Sequence[Tensor]:
        """Return the outputs for one of the images, as float64."""
        if name not in self._outputs:
            image, normalization = self.images[name].pixels.double(), self.model.normalization
            image = normalization.normalize(image) if normalization else image
            self._outputs[name] = self._compute(image, self.images[name].enforced)
        return self._outputs[name]

    def _compute(self, image: Tensor, in_float64: bool) -> Sequence[Tensor]:
        if in_float64 and not self.why_float32:
            try:
                if self._network is None:
                    self._network = deepcopy(self.model.task).double()
                return self._network(image)
            except RuntimeError as error:  # dtypes differ
                self.why_float32 = str(error)
                LOGGER.warning('PyTorch computes the network in float32 only: %s', error)
        return [output.double() for output in self.model.task(image.float())]
