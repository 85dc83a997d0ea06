"""What files should compute: the outputs of the network before it was fused, in float64."""

from collections.abc import Mapping, Sequence
from copy import deepcopy

import torch
from torch import Tensor

from mmcare.export.images import CheckImage
from mmcare.export.loading import LoadedModel


class Reference:
    """Outputs for each image, computed once for all files.

    They are computed in float64, since float32 loses digits of small ELU + 1.
    """

    def __init__(self, model: LoadedModel, images: Mapping[str, CheckImage]) -> None:
        self.model, self.images = model, images
        self._outputs: dict[str, Sequence[Tensor]] = {}

    @torch.no_grad()
    def outputs(self, name: str) -> Sequence[Tensor]:
        """Return the outputs for one of the images, as float64."""
        if name not in self._outputs:
            image, normalization = self.images[name].pixels.double(), self.model.normalization
            image = normalization.normalize(image) if normalization else image
            self._outputs[name] = deepcopy(self.model.task).double()(image)
        return self._outputs[name]
