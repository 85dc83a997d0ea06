"""What stands behind a backbone and is exported with it: a neck, or the neck and head of a model.

These come from the toolbox that the config names, which must be installed; a backbone needs none.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from importlib import import_module
from typing import Any

import torch
from mmcv.cnn import ConvModule, fuse_conv_bn
from mmengine.config import Config
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import MODELS as MMENGINE_MODELS
from mmengine.utils import import_modules_from_strings
from torch import Tensor, nn

from mmcare.checkpoint import CheckpointError
from mmcare.config import builds
from mmcare.deploy.stage_maps import StageMaps
from mmcare.models import CARE
from mmcare.models.backbones.care import STEM_STRIDE
from mmcare.models.layers import Foldable

PARTS = ('backbone', 'neck', 'model')
# Static: outputs of fixed shape, whatever is in the image. By type, the key of the head's config.
HEADS = {
    'ImageClassifier': 'head',
    'DistillationClassifier': 'head',
    'EncoderDecoder': 'decode_head',
}
INSTALL = {'mmdet': 'mmdet', 'mmseg': 'mmsegmentation', 'mmpretrain': 'mmpretrain'}
TRIAL_SHAPE = 64, 64


class Behind(nn.Module):
    """Neck, head or both, on the maps of a backbone.

    Args:
        part: ``'neck'`` or ``'model'``.
        neck: Maps a tuple of maps to maps (or features); None if the model has none.
        head: Maps what the neck puts out to logits; None for a neck alone.
        backbone: What gives the maps; it is not kept.

    Attributes:
        names: Of the outputs: ``neck1`` and so on, or ``logits``.
        dense: Whether outputs are maps, which depend on how sides divide.

    Raises:
        ValueError: If the head puts out something else than logits.
    """

    def __init__(
        self, part: str, neck: nn.Module | None, head: nn.Module | None, backbone: CARE
    ) -> None:
        super().__init__()
        self.part = part
        self.neck = nn.Identity() if neck is None else neck
        self.head = nn.Identity() if head is None else head
        self.eval().requires_grad_(False)
        self.names: tuple[str, ...] = ()
        outputs = self(_zero_maps(backbone, TRIAL_SHAPE))
        if part == 'model' and not (len(outputs) == 1 and isinstance(outputs[0], Tensor)):
            raise ValueError(
                f'{type(head).__name__} does not put out one tensor of logits, so that the whole '
                'model cannot be exported; export its backbone'
            )
        self.dense = outputs[0].dim() == 4
        if part == 'model':
            self.names = ('logits',)
        else:
            self.names = tuple(f'neck{index + 1}' for index in range(len(outputs)))

    def forward(self, maps: tuple[Tensor, ...]) -> tuple[Any, ...]:
        """Map a backbone's maps, each (B, C, H, W), to the outputs."""
        outputs = self.head(self.neck(tuple(maps)))
        return tuple(outputs) if isinstance(outputs, list | tuple) else (outputs,)


class Graph(nn.Module):
    """A backbone's graph and what stands behind it.

    Args:
        maps: The backbone's graph.
        behind: Folded or not.
    """

    def __init__(self, maps: StageMaps, behind: Behind) -> None:
        super().__init__()
        self.maps, self.behind = maps, behind
        self.backbone, self.names = maps.backbone, behind.names
        self.eval()

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """Map images (B, C, H, W) to the outputs."""
        return self.behind(self.maps(image))


def attach(maps: StageMaps, behind: Behind | None) -> StageMaps | Graph:
    """Put a copy of what stands behind a backbone, if anything, behind its graph."""
    return maps if behind is None else Graph(maps, deepcopy(behind))


