"""What a CARE answers to exporters, see :mod:`mmcare.deployment`."""

from __future__ import annotations

from torch import Tensor, nn

from mmcare.deployment import (
    ARCHS,
    Arch,
    BackboneInfo,
    describe_backbone,
    find_backbone,
    fuse_all,
    prepare_backbone,
)
from mmcare.models.averaged_attention import average_attention
from mmcare.models.backbones.care import CARE, TOTAL_STRIDE

__all__ = ['BackboneInfo', 'find_care', 'fuse_all']

ARCHS.update({key: Arch(f'care_{key}', dict(type=CARE, arch=key)) for key in CARE.arch_zoo})


@describe_backbone.register(CARE)
def describe_care(care: CARE) -> BackboneInfo:
    """Describe a CARE; a map is named after its stage."""
    known = (arch for arch, values in CARE.arch_zoo.items() if values == care.arch)
    return BackboneInfo(
        arch=next(known, str(care.arch)),
        in_channels=care.stem.conv.in_channels,
        output_names=tuple(f'stage{index + 1}' for index in care.out_indices),
        stride=TOTAL_STRIDE,
        first_conv='stem.conv',
        stages=r'\bstem\b|\bstages\.\d+',
    )


@prepare_backbone.register(CARE)
def prepare_care(care: CARE, image: Tensor) -> None:
    """Fuse a CARE, and let its attention compute as an average, in place."""
    care.switch_to_deploy()
    average_attention(care)


def find_care(model: nn.Module) -> tuple[str, BackboneInfo]:
    """Find the backbone of a model, and describe it; the name of version 1.0."""
    name = find_backbone(model)
    return name, describe_backbone(model.get_submodule(name))
