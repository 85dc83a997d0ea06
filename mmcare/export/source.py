"""The network to export: a CARE, alone or in a model of a toolbox, and its normalisation."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from mmengine.config import Config
from mmengine.registry import MODELS
from mmengine.utils import import_modules_from_strings
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mmcare.models import CARE
from mmcare.models.loading import check_state_dict, strict_loading
from mmcare.weights.names import of_backbone
from mmcare.weights.reading import load_weights

PARTS = ('backbone', 'neck', 'model')
HEADS = ('head', 'decode_head', 'bbox_head')


@dataclass(frozen=True)
class Normalization:
    """How images become the network's input: (pixel - mean) / std, channel by channel."""

    mean: tuple[float, ...]  # of pixels from 0 to 255, in the network's order of channels
    std: tuple[float, ...]
    channels: str  # that order, 'RGB' or 'BGR'


IMAGENET = Normalization((123.675, 116.28, 103.53), (58.395, 57.12, 57.375), 'RGB')


class Network(nn.Module):
    """A part of a model as a function of normalised images; the model is set to evaluation.

    Args:
        model: A CARE, or a model of a toolbox.
        part: ``'backbone'``: the CARE. ``'neck'``: backbone and neck, the model's
            ``extract_feat``. ``'model'``: the model as it computes with ``mode='tensor'``: a
            classifier, a segmentor or a one-stage detector.

    Raises:
        ValueError: If the model does not hold exactly one CARE, or lacks the part.
    """

    model: Any

    def __init__(self, model: nn.Module, part: str = 'backbone') -> None:
        super().__init__()
        cares = [module for module in model.modules() if isinstance(module, CARE)]
        kind = type(model).__name__
        if len(cares) != 1:
            raise ValueError(f'the {kind} must hold exactly one CARE, it holds {len(cares)}')
        if part == 'neck' and not getattr(model, 'with_neck', False):
            raise ValueError(f'the {kind} has no neck: export its backbone alone')
        detects = any(base.__name__ == 'SingleStageDetector' for base in type(model).__mro__)
        heads = [head for head in HEADS if detects or head != 'bbox_head']
        if part == 'model' and not any(hasattr(model, head) for head in heads):
            raise ValueError(
                'only classifiers, segmentors and one-stage detectors are exported whole, not a '
                f'{kind}: export its backbone, or backbone and neck (--with-neck)'
            )
        self.model = cares[0] if part == 'backbone' else model
        self.part = part
        self.eval().requires_grad_(False)

    @property
    def backbone(self) -> CARE:
        """The CARE in it."""
        return next(module for module in self.modules() if isinstance(module, CARE))

    @property
    def in_channels(self) -> int:
        """Channels of the images."""
        return self.backbone.stem.conv.in_channels

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Map images (B, C, H, W) to maps of stages or neck, logits, or all maps of a head."""
        outputs = self.model.extract_feat(images) if self.part == 'neck' else self.model(images)
        return tuple(tree_leaves(outputs))


@dataclass(frozen=True)
class Source:
    """A network to export."""

    name: str  # for files: of the arch or the config
    weights: str  # name of the checkpoint, or 'random'
    network: Network  # folded only if its weights are
    normalization: Normalization | None  # of the config; ImageNet's for an arch
    config: Config | None = None  # where the data are described

    @property
    def arch(self) -> str:
        """Name of the arch, or its values."""
        own = self.network.backbone.arch
        return next((name for name, arch in CARE.arch_zoo.items() if arch == own), str(own))


def load_source(
    source: str | os.PathLike, checkpoint: str | os.PathLike | None = None, part: str = 'backbone'
) -> Source:
    """Build a network from an arch or a config, and load its weights.

    A backbone in ``model.backbone`` is built alone, without the config's toolbox.

    Args:
        source: ``'s0'``, ``'s1'``, ``'s2'``, or a config of a model with one CARE.
        checkpoint: A published file, or a checkpoint of the backbone (``part='backbone'``) or of
            the whole model, folded or not. None: random weights.
        part: See :class:`Network`. All but ``'backbone'`` need a config and its toolbox.

    Raises:
        FileNotFoundError: If config or checkpoint does not exist.
        CheckpointError: If the checkpoint cannot be read, or does not fill the CARE.
        RuntimeError: If it does not fit the rest of the model.
        ValueError: If the source is neither, or has not exactly one CARE, or lacks the part.
        ImportError: If something that the config imports is missing.
    """
    source, config = os.fspath(source), None
    described: Mapping[str, Any] = dict(type=CARE, arch=source)
    normalization: Normalization | None = IMAGENET
    if source in CARE.arch_zoo:
        name = f'care_{source}'
        if part != 'backbone':
            raise ValueError(f'{source!r} is a backbone without neck or head: give a config (.py)')
    elif Path(source).suffix == '.py':
        name, config = Path(source).stem, Config.fromfile(source, import_custom_modules=False)
        described, normalization = _read_config(config, part)
    else:
        raise ValueError(f'{source!r} is neither one of {", ".join(CARE.arch_zoo)} nor a config')
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = Network(MODELS.build(described), part)
    if checkpoint is not None:
        _load(network, checkpoint)
        return Source(name, Path(checkpoint).name, network, normalization, config)
    for key, parameter in network.named_parameters():
        if key.endswith('gamma'):
            parameter.fill_(0.1)  # the initial 1e-6 would hide wrong blocks
    return Source(name, 'random', network, normalization, config)


def fold_all(module: nn.Module) -> None:
    """Fold every network in a module that has ``switch_to_deploy``, outermost first, in place."""
    switch_to_deploy = getattr(module, 'switch_to_deploy', None)
    if switch_to_deploy is not None:
        switch_to_deploy()
        return
    for child in module.children():
        fold_all(child)


class MatrixPool(nn.AdaptiveAvgPool2d):
    """Adaptive pooling as two matrix products, for maps of the size that it meets first.

    Converters write an operator or two for each bin: 95 for the head of UperNet.
    """

    rows: Tensor
    columns: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C, *output_size)."""
        if not hasattr(self, 'rows'):
            bins = super().forward(x).shape[2:]
            rows, self.columns = (
                F.adaptive_avg_pool1d(torch.eye(side), number)
                for side, number in zip(x.shape[2:], bins, strict=True)
            )
            self.rows = rows.transpose(0, 1)
        return self.rows @ (x @ self.columns)


