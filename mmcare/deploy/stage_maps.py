"""The backbone as a graph for export: no checks, and sizes settled beforehand."""

import math
from copy import deepcopy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmcare.models import CARE
from mmcare.models.backbones.care import STEM_STRIDE, TOTAL_STRIDE
from mmcare.models.layers import FoldedLinearAttention, LocalLearner, merge_local_kernels


@dataclass(frozen=True)
class Normalization:
    """How images become the network's input: (pixel - mean) / std, each channel by itself.

    Attributes:
        mean, std: Of pixels from 0 to 255, in the network's order of channels.
        channels: That order, ``'RGB'`` or ``'BGR'``.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    channels: str


class StageMaps(nn.Module):
    """Stage outputs of a backbone for images of one size, or of sizes that 32 divides.

    Args:
        backbone: In evaluation mode; it is copied.
        shape: Height and width of the images. None: multiples of 32.
        normalization: Images have pixels from 0 to 255. Normalisation goes into the stem's
            convolution; where images are padded, with the zeros of normalised pixels, it comes
            before the padding instead. None: images are normalised already.
    """

    def __init__(
        self,
        backbone: CARE,
        shape: tuple[int, int] | None,
        normalization: Normalization | None = None,
    ) -> None:
        super().__init__()
        self.backbone = deepcopy(backbone)
        self.names = tuple(f'stage{index + 1}' for index in backbone.out_indices)
        height, width = shape or (TOTAL_STRIDE, TOTAL_STRIDE)
        self.padding = (0, -width % TOTAL_STRIDE, 0, -height % TOTAL_STRIDE)
        self.sizes = {
            index: tuple(math.ceil(side / (STEM_STRIDE * 2**index)) for side in (height, width))
            for index in backbone.out_indices
        }
        self.normalize: nn.Module = nn.Identity()
        if normalization is not None:
            if any(self.padding):
                self.normalize = Normalize(normalization)
            else:
                _fold_normalization(self.backbone, normalization)
        self.eval()

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """Map images (B, C, H, W) to the backbone's outputs."""
        image = self.normalize(image)
        padded = any(self.padding)
        state = self.backbone.stem(F.pad(image, self.padding) if padded else image)
        outputs = []
        for index, stage in enumerate(self.backbone.stages):
            state = stage(state)
            if index in self.sizes:
                norms = self.backbone.out_norms
                output = norms[str(index)](state) if norms else state
                height, width = self.sizes[index]
                outputs.append(output[..., :height, :width] if padded else output)
        return tuple(outputs)


class Normalize(nn.Module):
    """(pixel - mean) / std, each channel by itself.

    Args:
        normalization: Mean and deviation.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, normalization: Normalization) -> None:
        super().__init__()
        mean, std = torch.tensor([normalization.mean, normalization.std])[:, :, None, None]
        self.register_buffer('scale', 1 / std)
        self.register_buffer('shift', -mean / std)

    def forward(self, image: Tensor) -> Tensor:
        """Map images (B, C, H, W) of pixels to normalised ones."""
        return image * self.scale + self.shift


def _fold_normalization(backbone: CARE, normalization: Normalization) -> None:
    """Let the stem's convolution, which pads nothing, take pixels instead of normalised ones."""
    conv = next(module for module in backbone.stem.modules() if isinstance(module, nn.Conv2d))
    mean, std = (
        torch.tensor(values, dtype=torch.float64)[:, None, None]
        for values in (normalization.mean, normalization.std)
    )
    weight = conv.weight.double() / std
    assert conv.bias is not None, 'CARE gives each convolution a bias'
    bias = conv.bias.double() - (weight * mean).sum((1, 2, 3))
    conv.weight = nn.Parameter(weight.to(conv.weight), requires_grad=False)
    conv.bias = nn.Parameter(bias.to(conv.bias), requires_grad=False)


def use_few_operators(backbone: CARE) -> None:
    """Merge 3x3 and 7x7 kernels of stages 3 and 4, in place, for accelerators.

    Their maps are small: 0.35 % more multiply-adds (S0 at 512x512) for one operator less a block.
    In stages 1 and 2 it would cost more than in the two others together.
    """
    for stage in backbone.stages[2:]:
        for module in list(stage.modules()):
            for name, child in module.named_children():
                if isinstance(child, LocalLearner):
                    setattr(module, name, merge_local_kernels(child))


def use_float16_attention(backbone: CARE) -> None:
    """Keep the products of a folded backbone's attention in float16's range, in place."""
    for module in backbone.modules():
        if isinstance(module, FoldedLinearAttention):
            module.float16_only = True
