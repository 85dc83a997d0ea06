"""Maps of a backbone, or of a backbone and a neck."""

from typing import Any

from torch import Tensor

from mmcare.export.errors import Argument, RequestError
from mmcare.export.tasks.base import (
    Description,
    Outputs,
    RunImages,
    Shape,
    Substitutes,
    Task,
    find_tensors,
    in_structure,
)


class Backbone(Task):
    """The maps of a backbone, which pads images itself."""

    part = 'backbone'

    def pads_to_stride(self, shape: Shape) -> bool:
        """Return False: the backbone pads images itself."""
        return False

    def name_outputs(self, outputs: Outputs) -> list[str]:
        """Return the names that the backbone's description has."""
        return [*self.info.output_names]

    def check_request(self, request: Any) -> None:
        """Raise a RequestError for pictures in the middle of the image: the app prepares them."""
        super().check_request(request)
        if request.letterbox == 'center':
            raise RequestError(
                Argument('letterbox', 'center'), ' is for ', Argument('part', 'model')
            )

    def substitutes(self, run: RunImages, description: Description, image: Tensor) -> Substitutes:
        """Replace the backbone."""
        return [(self.backbone, 'forward', in_structure(run, self.backbone(image)))]


class Neck(Backbone):
    """The maps of a neck: the model's ``extract_feat``."""

    part = 'neck'

    def pads_to_stride(self, shape: Shape) -> bool:
        """Return True: a neck adds up maps."""
        return True

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Map images (B, C, H, W) to the maps."""
        return find_tensors(self.model.extract_feat(images))

    def name_outputs(self, outputs: Outputs) -> list[str]:
        """Name the maps ``neck1``, ..."""
        return [f'neck{index + 1}' for index in range(len(outputs))]

    def substitutes(self, run: RunImages, description: Description, image: Tensor) -> Substitutes:
        """Replace backbone and neck."""
        return [(self.model, 'extract_feat', in_structure(run, self.model.extract_feat(image)))]
