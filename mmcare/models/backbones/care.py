"""CARE, a mobile-friendly backbone with decoupled dual-interactive linear attention.

Zhou et al., "CARE Transformer: Mobile-Friendly Linear Visual Transformer via Decoupled Dual
Interaction", CVPR 2025, https://arxiv.org/abs/2411.16170. Equation numbers are the paper's. Where
its text and the published weights differ, the weights are followed; the paper's Tables 3 to 5 are
in :mod:`mmcare.models.backbones.care_ablation`.

A stage carries one tensor, the state. Its channels are [memory | global | near | far]: the memory Z
of width d', then three groups of d / 3, which together are the features X of width d.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from mmcv.cnn import build_activation_layer
from mmengine.model import BaseModule
from mmengine.model.weight_init import update_init_info
from mmengine.registry import MODELS as MMENGINE_MODELS
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from mmcare.compatibility import autocast_off
from mmcare.deployment import check_fusible, fuse, is_fusible
from mmcare.models.arguments import NUM_STAGES, resolve_arch
from mmcare.models.fusing import build_norm
from mmcare.models.loading import check_care, pretrained_cfgs, read_state_dict
from mmcare.models.recompute import recompute
from mmcare.registry import MODELS
from mmcare.weights.strict import check_weights

STEM_STRIDE = 4
TOTAL_STRIDE = STEM_STRIDE * 2 ** (NUM_STAGES - 1)
RECOMPUTATIONS = (False, True, 'activations')


def is_batch_norm(module: nn.Module) -> bool:
    """Whether a module is a batch norm of PyTorch, or MMCV's for ``sync_bn='mmcv'``.

    MMCV's is not a subclass of PyTorch's, and mmcv-lite cannot import it.
    """
    return isinstance(module, _BatchNorm) or type(module).__name__ == 'SyncBatchNorm'


def depthwise_conv(channels: int, height: int, width: int) -> nn.Conv2d:
    """Return a depth-wise convolution, zero-padded so that it keeps height and width."""
    padding = height // 2, width // 2
    return nn.Conv2d(channels, channels, (height, width), padding=padding, groups=channels)


def layout(*maps: Tensor) -> torch.memory_format:
    """Return channels-last if one of the maps, which may be slices of maps, is channels-last."""
    last = any(x.stride(1) < x.stride(3) for x in maps)
    return torch.channels_last if last else torch.contiguous_format


def phi(x: Tensor) -> Tensor:
    """Compute ELU + 1 as exp(min(x, 0)) + max(x, 0), which does not cancel far below zero."""
    return x.clamp(max=0.0).exp() + x.relu()  # at 0, only the first has a gradient: 1, as of ELU


class LinearAttention(nn.Module):
    """Multi-head linear attention over all positions, Eq. 2 and 6, with :func:`phi`.

    out = phi(q) (phi(k)^T v / N) / (phi(q) . mean_N phi(k) + eps)

    q and k come from one convolution, v is the input itself, and there is no output projection. The
    products run at least in float32, with or without autocast: sums over thousands of positions,
    cubic in the activations, exceed the range of float16. Exported networks compute the same within
    this range, see :mod:`mmcare.models.averaged_attention`.

    Args:
        channels: Width of the input, a multiple of ``head_channels``.
        head_channels: Channels C of a head; heads are contiguous blocks of q, k and v alike.
    """

    def __init__(self, channels: int, head_channels: int) -> None:
        super().__init__()
        if channels % head_channels:
            raise ValueError(f'heads of {head_channels} channels do not divide {channels} channels')
        self.head_channels = head_channels
        self.eps = 1e-6
        self.query_key = nn.Conv2d(channels, 2 * channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, heads * C, H, W) to the same shape and dtype."""
        query_key, dtype = self.query_key(x), torch.promote_types(x.dtype, torch.float32)
        with autocast_off(x):
            out = self.attend(query_key.to(dtype), x.to(dtype)).reshape(x.shape).to(x.dtype)
        return out.contiguous(memory_format=layout(x))

    def attend(self, query_key: Tensor, values: Tensor) -> Tensor:
        """Map (B, 2 * heads * C, H, W) and (B, heads * C, H, W) to (B * heads, C, H * W)."""
        queries, keys = phi(query_key).chunk(2, dim=1)
        queries, keys, values = map(self.split_heads, (queries, keys, values))
        # A row of ones below the values gives the denominator. Neither sum is divided by N.
        values = F.pad(values, (0, 0, 0, 1), value=1.0)
        sums = torch.bmm(torch.bmm(values, keys.transpose(1, 2)), queries)
        return sums[:, :-1] / (sums[:, -1:] + self.eps * values.shape[2])

    def split_heads(self, x: Tensor) -> Tensor:
        """Map (B, heads * C, H, W) to (B * heads, C, H * W)."""
        return x.reshape(-1, self.head_channels, x.shape[2] * x.shape[3])


