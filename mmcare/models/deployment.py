"""What exporters need to know of a network: how it is fused, and how its backbone is built."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from mmcare.models.backbones.care import CARE, TOTAL_STRIDE


@dataclass(frozen=True)
class BackboneInfo:
    """What an exporter needs to know of a backbone."""

    arch: str = ''  # its name, or its values
    in_channels: int = 3
    output_names: tuple[str, ...] = ()
    stride: int = TOTAL_STRIDE  # of the last map
    first_conv: str | None = None  # has no padding, so the images' normalization can be fused
    stages: str = r'(?!)'  # regular expression for the stage in the name of a module


def find_care(model: nn.Module) -> tuple[str, BackboneInfo]:
    """Find the CARE in a model, and return its name in the model and what is known of it.

    Raises:
        ValueError: If the model does not hold exactly one CARE.
    """
    cares = [(name, module) for name, module in model.named_modules() if isinstance(module, CARE)]
    if len(cares) != 1:
        kind = type(model).__name__
        raise ValueError(f'the {kind} must hold exactly one CARE, it holds {len(cares)}')
    ((name, care),) = cares
    known = (arch for arch, values in CARE.arch_zoo.items() if values == care.arch)
    info = BackboneInfo(
        arch=next(known, str(care.arch)),
        in_channels=care.stem.conv.in_channels,
        output_names=tuple(f'stage{index + 1}' for index in care.out_indices),
        first_conv='stem.conv',
        stages=r'\bstem\b|\bstages\.\d+',
    )
    return name, info


def fuse_all(module: nn.Module) -> None:
    """Fuse a module or, if it has no ``switch_to_deploy``, the outermost modules within that do."""
    switch_to_deploy = getattr(module, 'switch_to_deploy', None)
    if switch_to_deploy is not None:
        switch_to_deploy()
        return
    for child in module.children():
        fuse_all(child)
