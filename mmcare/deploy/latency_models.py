"""CARE and its peers as backbones with four maps, folded, with random weights."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from mmcare.deploy.latency_folding import fold_batch_norms
from mmcare.deploy.latency_peers import Contender
from mmcare.deploy.requirements import require
from mmcare.deploy.source import load_source
from mmcare.deploy.stage_maps import StageMaps

PURPOSE = 'the latency benchmark'
EXTRA = 'bench'
STRIDES = (4, 8, 16, 32)
# Beginnings of the names of timm's models whose attention is built for one size of image.
BUILT_FOR_A_SIZE = ('efficientformerv2', 'swin_')


class FourMaps(nn.Module):
    """The maps of strides 4, 8, 16 and 32 of a feature extractor of timm.

    Args:
        features: Made with ``features_only=True``. A map of stride 2, which some have in front,
            is on the way to the others and costs nothing; it is not put out.

    Raises:
        ValueError: If a stride is missing.
    """

    def __init__(self, features: nn.Module) -> None:
        super().__init__()
        self.features = features
        info: Any = features.feature_info
        reductions = list(info.reduction())
        if not set(STRIDES) <= set(reductions):
            raise ValueError(f'maps of strides {STRIDES} are needed, there are {reductions}')
        self.positions = [reductions.index(stride) for stride in STRIDES]
        self.channels_last = getattr(features, 'output_fmt', 'NCHW') == 'NHWC'

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """Map images (B, 3, H, W) to four maps (B, C, H / stride, W / stride)."""
        maps = self.features(image)
        chosen = [maps[position] for position in self.positions]
        if self.channels_last:
            chosen = [one.permute(0, 3, 1, 2) for one in chosen]
        return tuple(chosen)


def build_four_maps(contender: Contender, shape: tuple[int, int]) -> nn.Module:
    """Build a network in evaluation mode, folded as far as it can be.

    CARE is folded by ``switch_to_deploy``, peers by timm's ``reparameterize_model`` (MobileOne,
    FastViT, RepViT); batch norms that are left behind convolutions go into these.

    Args:
        contender: What to build. Weights are random, from one seed: nothing is downloaded.
        shape: Height and width of the images.

    Returns:
        A module that maps images (B, 3, H, W) to four maps.

    Raises:
        ImportError: If it is a peer and timm is not installed.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if contender.timm_model:
            network = _build_peer(contender.timm_model, shape)
        else:
            backbone = load_source(contender.key).backbone
            backbone.switch_to_deploy()
            network = StageMaps(backbone, shape)
    return network.eval().requires_grad_(False)


def check_timm(contenders: Iterable[Contender]) -> None:
    """Raise an ImportError that says what installs it, unless timm is there and has the peers."""
    names = [one.timm_model for one in contenders if one.timm_model]
    if not names:
        return
    timm = require('timm', PURPOSE, EXTRA)
    missing = [name for name in names if not timm.is_model(name)]
    if missing:
        raise ImportError(
            f'timm {timm.__version__} has no {missing[0]}, which a later one has: '
            'pip install --upgrade timm'
        )


def _build_peer(name: str, shape: tuple[int, int]) -> nn.Module:
    timm = require('timm', PURPOSE, EXTRA)
    options = dict(img_size=shape) if name.startswith(BUILT_FOR_A_SIZE) else {}
    features = timm.create_model(name, pretrained=False, features_only=True, **options)
    features = timm.utils.reparameterize_model(features.eval())
    return fold_batch_norms(FourMaps(features).eval(), torch.zeros(1, 3, *shape))