class StripConv(nn.Module):
    """Depth-wise 11x1 plus 1x11, in place of attention where maps are large (Section 3.5)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.vertical = depthwise_conv(channels, 11, 1)
        self.horizontal = depthwise_conv(channels, 1, 11)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to the same shape."""
        return self.vertical(x) + self.horizontal(x)


class LocalLearner(nn.Module):
    """Local inductive bias at two scales, Eq. 14 to 16: depth-wise 3x3 and 7x7, one per group."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv3x3 = depthwise_conv(channels, 3, 3)
        self.conv7x7 = depthwise_conv(channels, 7, 7)

    def forward(self, near: Tensor, far: Tensor) -> tuple[Tensor, ...]:
        """Map two groups (B, C, H, W) to the same shapes."""
        return self.conv3x3(near), self.conv7x7(far)


class Mixer(nn.Module):
    """Global and local information, learned separately: Eq. 5 to 7.

    Args:
        widths: Channels of the groups, d in total; the first group is global.
        global_learner: Takes the first group.
        local_learner: Takes the other groups, if there are any, and returns as many.
    """

    def __init__(
        self, widths: tuple[int, ...], global_learner: nn.Module, local_learner: nn.Module
    ) -> None:
        super().__init__()
        self.widths = widths
        self.global_learner = global_learner
        self.local_learner = local_learner

    def forward(self, first: Tensor, *local: Tensor) -> Tensor:
        """Map groups of channels, each (B, C, H, W), to all features (B, d, H, W)."""
        features = self.global_learner(first)
        return torch.cat([features, *self.local_learner(*local)], dim=1) if local else features


class Interaction(nn.Module):
    """Eq. 13: x + conv1x1(depthwise3x3(act(conv1x1(norm(x))))).

    Args:
        channels: Width C of the input.
        expansion: Latent width in multiples of C.
        norm_cfg, act_cfg: Configs of norm and activation.
        recompute: Compute everything after the first convolution again in the backward pass.
        project: False: end after the depth-wise convolution, as the published networks do.
    """

    def __init__(
        self,
        channels: int,
        expansion: int,
        norm_cfg: dict,
        act_cfg: dict,
        recompute: bool = False,
        project: bool = True,
    ) -> None:
        super().__init__()
        self.recompute = recompute
        self.norm = build_norm(norm_cfg, channels)
        self.expand = nn.Conv2d(channels, channels * expansion, 1)
        self.act = build_activation_layer(act_cfg)
        if recompute and getattr(self.act, 'inplace', False):
            self.act.inplace = False  # its input is kept, to compute it again
        self.depthwise = depthwise_conv(channels * expansion, 3, 3)
        self.project = nn.Conv2d(channels * expansion, channels, 1) if project else None

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to the same shape; without projection to (B, expansion * C, H, W)."""
        # The latent map has no name here, so that it is freed once its activation is computed.
        if self.recompute and torch.is_grad_enabled():
            mixed = checkpoint(self._mix, self.expand(self.norm(x)), use_reentrant=False)
        else:
            mixed = self._mix(self.expand(self.norm(x)))
        return mixed if self.project is None else x + mixed

    def _mix(self, latent: Tensor) -> Tensor:
        latent = self.act(latent)
        latent = self.depthwise(latent)
        return latent if self.project is None else self.project(latent)