class MatrixPool(nn.Module):
    """Adaptive average pooling of maps of one size, as two matrix products.

    Exact for bins of unequal height and width, too, for which converters otherwise write an
    operator or two for each bin: 90 for the 3x3 and 6x6 bins of UperNet at 512x512.

    Args:
        input_size: Height and width of what it takes.
        output_size: Height and width of what it puts out.
    """

    rows: Tensor
    columns: Tensor

    def __init__(self, input_size: tuple[int, int], output_size: tuple[int, int]) -> None:
        super().__init__()
        rows, columns = map(pooling_matrix, input_size, output_size)
        self.register_buffer('rows', rows)
        self.register_buffer('columns', columns.transpose(0, 1).contiguous())

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, *input_size) to (B, C, *output_size)."""
        return self.rows @ (x @ self.columns)


def pooling_matrix(side: int, bins: int) -> Tensor:
    """Weights (bins, side) with which PyTorch averages ``side`` values to ``bins``.

    Bin i covers floor(i side / bins) up to ceil((i + 1) side / bins).
    """
    matrix = torch.zeros(bins, side)
    for index in range(bins):
        start, end = index * side // bins, -(-(index + 1) * side // bins)
        matrix[index, start:end] = 1 / (end - start)
    return matrix


def build_behind(cfg: Config, part: str, backbone: CARE, state: Mapping | None) -> Behind:
    """Build what a config has behind its backbone, with its weights.

    Args:
        cfg: Of a detector, a segmentor or a classifier.
        part: ``'neck'`` or ``'model'``.
        backbone: What is before it.
        state: State dict of the whole model; None: random weights.

    Raises:
        ValueError: If the config has no such part, or it is not static.
        ImportError: If the toolbox of the config is not installed.
        CheckpointError: If the weights do not fill it.
    """
    model, name, scope = cfg.model, cfg.filename, cfg.get('default_scope')
    kind = model.get('type')
    kind = str(getattr(kind, '__name__', kind)).rsplit('.', 1)[-1]
    if not builds(model.get('backbone'), CARE):
        raise ValueError(f'{name} has its CARE backbone not in model.backbone; export that alone')
    configs = dict(neck=model.get('neck'))
    if part == 'neck' and not configs['neck']:
        raise ValueError(f'{name} has no neck (model.neck): export its backbone alone')
    if part == 'model':
        if kind not in HEADS:
            raise ValueError(
                f'{name} is a {kind}, whose outputs change in number with the image or are not '
                f'known; whole models are of {tuple(HEADS)}: export its backbone, or backbone and '
                'neck (--with-neck)'
            )
        configs[HEADS[kind]] = model.get(HEADS[kind])
        if not isinstance(configs[HEADS[kind]], Mapping):
            raise ValueError(f'{name} must have one head, a dict in model.{HEADS[kind]}')
    _import_toolboxes(cfg, part)
    modules: dict[str, Any] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for key, config in configs.items():
            prefix = f'{key}.'
            if builds(config, Foldable, scope):
                folded = state is not None and any(k.startswith(f'{key}.folded_') for k in state)
                config = {**config, 'deploy': folded}
            modules[key] = _build(config, scope) if config else None
            if state is not None and modules[key] is not None and modules[key].state_dict():
                own = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
                _load(modules[key].eval(), own, key, name)
    neck, head = modules.pop('neck'), next(iter(modules.values()), None)
    return Behind(part, neck, head, backbone)


def fold_behind(behind: Behind) -> None:
    """Fold classification heads, and norms into the convolutions before them, in place."""
    for module in behind.modules():
        if isinstance(module, Foldable):
            module.switch_to_deploy()
        if isinstance(module, ConvModule) and module.with_norm:
            order = ''.join(part[0] for part in module.order)
            if 'cn' in order and getattr(module.norm, 'weight', None) is not None:
                fuse_conv_bn(module)
    behind.requires_grad_(False)


def fix_pools(behind: Behind, backbone: CARE, shape: tuple[int, int]) -> None:
    """Put :class:`MatrixPool` in place of adaptive pooling to more than one value, in place.

    Args:
        behind: For images of one size from then on.
        backbone: What is before it.
        shape: Height and width of the images.
    """
    sizes: dict[nn.Module, torch.Size] = {}
    pools = [module for module in behind.modules() if isinstance(module, nn.AdaptiveAvgPool2d)]
    handles = [
        pool.register_forward_pre_hook(lambda pool, x: sizes.update({pool: x[0].shape[2:]}))
        for pool in pools
    ]
    if pools:
        behind(_zero_maps(backbone, shape))
    for handle in handles:
        handle.remove()
    for module in list(behind.modules()):
        for name, child in module.named_children():
            if child in sizes:
                height, width = sizes[child]
                size: Any = child.output_size
                size = (size, size) if isinstance(size, int) else tuple(size)
                if size != (1, 1):
                    setattr(module, name, MatrixPool((height, width), size))


def _zero_maps(backbone: CARE, shape: tuple[int, int]) -> tuple[Tensor, ...]:
    return tuple(
        torch.zeros(1, channels, *(-(-side // (STEM_STRIDE * 2**index)) for side in shape))
        for index, channels in zip(backbone.out_indices, backbone.out_channels, strict=True)
    )


def _import_toolboxes(cfg: Config, part: str) -> None:
    """Import what registers the config's modules.

    Raises:
        ImportError: If it is missing, or does not work with what is installed.
    """
    scope = cfg.get('default_scope')
    what = f'the {part} of {cfg.filename}'
    if scope not in (None, 'mmengine', 'mmcare'):
        try:
            import_module(f'{scope}.models')
        except (ImportError, AssertionError) as error:  # asserts versions when it is imported
            raise ImportError(
                f'{what} needs {scope}, which cannot be imported ({error}): mim install '
                f'{INSTALL.get(scope, scope)}; the backbone alone does without'
            ) from error
    custom = cfg.get('custom_imports')
    if custom:
        try:
            import_modules_from_strings(**custom)
        except ImportError as error:
            raise ImportError(
                f'{what} needs custom_imports={list(custom.imports)}: {error}; the backbone alone '
                'does without'
            ) from error


def _build(config: Mapping | Sequence, scope: str | None) -> nn.Module:
    """Build a neck or head, or a list of necks that follow each other."""
    if not isinstance(config, Mapping):
        return nn.Sequential(*(_build(part, scope) for part in config))
    module = MMENGINE_MODELS.build({**config, '_scope_': scope} if scope else dict(config))
    return revert_sync_batchnorm(module)


def _load(module: nn.Module, state: Mapping, key: str, name: str) -> None:
    if not state:
        raise CheckpointError(
            f'the checkpoint has no weights of the {key} of {name} ({key}.*): give a checkpoint of '
            'the whole model, or export the backbone alone'
        )
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise CheckpointError(
            f'the checkpoint does not fill the {key} of {name}. {error}'
        ) from error
