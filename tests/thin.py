"""A CARE with one narrow block a stage, which exports within a second."""

import torch
from torch import nn

from mmcare.deploy.source import IMAGENET, Source
from mmcare.models import CARE

THIN = dict(
    depths=(1, 1, 1, 1),
    widths=(12, 12, 24, 24),
    memory_widths=(4, 4, 8, 8),
    expansions=((2, 2), (2, 3), (3, 2), (2, 4)),
    head_channels=(4, 4, 8, 8),
)


def thin_source(**arguments) -> Source:
    """With running statistics and layer scales that show in the results if folding loses them."""
    torch.manual_seed(3)
    backbone = CARE(THIN, layer_scale_init_value=0.3, **arguments).eval().requires_grad_(False)
    for module in backbone.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return Source('thin', 'thin', backbone, 'random', IMAGENET)