class CAREBlock(nn.Module):
    """Eq. 12: global and local features interact, then both interact with the memory.

    Args:
        memory_width: Channels of the memory, d'.
        mixer: Learns global and local information from groups of features.
        inter1: Interaction of the features, (B, d, H, W).
        inter2: Interaction of memory and features, (B, d' + d, H, W).
        drop_path_rate: Probability with which a sample skips the block in training.
        layer_scale: Initial value of gamma, one factor per channel. None: return the output of
            ``inter2``, without gamma, shortcut and drop path, as the last block of the published
            networks does.
    """

    def __init__(
        self,
        memory_width: int,
        mixer: Mixer,
        inter1: nn.Module,
        inter2: nn.Module,
        drop_path_rate: float,
        layer_scale: float | None,
    ) -> None:
        super().__init__()
        self.widths = [memory_width, *mixer.widths]
        self.mixer = mixer
        self.inter1 = inter1
        self.inter2 = inter2
        self.gamma: nn.Parameter | None = None
        if layer_scale is not None:
            self.drop_path_rate = drop_path_rate
            self.gamma = nn.Parameter(layer_scale * torch.ones(sum(self.widths)))

    def forward(self, state: Tensor) -> Tensor:
        """Map the state (B, d' + d, H, W) to the same shape, or to the output of ``inter2``."""
        memory, *groups = state.split(self.widths, dim=1)  # [memory | global | near | far]
        features = self.inter1(self.mixer(*groups))
        update = self.inter2(torch.cat([memory, features], dim=1))
        if self.gamma is None:
            return update
        scale = self.gamma[:, None, None]
        if self.training and self.drop_path_rate > 0.0:
            # Dropout on one number for each sample, not on the map.
            scale = scale * F.dropout(scale.new_ones(len(state), 1, 1, 1), self.drop_path_rate)
        return state + scale * update


def missing(side: int) -> int:
    """Return the number of pixels by which a side is padded to a multiple of 32."""
    # ONNX rounds quotients of negative numbers up, so that -side % 32 would be wrong there.
    return (side + TOTAL_STRIDE - 1) // TOTAL_STRIDE * TOTAL_STRIDE - side


