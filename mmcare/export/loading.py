"""Load what is exported: a model with its weights, and the normalization of its images."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.registry import MODELS
from mmengine.utils import import_modules_from_strings
from torch import Tensor

from mmcare.export.preprocessing import read_padding
from mmcare.export.tasks import PARTS, Task, make_task
from mmcare.models import CARE
from mmcare.models.deployment import fuse_all
from mmcare.models.loading import check_state_dict, load_strictly
from mmcare.weights.names import of_backbone
from mmcare.weights.reading import load_weights


@dataclass(frozen=True)
class Normalization:
    """How images become the network's input: (pixel - mean) / std, channel by channel."""

    mean: tuple[float, ...]  # of pixels from 0 to 255, in the network's order of channels
    std: tuple[float, ...]
    channels: str  # that order, 'RGB' or 'BGR'
    padding: tuple[float, ...] | None = None  # pixel in that order; None: zeros after normalization

    @property
    def fill(self) -> list[float]:
        """The padding, normalized."""
        values = zip(self.padding or self.mean, self.mean, self.std, strict=True)
        return [(value - mean) / std for value, mean, std in values]

    def expand(self, channels: int) -> 'Normalization':
        """Repeat a single mean, as mmdet does for all channels."""
        if len(self.mean) > 1:
            return self
        padding = self.padding
        if padding and len(padding) == 1:
            padding *= channels
        return replace(self, mean=self.mean * channels, std=self.std * channels, padding=padding)

    def to_pixels(self, images: Tensor) -> Tensor:
        """Map normalized images (..., C, H, W) to pixels."""
        mean, std = images.new_tensor([self.mean, self.std])[:, :, None, None]
        return images * std + mean

    def normalize(self, pixels: Tensor) -> Tensor:
        """Map pixels (..., C, H, W) to normalized images."""
        mean, std = pixels.new_tensor([self.mean, self.std])[:, :, None, None]
        return (pixels - mean) / std

    def describe(self, input_kind: str, dtype: str = 'float32') -> dict[str, Any]:
        """Describe how pixels become an ``'image'`` or a ``'tensor'``, for a file."""
        channels = self.channels if len(self.mean) == 3 else None
        described: dict[str, Any] = dict(kind=input_kind, channels=channels, dtype=dtype)
        if input_kind == 'tensor':
            return dict(described, mean=[*self.mean], std=[*self.std], padding=self.fill)
        padding = [*(self.padding or self.mean)]
        padding = [round(value) for value in padding] if dtype == 'uint8' else padding
        return dict(described, mean=None, std=None, padding=padding)


IMAGENET = Normalization((123.675, 116.28, 103.53), (58.395, 57.12, 57.375), 'RGB')


@dataclass(frozen=True)
class LoadedModel:
    """A part of a model to export, with its weights."""

    name: str  # of the arch or the config; files begin with it
    checkpoint: str  # name of the file with the weights, or 'random'
    task: Task  # fused only if its weights are
    normalization: Normalization | None  # the config's; ImageNet's for an arch
    config: Config | None = None  # describes the data
    metadata: Mapping[str, Any] = field(default_factory=dict)  # more entries for descriptions


def read_config(path: str | os.PathLike, with_imports: bool = True) -> Config:
    """Read a config and import its ``custom_imports``; raise a ValueError if MMEngine cannot."""
    try:
        return Config.fromfile(path, import_custom_modules=with_imports)
    except (LookupError, RuntimeError, SyntaxError) as error:
        raise ValueError(f'{path} is not a config: {error}') from error


def load_model(
    source: str | os.PathLike, checkpoint: str | os.PathLike | None = None, part: str = 'backbone'
) -> LoadedModel:
    """Build a network from an arch or a config, and load its weights.

    A backbone in ``model.backbone`` is built alone, without the config's toolbox.

    Args:
        source: ``'s0'``, ``'s1'``, ``'s2'``, or a config of a model with one CARE.
        checkpoint: A published file, or a checkpoint of the backbone (``part='backbone'``) or of
            the whole model, fused or not. None: random weights.
        part: ``'backbone'``, ``'neck'`` or ``'model'``, see
            :func:`mmcare.export.tasks.make_task`. The last two need a config and its toolbox.

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
        # Reasons: a name or an argument that does not exist, or a mean of four channels.
        except (AssertionError, LookupError, TypeError) as error:
            raise ValueError(f'the model of {source} cannot be built: {error}') from error
    task = make_task(model, part)
    if normalization is not None:
        normalization = normalization.expand(task.info.in_channels)
    if checkpoint is not None:
        _load(task, checkpoint)
        return LoadedModel(name, Path(checkpoint).name, task, normalization, config)
    for key, parameter in task.named_parameters():
        if key.endswith('gamma'):
            parameter.fill_(0.1)  # the initial 1e-6 would hide wrong blocks
    return LoadedModel(name, 'random', task, normalization, config)


def _describe_model(config: Config, part: str) -> tuple[Mapping[str, Any], Normalization | None]:
    """Return the config of the model or of its backbone, and the normalization of images."""
    imports = config.get('custom_imports') or dict(imports=[])
    # Only the rest of the model may need an import that fails.
    import_modules_from_strings(imports['imports'], allow_failed_imports=part == 'backbone')
    model = config.get('model') or {}
    alone = part == 'backbone' and 'backbone' in model
    built = {**(model['backbone'] if alone else model), '_scope_': config.get('default_scope')}
    return built, read_normalization(config)


def read_normalization(config: Config) -> Normalization | None:
    """Return how a config normalizes and pads images, or None if the config does not say."""
    # mmpretrain has the preprocessor next to the model.
    model = config.get('model') or {}
    preprocessor = model.get('data_preprocessor') or config.get('data_preprocessor')
    if not preprocessor or preprocessor.get('mean') is None:
        return None
    mean, std = tuple(map(float, preprocessor['mean'])), tuple(map(float, preprocessor['std']))
    # Images are read as BGR, and each of these reverses the channels.
    to_rgb = any(preprocessor.get(name) for name in ('bgr_to_rgb', 'rgb_to_bgr', 'to_rgb'))
    padding = read_padding(config, len(mean))
    if padding and to_rgb:
        padding = padding[::-1]
    normalization = Normalization(mean, std, 'RGB' if to_rgb else 'BGR', padding)
    return normalization.expand(len(padding or mean))


def _load(task: Task, checkpoint: str | os.PathLike) -> None:
    """Load all weights; if the weights are fused, fuse the network first."""
    state = load_weights(checkpoint)
    if any(key.split('.')[-1] == 'folded' for key in state):
        fuse_all(task)
    if task.part == 'backbone':
        state = check_state_dict(task.backbone, of_backbone(state), '', checkpoint)
    load_strictly(task.model, state, (CARE,), checkpoint)
