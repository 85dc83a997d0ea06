"""Load what is exported: a model with its weights, and the normalization of its images."""

import os
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.registry import MODELS
from mmengine.utils import import_modules_from_strings
from torch import Tensor

from mmcare.deployment import ARCHS, find_backbone, fuse_all
from mmcare.export.pipelines import inner_datasets, name_steps, read_padding
from mmcare.export.tasks import PARTS, Task, make_task
from mmcare.registry import type_name
from mmcare.weights.names import is_fused, of_backbone, select
from mmcare.weights.reading import check_exists, load_from_mmcare, runs_of, weights_of
from mmcare.weights.strict import check_weights, load_strictly


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


# Initial values of layer scales are below this, such as 1e-5 and 1e-6.
SMALL_SCALE = 1e-3
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
    """Read a config and import its ``custom_imports``; raise a ValueError if MMEngine cannot.

    ``'mmdet::rtmdet/rtmdet_tiny_8xb32-300e_coco.py'`` is a config in an installed toolbox.
    """
    try:
        if '::' in os.fspath(path):
            return Config.fromstring(f'_base_ = {os.fspath(path)!r}', '.py')
        return Config.fromfile(path, import_custom_modules=with_imports)
    except (AssertionError, LookupError, RuntimeError, SyntaxError) as error:
        raise ValueError(f'{path} is not a config: {error}') from error


def load_model(
    source: str | os.PathLike, checkpoint: str | os.PathLike | None = None, part: str = 'backbone'
) -> LoadedModel:
    """Build a network from an arch or a config, and load its weights.

    A backbone in ``model.backbone`` is built alone, without the config's toolbox.

    Args:
        source: The name of an arch, such as ``'s0'``, a config of mmdet, mmseg or mmpretrain, or
            the name of one of theirs, such as ``'mmdet::retinanet/retinanet_r18_fpn_1x_coco.py'``.
        checkpoint: A published file, or a checkpoint of the backbone (``part='backbone'``) or of
            the whole model, fused or not. None: random weights.
        part: ``'backbone'``, ``'neck'`` or ``'model'``, see
            :func:`mmcare.export.tasks.make_task`. The last two need a config and its toolbox.

    Raises:
        FileNotFoundError: If config or checkpoint does not exist.
        CheckpointError: If the checkpoint cannot be read, or does not fit the network.
        ValueError: If the source is neither an arch nor a config, if the model cannot be built, or
            if it lacks a backbone or the part.
        ImportError: If something that the config imports is missing.
    """
    source, config = os.fspath(source), None
    normalization: Normalization | None = IMAGENET
    backbone: str | None = None  # to be found
    if part not in PARTS:
        raise ValueError(f'{part!r} is none of the parts {", ".join(PARTS)}')
    if checkpoint is not None:
        check_exists(checkpoint)
    if source in ARCHS:
        (name, model_config), backbone = ARCHS[source], ''
        if part != 'backbone':
            raise ValueError(f'{source!r} is a backbone without neck or head: give a config (.py)')
    elif Path(source).suffix == '.py':
        name, config = Path(source).stem, read_config(source, with_imports=False)
        import_for(config, part)
        normalization = read_normalization(config)
        model_config = config.get('model') or {}
        # MMEngine notes the toolbox in its own configs; some name no default.
        scope = model_config.get('_scope_') or config.get('default_scope')
        if part == 'backbone' and 'backbone' in model_config:  # alone, without the toolbox
            model_config, backbone = model_config['backbone'], ''
        model_config = {**model_config, '_scope_': scope}
    else:
        raise ValueError(f'{source!r} is neither one of {", ".join(ARCHS)} nor a config')
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            model = MODELS.build(deepcopy(model_config))  # heads of DETR change it
        except (ImportError, OSError):  # of what a model imports and reads
            raise
        except Exception as error:  # models of others raise anything
            raise ValueError(f'the model of {source} cannot be built: {error}') from error
    backbone = find_backbone(model) if backbone is None else backbone
    task = make_task(model, part, backbone=backbone)
    if normalization is not None:
        normalization = normalization.expand(task.info.in_channels)
    if checkpoint is not None:
        metadata = _load(task, checkpoint, backbone)
        return LoadedModel(name, Path(checkpoint).name, task, normalization, config, metadata)
    for key, parameter in task.named_parameters():
        if key.endswith('gamma') or 0 < parameter.abs().max() < SMALL_SCALE:
            parameter.fill_(0.1)  # a layer scale, which would hide wrong blocks
    return LoadedModel(name, 'random', task, normalization, config)


def import_for(config: Config, part: str) -> None:
    """Import what a part of a config's model needs: only the rest may need a failing import."""
    imports = config.get('custom_imports') or dict(imports=[])
    optional = part == 'backbone' or imports.get('allow_failed_imports', False)
    import_modules_from_strings(imports['imports'], allow_failed_imports=optional)


def read_normalization(config: Config) -> Normalization | None:
    """Return how a config normalizes and pads images, or None if the config does not say."""
    # mmpretrain has the preprocessor next to the model.
    model = config.get('model') or {}
    preprocessor = model.get('data_preprocessor') or config.get('data_preprocessor')
    if not preprocessor:
        return None
    while 'data_preprocessor' in preprocessor:  # of a branch, in semi-supervised training
        preprocessor = preprocessor['data_preprocessor']
    if preprocessor.get('mean') is not None:
        values = preprocessor['mean'], preprocessor['std']
    elif 'Normalize' in name_steps(config):
        return None
    else:  # pixels as they are, as YOLOX takes them
        values = [0.0], [1.0]
    mean, std = (tuple(map(float, channels)) for channels in values)
    # Images are read as BGR, and each of these reverses the channels. CIFAR's are stored as RGB.
    to_rgb = any(preprocessor.get(name) for name in ('bgr_to_rgb', 'rgb_to_bgr', 'to_rgb'))
    padding = read_padding(config, len(mean))
    fill = preprocessor.get('pad_value') or preprocessor.get('pad_val')  # mmseg's; normalized
    if padding and to_rgb:
        padding = padding[::-1]
    elif padding is None and fill:
        padding = tuple(m + fill * s for m, s in zip(mean, std, strict=True))
    dataset = inner_datasets((config.get('test_dataloader') or {}).get('dataset') or {})[0]
    stored_as_rgb = type_name(dataset.get('type')) in ('CIFAR10', 'CIFAR100')
    channels = 'RGB' if to_rgb != stored_as_rgb else 'BGR'
    normalization = Normalization(mean, std, channels, padding)
    return normalization.expand(len(padding or mean))


def _load(task: Task, checkpoint: str | os.PathLike, backbone: str) -> dict[str, Any]:
    """Load all weights; if the weights are fused, fuse the network first.

    ``backbone`` is the name of the backbone in the config's model.

    Returns:
        What the checkpoint says of the run that trained it, for descriptions.
    """
    content = load_from_mmcare(checkpoint, 'cpu')
    state = weights_of(content, checkpoint)
    if is_fused(state):
        fuse_all(task)
    if task.part == 'backbone':
        state = select(state, f'{backbone}.') or of_backbone(state)
        state = check_weights(task.backbone, state, '', checkpoint)
    load_strictly(task.model, state, checkpoint)
    runs = runs_of(content)
    # The command has paths, which are nobody's business on a device.
    training = {k: value for k, value in runs[-1].items() if k != 'command'} if runs else {}
    return dict(training=training) if training else {}