def crop(x: Tensor, images: Tensor, stride: int, weight: Tensor) -> Tensor:
    """Crop a map to ceil(H / stride) x ceil(W / stride), in the memory format of images or weight.

    The result is a copy: mmcv's operators silently misread views, and the channels-last maps that a
    layer norm returns.
    """
    height, width = images.shape[2:]
    # Negative padding copies, and needs no comparison of sizes, which tracers would record.
    x = F.pad(x, (0, -(missing(width) // stride), 0, -(missing(height) // stride)))
    return x.contiguous(memory_format=layout(images, weight))


class Stem(nn.Module):
    """4x4 convolution of stride 4, then a norm."""

    def __init__(self, in_channels: int, channels: int, norm_cfg: dict) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, channels, STEM_STRIDE, STEM_STRIDE)
        self.norm = build_norm(norm_cfg, channels)

    def forward(self, image: Tensor) -> Tensor:
        """Map images (B, C, H, W) to the first state (B, d' + d, H / 4, W / 4)."""
        return self.norm(self.conv(image))


class Downsampling(nn.Module):
    """Norm, then a 2x2 convolution of stride 2 on memory and features at once: Eq. 11."""

    def __init__(self, in_channels: int, channels: int, norm_cfg: dict) -> None:
        super().__init__()
        self.norm = build_norm(norm_cfg, in_channels)
        self.conv = nn.Conv2d(in_channels, channels, 2, 2)

    def forward(self, state: Tensor) -> Tensor:
        """Map a state (B, C, H, W) to the next stage's (B, d' + d, H / 2, W / 2)."""
        return self.conv(self.norm(state))


class Stage(nn.Module):
    """Downsampling (none in stage 1), then blocks; ``recompute`` as in ``with_cp=True``."""

    def __init__(self, downsample: nn.Module, blocks: Sequence[CAREBlock], recompute: bool) -> None:
        super().__init__()
        self.downsample = downsample
        self.blocks = nn.ModuleList(blocks)
        self.recompute = recompute

    def forward(self, state: Tensor) -> Tensor:
        """Map the previous stage's state to this stage's."""
        state = self.downsample(state)
        for block in self.blocks:
            again = self.recompute and torch.is_grad_enabled()
            state = recompute(block, state) if again else block(state)
        return state


@MODELS.register_module()
@MMENGINE_MODELS.register_module()
class CARE(BaseModule):
    """CARE backbone: one state [memory | features] goes through four stages.

    An image of any size is zero-padded once, right and bottom, to a multiple of 32, and each map is
    cropped to ceil(H / stride) x ceil(W / stride); strides are 4, 8, 16 and 32. The attention of
    stages 3 and 4 sees the whole image, padding included. So the padding of a batch changes
    features a little, and the features of a tile differ from those of the whole image.

    Args:
        arch: ``'s0'``, ``'s1'``, ``'s2'``, or a dict with a value for each of the four stages:
            ``depths``; ``widths`` d, divisible by 3; ``memory_widths`` d'; ``expansions``, pairs of
            latent widths of the two interactions in multiples of their input's; ``head_channels``
            of the attention, dividing d / 3 (stages 1 and 2 of a CARE have no attention).
        in_channels: Channels of the image.
        out_indices: Stages whose output is returned, ascending; negative ones count from the end.
            Later stages are not built.
        drop_path_rate: Stochastic depth; rises linearly from 0 to this rate over all blocks.
        layer_scale_init_value: Initial value of each block's layer scale (gamma). None: 1e-6, or
            0.1 with ``from_scratch``.
        frozen_stages: -1: none; n: the stem and the first n stages (evaluation mode, no gradient).
        norm_eval: Keep all batch norms of the backbone in evaluation mode while training.
        norm_cfg, act_cfg: Configs of norms and activations, by default those of the published
            weights: batch norm and exact (erf) GELU.
        with_cp: Compute again in the backward pass to save memory: whole blocks (True), or only
            activations and depth-wise convolutions of the interactions (``'activations'``).
        out_norm_cfg: Config of a norm on each output map; None for raw stage outputs, but
            ``norm_cfg`` with ``from_scratch``.
        expand_last: Omit the projection of the last block, as in the published networks: it returns
            its latent channels (1024, or 1536 for S2). False: a last block like the others.
        deploy: Build the network as :meth:`switch_to_deploy` leaves it, for fused weights.
        from_scratch: Initialize for training on a small data set without published weights:
            Kaiming in place of a std of 0.02, layer scales of 0.1 in place of 1e-6, and
            ``norm_cfg`` also on each output map. These values are ours. The paper's are for 300
            epochs of ImageNet: with them, a short training hardly uses the blocks. Adam changes a
            parameter by the learning rate in each step, so layer scales also need three times the
            rate: see ``configs/_base_/from_scratch.py``.
        init_cfg: By default truncated normal, std 0.02, biases 0. ``dict(type='Pretrained',
            checkpoint=...)`` takes published files, converted ones and checkpoints of MM toolboxes;
            weights for RGB are adapted to other ``in_channels``.

    Raises:
        ValueError: If the value of an argument is not allowed.

    Example:
        >>> backbone = CARE('s1').eval()
        >>> backbone.out_channels
        (32, 64, 128, 1024)
        >>> [tuple(stage_map.shape) for stage_map in backbone(torch.rand(1, 3, 100, 224))]
        [(1, 32, 25, 56), (1, 64, 13, 28), (1, 128, 7, 14), (1, 1024, 4, 7)]
    """

    init_cfg: Any
    num_strip_stages = 2  # the global learner is StripConv in stages 1 and 2, then attention
    # A further arch also needs a config for ImageNet: configs/imagenet/care_NAME_in1k.py.
    arch_zoo: ClassVar[dict[str, dict[str, tuple]]] = {
        's0': dict(
            depths=(2, 4, 8, 4),
            widths=(24, 48, 96, 192),
            memory_widths=(8, 16, 32, 64),
            expansions=((2, 2), (2, 4), (4, 4), (4, 4)),
            head_channels=(1, 1, 16, 32),
        ),
        's1': dict(
            depths=(3, 6, 10, 6),
            widths=(24, 48, 96, 192),
            memory_widths=(8, 16, 32, 64),
            expansions=((2, 4), (2, 4), (4, 4), (4, 4)),
            head_channels=(1, 1, 16, 32),
        ),
        's2': dict(
            depths=(3, 6, 10, 6),
            widths=(24, 48, 144, 288),
            memory_widths=(8, 16, 48, 96),
            expansions=((4, 4), (4, 4), (4, 4), (4, 4)),
            head_channels=(1, 1, 16, 32),
        ),
    }

    def __init__(
        self,
        arch: str | Mapping[str, Sequence] = 's0',
        in_channels: int = 3,
        out_indices: int | Sequence[int] = (0, 1, 2, 3),
        drop_path_rate: float = 0.0,
        layer_scale_init_value: float | None = None,
        frozen_stages: int = -1,
        norm_eval: bool = False,
        norm_cfg: dict | None = None,
        act_cfg: dict | None = None,
        with_cp: bool | str = False,
        out_norm_cfg: dict | None = None,
        expand_last: bool = True,
        deploy: bool = False,
        from_scratch: bool = False,
        init_cfg: dict | list[dict] | None = None,
    ) -> None:
        convs = dict(type='TruncNormal', layer=['Conv2d', 'Linear'], std=0.02, bias=0.0)
        if from_scratch:
            convs = dict(type='Kaiming', layer=['Conv2d'], mode='fan_in', distribution='normal')
        norms = dict(type='Constant', layer=['_BatchNorm', 'LayerNorm', 'GroupNorm'], val=1.0)
        super().__init__(init_cfg or [convs, norms])
        if from_scratch and pretrained_cfgs(self):
            raise ValueError('from_scratch must be False where init_cfg names a file, got True')
        self.arch = resolve_arch(arch, self.arch_zoo)
        indices = [out_indices] if isinstance(out_indices, int) else list(out_indices)
        self.out_indices = tuple(index + NUM_STAGES if index < 0 else index for index in indices)
        ascending = sorted({*self.out_indices} & {*range(NUM_STAGES)})
        if not ascending or list(self.out_indices) != ascending:
            raise ValueError(f'out_indices must be some of -4 to 3, ascending, got {out_indices!r}')
        if not 0 <= drop_path_rate < 1:
            raise ValueError(f'drop_path_rate must be in [0, 1), got {drop_path_rate!r}')
        if frozen_stages not in range(-1, NUM_STAGES + 1):
            raise ValueError(f'frozen_stages must be -1 to 4, got {frozen_stages!r}')
        if type(with_cp) not in (bool, str) or with_cp not in RECOMPUTATIONS:  # 1 == True
            raise ValueError(f'with_cp must be one of {RECOMPUTATIONS}, got {with_cp!r}')
        if layer_scale_init_value is None:
            layer_scale_init_value = 0.1 if from_scratch else 1e-6
        self.layer_scale_init_value = layer_scale_init_value
        self.frozen_stages = frozen_stages
        self.norm_eval = norm_eval
        self.norm_cfg = norm_cfg or dict(type='BN')
        self.act_cfg = act_cfg or dict(type='GELU')
        self.with_cp = with_cp
        self.expand_last = expand_last
        self.deploy = False

        # On the CPU, since a network on the meta device also needs the rates.
        rates = torch.linspace(0, drop_path_rate, sum(self.arch['depths']), device='cpu')
        self.stem = Stem(in_channels, self.state_width(0), self.norm_cfg)
        self.stages = nn.ModuleList(
            self._build_stage(index, part.tolist())
            for index, part in enumerate(rates.split(self.arch['depths']))
            if index <= self.out_indices[-1]
        )
        self.out_norms = nn.ModuleDict()
        if from_scratch:
            out_norm_cfg = out_norm_cfg or self.norm_cfg
        if out_norm_cfg is not None:
            for index, channels in zip(self.out_indices, self.out_channels):
                self.out_norms[str(index)] = build_norm(out_norm_cfg, channels)
        self._freeze()  # now, since distributed wrappers ask once which parameters train
        if deploy:
            self.switch_to_deploy()

    def state_width(self, index: int) -> int:
        """Channels of the state in a stage, d' + d."""
        return self.arch['memory_widths'][index] + self.arch['widths'][index]

    @property
    def out_channels(self) -> tuple[int, ...]:
        """Channels of each map that ``forward`` returns."""
        widths = [self.state_width(index) for index in range(NUM_STAGES)]
        if self.expand_last:
            widths[-1] *= self.arch['expansions'][-1][1]
        return tuple(widths[index] for index in self.out_indices)

    def _build_stage(self, index: int, drop_path_rates: Sequence[float]) -> Stage:
        downsample: nn.Module = nn.Identity()
        if index > 0:
            widths = self.state_width(index - 1), self.state_width(index)
            downsample = Downsampling(*widths, self.norm_cfg)
        ends = [False] * (len(drop_path_rates) - 1) + [self.expand_last and index == NUM_STAGES - 1]
        blocks = [
            CAREBlock(
                self.arch['memory_widths'][index],
                self._build_mixer(index),
                self._build_inter1(index),
                self._build_inter2(index, project=not end),
                rate,
                None if end else self.layer_scale_init_value,
            )
            for rate, end in zip(drop_path_rates, ends)
        ]
        return Stage(downsample, blocks, recompute=self.with_cp is True)

    def _build_mixer(self, index: int) -> Mixer:
        group, head = self.arch['widths'][index] // 3, self.arch['head_channels'][index]
        learners = self.build_global_learner(index, group, head), LocalLearner(group)
        return Mixer((group, group, group), *learners)

    def build_global_learner(self, index: int, channels: int, head_channels: int) -> nn.Module:
        """Build the global learner, (B, channels, H, W) to the same shape, of a block of a stage.

        Subclasses can override it to use another mixer. The stage's ``index`` is 0 to 3, and
        ``channels`` is d / 3.
        """
        strips = index < self.num_strip_stages
        return StripConv(channels) if strips else LinearAttention(channels, head_channels)

    def _build_inter1(self, index: int) -> nn.Module:
        return self._build_interaction(
            self.arch['widths'][index], self.arch['expansions'][index][0]
        )

    def _build_inter2(self, index: int, project: bool) -> nn.Module:
        expansion = self.arch['expansions'][index][1]
        return self._build_interaction(self.state_width(index), expansion, project)

    def _build_interaction(self, width: int, expansion: int, project: bool = True) -> nn.Module:
        recompute = self.with_cp == 'activations'
        return Interaction(width, expansion, self.norm_cfg, self.act_cfg, recompute, project)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Map images (B, in_channels, H, W) of any size to the outputs of stages.

        These are (B, C, ceil(H / stride), ceil(W / stride)), with C of :attr:`out_channels`, for
        each of ``out_indices``.
        """
        height, width = x.shape[2:]
        # A wrapper, such as FSDP, may hide the convolution.
        weight = next((p for p in self.stem.parameters() if p.dim() == 4), x)
        state = self.stem(F.pad(x, (0, missing(width), 0, missing(height))))
        outputs = []
        for index, stage in enumerate(self.stages):
            state = stage(state)
            if index in self.out_indices:
                output = self.out_norms[str(index)](state) if self.out_norms else state
                outputs.append(crop(output, x, STEM_STRIDE * 2**index, weight))
        return tuple(outputs)

    def train(self, mode: bool = True) -> CARE:
        """Set training or evaluation mode; frozen stages and norms stay in evaluation mode.

        Raises:
            RuntimeError: If ``mode`` is True and the network is fused.
        """
        if mode and self.deploy:
            raise RuntimeError('this CARE is fused (deploy=True): it has no norms left to train')
        super().train(mode)
        self._freeze()
        if mode and self.norm_eval:
            for module in self.modules():
                if is_batch_norm(module):
                    module.eval()
        return self

    def _freeze(self) -> None:
        frozen = [self.stem, *self.stages[: self.frozen_stages]] if self.frozen_stages >= 0 else []
        for part in frozen:
            part.eval()
            part.requires_grad_(False)

    def switch_to_deploy(self) -> None:
        """Fuse each batch norm into the convolution next to it, in place, for evaluation only.

        Only weights change. Norms of other kinds stay, and so do those of ``out_norm_cfg``. The
        state dict gains the key ``folded``, so that fused weights fit fused networks only.

        Raises:
            RuntimeError: If a norm or its convolution has hooks, parametrizations or another
                forward, which fusing would lose; the network is then unchanged.
        """
        if self.deploy:
            return
        self.eval()
        convs = {
            name: 'expand' if isinstance(module, Interaction) else 'conv'
            for name, module in self.named_modules()
            if isinstance(module, (Stem, Downsampling, Interaction)) and is_fusible(module.norm)
        }
        for name, conv in convs.items():
            for part in (f'{name}.norm', f'{name}.{conv}'):
                check_fusible(part, self.get_submodule(part))
        for name, conv in convs.items():
            owner: Any = self.get_submodule(name)
            owner.norm = fuse(getattr(owner, conv), owner.norm, name != 'stem')
        self.deploy = True
        # State-dict keys: do not rename this one, nor `folded_head` of the heads.
        self.register_buffer('folded', self.stem.conv.weight.new_ones(()))

    def get_layer_depth(self, param_name: str, prefix: str = '') -> tuple[int, int]:
        """Return the depth of a parameter and the number of layers, for learning-rate decay.

        The stem is layer 0, each block a layer with the downsampling before it, and everything
        else (output norms, necks, heads) the last layer. ``prefix`` is the backbone's name in the
        model, such as ``'backbone.'``.
        """
        depths = self.arch['depths'][: len(self.stages)]
        last = sum(depths) + 1
        if not param_name.startswith(prefix):
            return last, last + 1
        part, *rest = param_name[len(prefix) :].split('.')
        if part == 'stages':
            block = int(rest[2]) if rest[1] == 'blocks' else 0
            return sum(depths[: int(rest[0])]) + block + 1, last + 1
        return 0 if part == 'stem' else last, last + 1

    def init_weights(self) -> None:
        """Initialize as ``init_cfg`` says.

        Raises:
            TypeError: If ``type='Pretrained'`` has an unknown argument.
            ValueError: If it names no file.
            FileNotFoundError: If there is no such file; the message says where weights are.
            CheckpointError: If it cannot be read without running code, or does not fill the CARE.
        """
        init_cfg: Any = self.init_cfg
        files = pretrained_cfgs(self)
        for cfg in files:
            if not cfg.get('checkpoint'):
                raise ValueError(f'init_cfg must be a Pretrained with checkpoint=FILE, got {cfg!r}')
        states = []
        for cfg in [] if self.is_init else files:
            arguments = {k: v for k, v in cfg.items() if k not in ('type', '_scope_')}
            states.append(read_state_dict(self, **arguments))
        cfgs = init_cfg if isinstance(init_cfg, (list, tuple)) else [init_cfg]
        self.init_cfg = [cfg for cfg in cfgs if cfg not in files]
        try:
            super().init_weights()
        finally:
            self.init_cfg = init_cfg
        for cfg, state in zip(files, states):
            self.load_state_dict(state, strict=False)
            if hasattr(self, '_params_init_info'):  # set by the model around it, for the log
                update_init_info(self, f'Loaded from {cfg["checkpoint"]}')


check_weights.register(CARE, check_care)