def fix_pools(network: Network, shape: tuple[int, int]) -> None:
    """Replace adaptive pooling to several values, in place, for images of height and width."""
    for module in network.modules():
        if type(module) is nn.AdaptiveAvgPool2d and module.output_size not in (1, (1, 1)):
            module.__class__ = MatrixPool
    network(torch.zeros(1, network.in_channels, *shape))


def _read_config(config: Config, part: str) -> tuple[Mapping[str, Any], Normalization | None]:
    """Read the config of the model, and the normalisation of images."""
    imports = config.get('custom_imports') or dict(imports=[])
    # What fails may be needed by the rest of the model only.
    import_modules_from_strings(imports['imports'], allow_failed_imports=part == 'backbone')
    model = config.get('model') or {}
    alone = part == 'backbone' and 'backbone' in model
    described = {**(model['backbone'] if alone else model), '_scope_': config.get('default_scope')}
    # mmpretrain has the preprocessor next to the model.
    preprocessor = model.get('data_preprocessor') or config.get('data_preprocessor')
    if not preprocessor or preprocessor.get('mean') is None:
        return described, None
    mean, std = tuple(map(float, preprocessor['mean'])), tuple(map(float, preprocessor['std']))
    # Images are read as BGR.
    to_rgb = preprocessor.get('bgr_to_rgb') or preprocessor.get('to_rgb')
    return described, Normalization(mean, std, 'RGB' if to_rgb else 'BGR')


def _load(network: Network, checkpoint: str | os.PathLike) -> None:
    """Load weights whole, into a network that is folded if they are."""
    state = load_weights(checkpoint)
    if any(key.split('.')[-1] == 'folded' for key in state):
        fold_all(network)
    if network.model is network.backbone:
        state = check_state_dict(network.backbone, of_backbone(state), '', checkpoint)
    with strict_loading(network.model, (CARE,), checkpoint):
        network.model.load_state_dict(state)
