"""What is exported: a CARE backbone from an arch or any config, its weights, its normalisation.

With a config, what stands behind the backbone can be exported, too.
"""

import os
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from mmengine.config import Config
from torch import nn

from mmcare.checkpoint import BACKBONE, is_folded, load_weights, naming
from mmcare.config import building_from, builds, find_class, read_config
from mmcare.deploy.parts import PARTS, Behind, build_behind
from mmcare.deploy.stage_maps import Normalization
from mmcare.models import CARE

RANDOM_GAMMA = 0.1


IMAGENET = Normalization((123.675, 116.28, 103.53), (58.395, 57.12, 57.375), 'RGB')


@dataclass(frozen=True)
class Source:
    """A backbone to export.

    Attributes:
        name: For files: of the arch or the config.
        arch: For metadata: name of the arch, or its values.
        backbone: In evaluation mode, folded only if its weights are.
        weights: Name of the checkpoint, or ``'random'``.
        normalization: Of the config; ImageNet's for an arch; None if the config has none.
        behind: What is exported with the backbone; None for the backbone alone.
    """

    name: str
    arch: str
    backbone: CARE
    weights: str
    normalization: Normalization | None
    behind: Behind | None = None

    @property
    def part(self) -> str:
        """One of ``PARTS``."""
        return 'backbone' if self.behind is None else self.behind.part

    @property
    def network(self) -> nn.Module:
        """What maps normalised images (B, C, H, W) to the tuple of outputs."""
        return self.backbone if self.behind is None else nn.Sequential(self.backbone, self.behind)


def load_source(
    source: str | os.PathLike,
    checkpoint: str | os.PathLike | None = None,
    part: str = 'backbone',
) -> Source:
    """Build the backbone of an arch or of a config, and give it its weights.

    Only what is asked for is built: for a detector's backbone neither mmdet nor compiled ops are
    needed (but for configs that inherit from another package's).

    Args:
        source: ``'s0'``, ``'s1'``, ``'s2'``, or a config with a CARE backbone, in
            ``model.backbone`` or, alone, elsewhere in ``model``. A subclass of CARE must leave
            ``forward`` as it is.
        checkpoint: A published file, or a checkpoint of a backbone or of a whole model, folded or
            not. None: random weights, with a gamma of 0.1, which are good enough to look at sizes,
            operators and speed.
        part: ``'backbone'``; ``'neck'``, backbone and neck; or ``'model'``, a whole classifier or
            segmentor. The last two need a config and the toolbox that it names.

    Raises:
        FileNotFoundError: If config or checkpoint does not exist.
        CheckpointError: If the checkpoint cannot be read or does not fit.
        ValueError: If the source is neither, or the config has not exactly one CARE backbone, or
            one that cannot be built, or not the part.
        ImportError: If the toolbox that the part comes from is not installed.
    """
    source = os.fspath(source)
    if part not in PARTS:
        raise ValueError(f'part must be of {PARTS}, got {part!r}')
    cfg = None
    kind = CARE
    arguments: dict[str, Any]
    normalization: Normalization | None
    if source in CARE.arch_zoo:
        name, arguments, normalization = f'care_{source}', dict(arch=source), IMAGENET
    elif Path(source).suffix == '.py':
        cfg = read_config(source, import_custom_modules=False)
        name = Path(source).stem
        arguments = _find_backbone(cfg)
        kind = cast('type[CARE]', find_class(arguments.pop('type')))
        if kind.forward is not CARE.forward:
            raise ValueError(
                f'{source}: {kind.__name__} has a forward of its own, and what is exported is that '
                'of CARE'
            )
        normalization = _find_normalization(cfg)
    else:
        raise ValueError(
            f'{source!r} is neither an arch ({", ".join(CARE.arch_zoo)}) nor a config (.py)'
        )
    if cfg is None and part != 'backbone':
        raise ValueError(f'{source!r} is a backbone without neck or head: give a config (.py)')
    arguments.update(init_cfg=None, frozen_stages=-1, with_cp=False)
    state = None
    if checkpoint is not None:
        loaded = load_weights(checkpoint)
        state = loaded.get('state_dict', loaded)
    folded = state is not None and is_folded(str(key).removeprefix(BACKBONE) for key in state)
    with torch.random.fork_rng(devices=[]), building_from(source):
        torch.manual_seed(0)
        backbone = kind(**arguments, deploy=folded, layer_scale_init_value=RANDOM_GAMMA)
    if state is not None:
        with naming(checkpoint):
            backbone.load_state_dict(dict(state), strict=False)  # CARE takes it whole or raises
    backbone.eval().requires_grad_(False)
    behind = None if part == 'backbone' else build_behind(cfg, part, backbone, state)
    arch = arguments.get('arch', 's0')
    return Source(
        name=name,
        arch=arch if isinstance(arch, str) else str(dict(arch)),
        backbone=backbone,
        weights='random' if checkpoint is None else Path(checkpoint).name,
        normalization=normalization,
        behind=behind,
    )


def _find_backbone(cfg: Config) -> dict[str, Any]:
    """Find the config of the CARE backbone, without what the export sets itself."""
    model = cfg.get('model')
    found: list[Mapping[str, Any]] = []
    if isinstance(model, Mapping):
        with building_from(cfg.filename):  # names can be of toolboxes that refuse to be imported
            backbone = model.get('backbone')
            # What else has one, such as a teacher, takes no part in a prediction.
            found = [backbone] if builds(backbone, CARE) else list(_find_backbones(model))
    if len(found) != 1:
        raise ValueError(
            f"{cfg.filename} must have one dict with type='mmcare.CARE' in its model, a CARE "
            f'backbone; it has {len(found)}'
        )
    own = ('deploy', 'layer_scale_init_value')
    return {key: deepcopy(value) for key, value in found[0].items() if key not in own}


def _find_backbones(config: Any) -> Iterator[Mapping[str, Any]]:
    """Find configs of CARE backbones in the config of a model, however deep."""
    if isinstance(config, Mapping):
        if builds(config, CARE):
            yield config
        for value in config.values():
            yield from _find_backbones(value)
    elif isinstance(config, list | tuple):
        for value in config:
            yield from _find_backbones(value)


def _find_normalization(cfg: Config) -> Normalization | None:
    """Read the normalisation off a config; mmdet and mmseg have it in model, mmpretrain beside."""
    preprocessor = cfg.model.get('data_preprocessor') or cfg.get('data_preprocessor')
    if not preprocessor or preprocessor.get('mean') is None:
        return None
    # Images are read as BGR.
    to_rgb = preprocessor.get('bgr_to_rgb') or preprocessor.get('to_rgb')
    mean, std = tuple(map(float, preprocessor.mean)), tuple(map(float, preprocessor.std))
    return Normalization(mean, std, 'RGB' if to_rgb else 'BGR')
