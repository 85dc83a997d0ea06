"""CARE by name in timm: ``import mmcare.timm``, then ``timm.create_model('care_s1')``.

Weights have the names of an mmpretrain classifier (``backbone.*``, ``head.*``); published ones are
renamed. timm reads the files, and takes EMA weights from those that have them.
"""

from collections.abc import Callable, Mapping
from typing import Any

from mmengine.model import initialize
from torch import Tensor, nn

from mmcare.compatibility import require
from mmcare.models import CARE
from mmcare.models.arguments import check
from mmcare.models.heads import TwoHeads
from mmcare.weights.fitting import check_fit, fit_backbone, shapes_of
from mmcare.weights.published import ADDRESSES, whole_classifier
from mmcare.weights.reading import load_pretrained

timm: Any = require('timm', 'mmcare.timm', 'timm')
feature_take_indices = timm.models._features.feature_take_indices
timm.models.register_notrace_module(CARE)  # torch.fx cannot follow its padding

# Mean, std, crop and interpolation of the released evaluation are timm's defaults.
CFG = dict(pool_size=(7, 7), first_conv='backbone.stem.conv', license='mit')
CFG['classifier'] = 'head.cls_head.fc', 'head.distill_head.fc'
NAMES = {f'care_{arch}.dist_in1k': CFG for arch in CARE.arch_zoo}
default_cfgs = timm.models.generate_default_cfgs(NAMES)


class CAREClassifier(nn.Module):
    """CARE with both published heads and timm's methods; ``kwargs`` are arguments of CARE."""

    apart = False

    def __init__(
        self,
        arch: str,
        num_classes: int = 1000,
        in_chans: int = 3,
        global_pool: str = 'avg',
        drop_rate: float = 0.0,
        device: Any = None,
        dtype: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.in_chans, self.drop_rate, self.global_pool = in_chans, drop_rate, global_pool
        self.backbone = CARE(arch, in_chans, **kwargs).to(device, dtype)
        if not load_pretrained(self.backbone, self.backbone.init_cfg):  # safely, unlike mmengine
            initialize(self.backbone, self.backbone.init_cfg)
        self.feature_info = [
            dict(num_chs=channels, reduction=4 * 2**index, module=f'backbone.stages.{index}')
            for index, channels in enumerate(self.backbone.out_channels)
        ]
        self.num_features = self.head_hidden_size = self.backbone.out_channels[-1]
        self.reset_classifier(num_classes)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the heads, or remove them if there are 0 classes; then the pool may be ``''``."""
        pool = self.global_pool if global_pool is None else global_pool
        good = pool == 'avg' or (pool == '' and num_classes == 0)
        check('global_pool', pool, "'avg', or '' with num_classes=0", good)
        self.num_classes, self.global_pool = num_classes, pool
        self.head = TwoHeads(self.num_features, num_classes, bool(pool), self.drop_rate)
        self.head.to(**timm.layers.get_device_dtype(self.backbone)).train(self.training)
        self.head.apart = self.apart
        initialize(self.head, dict(type='TruncNormal', layer='Linear', std=0.02, bias=0.0))

    def get_classifier(self) -> tuple[nn.Module, ...]:
        """Return the linear layers of the class head and the distillation head."""
        return tuple(module for module in self.head.modules() if isinstance(module, nn.Linear))

    def set_distilled_training(self, enable: bool = True) -> None:
        """Let training mode return the logits of both heads, as ``timm.task`` wants them."""
        self.apart = self.head.apart = enable

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Compute blocks again in the backward pass, to save memory."""
        for stage in self.backbone.stages:
            stage.recompute = enable

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return timm's patterns of layers: the stem, then stages or blocks."""
        stage = r'^backbone\.stages\.(\d+)'
        blocks = [(rf'{stage}\.downsample', (0,)), (rf'{stage}\.blocks\.(\d+)', None)]
        return dict(stem=r'^backbone\.stem', blocks=stage if coarse else blocks)

    def forward_features(self, x: Tensor) -> Tensor:
        """Map images (B, in_chans, H, W) to the last map (B, C, H / 32, W / 32), rounded up."""
        return self.backbone(x)[-1]

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Any:
        """Map (B, C, H, W) to logits (B, K), the mean of both heads, or to their input (B, C)."""
        return self.head(x, pre_logits)

    def forward(self, x: Tensor) -> Any:
        """Map images (B, in_chans, H, W) of any size to logits (B, K)."""
        return self.head(self.forward_features(x))

    def forward_intermediates(self, x: Tensor, indices: Any = None, **options: Any) -> Any:
        """Return the last map and a list of those of ``indices``, or the list alone, as in timm."""
        assert options.get('output_fmt', 'NCHW') == 'NCHW', 'maps are (B, C, H, W)'
        maps = self.backbone(x)
        taken = [maps[i] for i in feature_take_indices(len(maps), indices)[0]]
        return taken if options.get('intermediates_only') else (maps[-1], taken)

    def prune_intermediate_layers(self, indices: Any = 1, **options: Any) -> list[int]:
        """Remove the heads in any case, and stages behind the last of ``indices``; return these."""
        taken, last = feature_take_indices(len(self.backbone.stages), indices)
        self.backbone.stages = self.backbone.stages[: last + 1]
        self.backbone.out_indices = tuple(range(last + 1))
        self.num_features = self.head_hidden_size = self.backbone.out_channels[-1]
        self.reset_classifier(0, '')
        return taken

    def load_state_dict(
        self, state_dict: Mapping, strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the backbone whole or raise a CheckpointError; the heads, too, if ``strict``."""
        state = whole_classifier(state_dict)
        if not self.num_classes:
            state = {key: value for key, value in state.items() if not key.startswith('head.')}
        fit_backbone(state, 'backbone.', shapes_of(self.backbone), CARE.known_shapes)
        if strict:
            check_fit(state, shapes_of(self), f'The heads do not fit {self.num_classes} classes.')
        return super().load_state_dict(state, strict, assign)


def _entrypoint(arch: str) -> Callable[..., nn.Module]:
    def create(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        """Build a CARE for ``timm.create_model``."""
        given = kwargs.get('pretrained_cfg'), kwargs.get('pretrained_cfg_overlay')
        source = timm.models.resolve_pretrained_cfg(create.__name__, *given)
        if pretrained and not (source.has_weights or source.state_dict):
            raise RuntimeError(
                f'No hub has weights of CARE. {ADDRESSES} Give a file as checkpoint_path=FILE; for '
                'features_only, other classes or channels: pretrained_cfg_overlay=dict(file=FILE).'
            )
        kwargs.update(arch=arch, pretrained_filter_fn=lambda state, _: whole_classifier(state))
        kwargs.update(feature_cfg=dict(out_indices=(0, 1, 2, 3), feature_cls='getter'))
        name = create.__name__
        return timm.models.build_model_with_cfg(CAREClassifier, name, pretrained, **kwargs)

    create.__name__ = f'care_{arch}'
    return timm.models.register_model(create)


care_s0, care_s1, care_s2 = map(_entrypoint, CARE.arch_zoo)
