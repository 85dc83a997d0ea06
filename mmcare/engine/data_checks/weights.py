"""Checks of the weights from which a CARE starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from mmcare.engine.data_checks.findings import Warn
from mmcare.models import CARE
from mmcare.models.loading import pretrained_cfgs

# COCO has 118,287 pictures, and MM's recipes train on it from scratch for 72 epochs and more.
FEW = 100_000
# Ten times the published start. Adam moves a layer scale past it in ten steps at a rate of 1e-6.
UNTRAINED = 1e-5


def check_layer_scale(model: nn.Module, dataset: Any) -> Iterator[Warn]:
    """Find layer scales that start at the published 1e-6 although there are few pictures."""
    for name, module in model.named_modules():
        if not isinstance(module, CARE):
            continue
        gammas = [
            value.detach().abs().max()
            for key, value in module.named_parameters()
            if key.endswith('.gamma') and value.numel()  # FSDP's parts may be empty
        ]
        if gammas and max(gammas) < UNTRAINED and len(dataset) < FEW:
            yield Warn(
                f'{name or "the CARE"} has random weights and layer scales of {max(gammas):.0e}, '
                f'which is the start for 300 epochs of ImageNet, and the data are {len(dataset):,} '
                'pictures: load weights by init_cfg or load_from, or set from_scratch=True, see '
                'mmcare.CARE'
            )


def check_frozen(model: nn.Module) -> Iterator[Warn]:
    """Find stages of random weights that are frozen, in a run that has loaded no file."""
    filled = [name for name, module in model.named_modules() if pretrained_cfgs(module)]
    for name, module in model.named_modules():
        if not isinstance(module, CARE) or module.frozen_stages < 0:
            continue
        if not any(f'{name}.'.startswith(part and f'{part}.') for part in filled):
            yield Warn(
                f'{name or "the CARE"} has frozen_stages={module.frozen_stages}, and no file has '
                'been loaded: its random weights would stay. Load weights by init_cfg or '
                'load_from, or set frozen_stages=-1'
            )
