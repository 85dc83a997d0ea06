"""Register CARE in timm: ``import mmcare.timm``, then ``timm.create_model('care_s1')``.

Weights have the names of an mmpretrain classifier (``backbone.*``, ``head.*``); published ones are
renamed. timm reads the files, and takes EMA weights from those that have them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from copy import copy
from typing import Any

import torch
from mmengine.model import initialize
from torch import Tensor, nn

from mmcare.compatibility import require
from mmcare.models import CARE
from mmcare.models.heads import TwoHeads, pool
from mmcare.models.loading import ADDRESSES
from mmcare.weights.names import is_published, to_classifier_keys
from mmcare.weights.strict import check_weights

timm: Any = require('timm', 'mmcare.timm', 'timm')
feature_take_indices = timm.models._features.feature_take_indices
FeatureGetterNet: Any = timm.models._features.FeatureGetterNet
timm.models.register_notrace_module(CARE)  # torch.fx cannot follow padding, or ask for dimensions
timm.models.register_notrace_function(pool)

# Mean, std, crop and interpolation of the released evaluation are timm's defaults.
CFG = dict(pool_size=(7, 7), first_conv='backbone.stem.conv', license='mit')
CFG['classifier'] = 'head.cls_head.fc', 'head.distill_head.fc'
cfgs = {f'care_{arch}.dist_in1k': CFG for arch in CARE.arch_zoo}
default_cfgs = timm.models.generate_default_cfgs(cfgs)


class CAREClassifier(nn.Module):
    """CARE with both published heads and timm's methods; ``kwargs`` are arguments of CARE."""

    def __init__(
        self,
        arch: str,
        num_classes: int = 1000,
        in_chans: int = 3,
        global_pool: str = 'avg',
        drop_rate: float = 0.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.in_chans, self.global_pool = in_chans, global_pool
        self.distilled_training = False
        with nullcontext() if device is None else torch.device(device):
            self.backbone = CARE(arch, in_chans, (0, 1, 2, 3), **kwargs)
        if 'init_cfg' in kwargs:
            self.backbone.init_weights()  # reads a file safely, and logs each parameter
        elif not self.backbone.stem.conv.weight.is_meta:  # takes seconds there
            initialize(self.backbone, self.backbone.init_cfg)
        self.backbone.to(dtype)
        # Feature extractors of timm hook these, since the outputs of stages include padding.
        self.maps = nn.ModuleList(nn.Identity() for _ in self.backbone.out_channels)
        self.feature_info = [
            dict(num_chs=channels, reduction=4 * 2**index, module=f'maps.{index}')
            for index, channels in enumerate(self.backbone.out_channels)
        ]
        self.drop = nn.Dropout(drop_rate)
        self.reset_classifier(num_classes)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the heads; with 0 classes, remove them and allow ``''`` as ``global_pool``."""
        pool_type = self.global_pool if global_pool is None else global_pool
        if pool_type != 'avg' and (pool_type != '' or num_classes):
            allowed = "'avg', or '' with num_classes=0"
            raise ValueError(f'global_pool must be {allowed}, got {pool_type!r}')
        self.num_classes, self.global_pool = num_classes, pool_type
        self.num_features = self.head_hidden_size = self.backbone.out_channels[-1]
        like = self.backbone.stem.conv.weight
        with torch.device(like.device):
            self.head = TwoHeads(self.num_features, num_classes) if num_classes else nn.Identity()
        self.head.to(like.dtype).train(self.training)

    def get_classifier(self) -> tuple[nn.Module, ...]:
        """Return the linear layers of the class head and the distillation head."""
        return tuple(module for module in self.head.modules() if isinstance(module, nn.Linear))

    def set_distilled_training(self, enable: bool = True) -> None:
        """Let training mode return the logits of both heads, as ``timm.task`` expects."""
        self.distilled_training = enable

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Compute blocks again in the backward pass, to save memory."""
        for stage in self.backbone.stages:
            stage.recompute = enable  # type: ignore[assignment]

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return the patterns by which timm groups parameters: stem, then stages or blocks."""
        stage = r'^backbone\.stages\.(\d+)'
        blocks = [(rf'{stage}\.downsample', (0,)), (rf'{stage}\.blocks\.(\d+)', None)]
        return dict(stem=r'^backbone\.stem', blocks=stage if coarse else blocks)

    def forward_features(self, x: Tensor) -> Tensor:
        """Map images (B, in_chans, H, W) to the last map (B, C, H / 32, W / 32), rounded up."""
        maps = self.backbone(x)
        # Indices, since torch.fx cannot iterate over the maps.
        return [identity(maps[index]) for index, identity in enumerate(self.maps)][-1]

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Any:
        """Map (B, C, H, W) to logits (B, K), the mean of both heads, or to their input (B, C)."""
        x = self.drop(pool(x)) if self.global_pool else x
        if pre_logits or not self.num_classes:
            return x
        if self.distilled_training and self.training:
            return self.head(x, separate=True)
        return self.head(x)  # which may be another module, such as a Linear

    def forward(self, x: Tensor) -> Any:
        """Map images (B, in_chans, H, W) of any size to logits (B, K)."""
        return self.forward_head(self.forward_features(x))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = 'NCHW',
        intermediates_only: bool = False,
    ) -> Any:
        """Return the last map and a list of the maps of ``indices``, or only the list."""
        assert output_fmt == 'NCHW', 'maps are (B, C, H, W)'
        kept_indices, last = feature_take_indices(len(self.backbone.stages), indices)
        maps = (_first_stages(self.backbone, last + 1) if stop_early else self.backbone)(x)
        chosen = [maps[index] for index in kept_indices]
        return chosen if intermediates_only else (maps[-1], chosen)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove the stages after the last of ``indices``, and the heads. Return the indices."""
        kept_indices, last = feature_take_indices(len(self.backbone.stages), indices)
        self.backbone = _first_stages(self.backbone, last + 1)
        self.maps = self.maps[: last + 1]
        if prune_head:
            self.reset_classifier(0, '')
        return kept_indices

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state dict as PyTorch does; published names are converted first."""
        if is_published(state_dict):
            state_dict = to_classifier_keys(state_dict)
        return super().load_state_dict(state_dict, *args, **kwargs)


class Features(FeatureGetterNet):
    """timm's feature extractor, which returns a list of maps; with activation checkpointing."""

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Compute blocks again in the backward pass, to save memory."""
        self.model.set_grad_checkpointing(enable)


class FeatureDict(Features):
    """timm's feature extractor that returns a dict of maps, by the index of their stage."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Map images (B, in_chans, H, W) to maps (B, C, H / stride, W / stride), rounded up."""
        return dict(zip(map(str, self.feature_info.out_indices), super().forward(x)))


# timm's own classes for lists and dicts call the children of a model one after the other.
FEATURES = dict(getter=Features, list=Features, dict=FeatureDict)


def _first_stages(backbone: CARE, number: int) -> CARE:
    """Return a backbone that shares the first stages of another one, and ends after them."""
    part = copy(backbone)
    norms = {key: norm for key, norm in backbone.out_norms.items() if int(key) < number}
    stages = dict(stages=backbone.stages[:number], out_norms=nn.ModuleDict(norms))
    part._modules = {**backbone._modules, **stages}
    part.out_indices = backbone.out_indices[:number]
    return part


def _filter_checkpoint(state: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """Convert and check the weights that timm is about to load, which it does not do strictly."""
    state, cfg = to_classifier_keys(state), model.pretrained_cfg
    name = cfg.get('file') or cfg.get('url') or 'the state dict'
    check_weights(model.backbone, state, 'backbone.', name)
    return state  # with the first convolution as it is, which timm adapts next


def _create(name: str, pretrained: bool, **kwargs: Any) -> nn.Module:
    """Build the CARE of a name such as ``'care_s1'`` for ``timm.create_model``."""
    cfgs = kwargs.get('pretrained_cfg'), kwargs.get('pretrained_cfg_overlay')
    source = timm.models.resolve_pretrained_cfg(name, *cfgs)
    if pretrained and not (source.has_weights or source.state_dict):
        raise RuntimeError(
            f'No hub has weights of CARE. {ADDRESSES} Give a file as checkpoint_path=FILE; for '
            'features_only, other classes or channels: pretrained_cfg_overlay=dict(file=FILE).'
        )
    kwargs.update(arch=name[len('care_') :], pretrained_filter_fn=_filter_checkpoint)
    kwargs['feature_cfg'] = dict(out_indices=(0, 1, 2, 3), feature_cls=Features)
    if kwargs.get('feature_cls') in FEATURES:
        kwargs['feature_cls'] = FEATURES[kwargs['feature_cls']]
    return timm.models.build_model_with_cfg(CAREClassifier, name, pretrained, **kwargs)


@timm.models.register_model
def care_s0(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Build a CARE-S0; ``kwargs`` are arguments of :class:`CAREClassifier` and timm's."""
    return _create('care_s0', pretrained, **kwargs)


@timm.models.register_model
def care_s1(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Build a CARE-S1; ``kwargs`` are arguments of :class:`CAREClassifier` and timm's."""
    return _create('care_s1', pretrained, **kwargs)


@timm.models.register_model
def care_s2(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Build a CARE-S2; ``kwargs`` are arguments of :class:`CAREClassifier` and timm's."""
    return _create('care_s2', pretrained, **kwargs)
