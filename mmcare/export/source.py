"""Read what is exported: a network with its weights, and the normalization of its images."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.registry import MODELS
from mmengine.utils import import_modules_from_strings
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mmcare.export.preprocessing import read_padding
from mmcare.models import CARE
from mmcare.models.deployment import BackboneInfo, find_care, fuse_all
from mmcare.models.loading import check_state_dict, strict_loading
from mmcare.weights.names import of_backbone
from mmcare.weights.reading import CheckpointError, load_weights

PARTS = ('backbone', 'neck', 'model')
HEADS = ('head', 'decode_head', 'bbox_head')


@dataclass(frozen=True)
class Normalization:
    """How images become the network's input: (pixel - mean) / std, channel by channel."""

    mean: tuple[float, ...]  # of pixels from 0 to 255, in the network's order of channels
    std: tuple[float, ...]
    channels: str  # that order, 'RGB' or 'BGR'
    padding: tuple[float, ...] | None = None  # pixel in that order; None: zeros, once normalized

    @property
    def fill(self) -> list[float]:
        """The padding, normalized."""
        values = zip(self.padding or self.mean, self.mean, self.std, strict=True)
        return [(value - mean) / std for value, mean, std in values]

    def describe(self, input_kind: str) -> dict[str, Any]:
        """Describe how pixels become an ``'image'`` or a ``'tensor'``, as files say it."""
        taken: dict[str, Any] = dict(kind=input_kind, channels=self.channels)
        if input_kind == 'image':
            return dict(taken, mean=None, std=None, padding=[*(self.padding or self.mean)])
        return dict(taken, mean=[*self.mean], std=[*self.std], padding=self.fill)


IMAGENET = Normalization((123.675, 116.28, 103.53), (58.395, 57.12, 57.375), 'RGB')


class Network(nn.Module):
    """A part of a model as a function of normalized images; the model is set to evaluation.

    Args:
        model: A CARE, a model of a toolbox with one, or another backbone.
        part: ``'backbone'``; ``'neck'``: backbone and neck, the model's ``extract_feat``;
            ``'model'``: a classifier, segmentor or one-stage detector with ``mode='tensor'``.
        info: Describes a backbone that is no CARE.

    Raises:
        ValueError: If the model does not hold exactly one CARE, or lacks the part.
    """

    model: Any

    def __init__(
        self, model: nn.Module, part: str = 'backbone', info: BackboneInfo | None = None
    ) -> None:
        super().__init__()
        name, info = ('', info) if info else find_care(model)
        model_name = type(model).__name__
        if part == 'neck' and not getattr(model, 'with_neck', False):
            raise ValueError(f'the {model_name} has no neck: use --part backbone')
        is_one_stage = any(base.__name__ == 'SingleStageDetector' for base in type(model).__mro__)
        heads = HEADS if is_one_stage else HEADS[:2]
        if part == 'model' and not any(hasattr(model, head) for head in heads):
            raise ValueError(
                'only classifiers, segmentors and one-stage detectors are exported whole, not a '
                f'{model_name}: use --part neck or --part backbone'
            )
        self.info = info
        self.part = part
        self.model = model.get_submodule(name) if part == 'backbone' else model
        self.backbone_name = '' if part == 'backbone' else name
        self.eval().requires_grad_(False)

    @property
    def backbone(self) -> Any:
        """The backbone in the model."""
        return self.model.get_submodule(self.backbone_name)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Map images (B, C, H, W) to maps of stages or neck, logits, or all maps of a head."""
        outputs = self.model.extract_feat(images) if self.part == 'neck' else self.model(images)
        return tuple(tree_leaves(outputs))


@dataclass(frozen=True)
class Source:
    """A network to export."""

    name: str  # of the arch or the config; files begin with it
    checkpoint: str  # name of the file with the weights, or 'random'
    network: Network  # fused only if its weights are
    normalization: Normalization | None  # the config's; ImageNet's for an arch
    config: Config | None = None  # describes the data
    metadata: Mapping[str, Any] = field(default_factory=dict)  # more entries for descriptions


def read_config(path: str | os.PathLike, with_imports: bool = True) -> Config:
    """Read a config and import its ``custom_imports``; raise a ValueError if MMEngine cannot."""
    try:
        return Config.fromfile(path, import_custom_modules=with_imports)
    except (LookupError, RuntimeError, SyntaxError) as error:
        raise ValueError(f'{path} is not a config: {error}') from error


def load_source(
    source: str | os.PathLike, checkpoint: str | os.PathLike | None = None, part: str = 'backbone'
) -> Source:
    """Build a network from an arch or a config, and load its weights.

    A backbone in ``model.backbone`` is built alone, without the config's toolbox.

    Args:
        source: ``'s0'``, ``'s1'``, ``'s2'``, or a config of a model with one CARE.
        checkpoint: A published file, or a checkpoint of the backbone (``part='backbone'``) or of
            the whole model, fused or not. None: random weights.
        part: ``'backbone'``, ``'neck'`` or ``'model'``, see :class:`Network`. The last two need a
            config and its toolbox.

    Raises:
        FileNotFoundError: If config or checkpoint does not exist.
        CheckpointError: If the checkpoint cannot be read, or does not fit the network.
        ValueError: If the source is neither an arch nor a config of a model with one CARE, if the
            model cannot be built, or if it lacks the part.
        ImportError: If something that the config imports is missing.
    """
    source, config = os.fspath(source), None
    model_config: Mapping[str, Any] = dict(type=CARE, arch=source)
    normalization: Normalization | None = IMAGENET
    if part not in PARTS:
        raise ValueError(f'{part!r} is none of the parts {", ".join(PARTS)}')
    if source in CARE.arch_zoo:
        name = f'care_{source}'
        if part != 'backbone':
            raise ValueError(f'{source!r} is a backbone without neck or head: give a config (.py)')
    elif Path(source).suffix == '.py':
        name, config = Path(source).stem, read_config(source, with_imports=False)
        model_config, normalization = _describe_model(config, part)
    else:
        raise ValueError(f'{source!r} is neither one of {", ".join(CARE.arch_zoo)} nor a config')
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            model = MODELS.build(model_config)
        except (LookupError, TypeError) as error:  # a name or an argument that does not exist
            raise ValueError(f'the model of {source} cannot be built: {error}') from error
    network = Network(model, part)
    if checkpoint is not None:
        _load(network, checkpoint)
        return Source(name, Path(checkpoint).name, network, normalization, config)
    for key, parameter in network.named_parameters():
        if key.endswith('gamma'):
            parameter.fill_(0.1)  # the initial 1e-6 would hide wrong blocks
    return Source(name, 'random', network, normalization, config)


def _describe_model(config: Config, part: str) -> tuple[Mapping[str, Any], Normalization | None]:
    """Return the config of the model or of its backbone, and the normalization of images."""
    imports = config.get('custom_imports') or dict(imports=[])
    # An import that fails may be needed by the rest of the model only.
    import_modules_from_strings(imports['imports'], allow_failed_imports=part == 'backbone')
    model = config.get('model') or {}
    alone = part == 'backbone' and 'backbone' in model
    built = {**(model['backbone'] if alone else model), '_scope_': config.get('default_scope')}
    return built, read_normalization(config)


def read_normalization(config: Config) -> Normalization | None:
    """Return how a config normalizes and pads images, or None if it does not say it."""
    # mmpretrain has the preprocessor next to the model.
    model = config.get('model') or {}
    preprocessor = model.get('data_preprocessor') or config.get('data_preprocessor')
    if not preprocessor or preprocessor.get('mean') is None:
        return None
    mean, std = tuple(map(float, preprocessor['mean'])), tuple(map(float, preprocessor['std']))
    # Images are read as BGR.
    to_rgb = preprocessor.get('bgr_to_rgb') or preprocessor.get('to_rgb')
    padding = read_padding(config, len(mean))
    if padding and to_rgb:
        padding = padding[::-1]
    return Normalization(mean, std, 'RGB' if to_rgb else 'BGR', padding)


def _load(network: Network, checkpoint: str | os.PathLike) -> None:
    """Load weights, all of them, and fuse the network first if the weights are fused."""
    state = load_weights(checkpoint)
    if any(key.split('.')[-1] == 'folded' for key in state):
        fuse_all(network)
    if network.part == 'backbone':
        state = check_state_dict(network.backbone, of_backbone(state), '', checkpoint)
    with strict_loading(network.model, (CARE,), checkpoint):
        try:
            network.model.load_state_dict(state)
        except CheckpointError:
            raise
        except RuntimeError as error:
            raise CheckpointError(f'{checkpoint} does not fit. {error}') from error
