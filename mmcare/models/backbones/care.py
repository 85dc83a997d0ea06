"""CARE transformers, mobile-friendly backbones with decoupled dual-interactive linear attention.

Zhou et al., "CARE Transformer: Mobile-Friendly Linear Visual Transformer via Decoupled Dual
Interaction", CVPR 2025, https://arxiv.org/abs/2411.16170. Equation numbers in this package are
the paper's. Where the paper's text and the published weights differ, the weights are followed:
the kernel of the attention is ELU + 1 with a normaliser (``feature_map='identity'`` gives the
text's form), q and k are projected but not v and the output, and the last block of the network
keeps its latent channels (``expand_last=False`` gives a block like the others).
"""

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar, Self, cast

import torch
import torch.nn.functional as F
from mmcv.cnn import build_activation_layer
from mmcv.cnn.bricks import DropPath
from mmengine.model import BaseModule
from mmengine.registry import MODELS as MMENGINE_MODELS
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mmcare.checkpoint import (
    check_init_cfg,
    check_pretrained_file,
    name_of_pretrained_file,
    naming,
    prepare_backbone_state,
)
from mmcare.models.arguments import check_numbers, check_switches
from mmcare.models.layers import (
    FEATURE_MAPS,
    DecoupledMixer,
    ExpandingInteraction,
    Foldable,
    FoldedBlock,
    GlobalMixer,
    Interaction,
    LinearAttention,
    LocalLearner,
    SingleScaleLearner,
    StackedMixer,
    StripConv,
    build_norm,
    fold_conv_norm,
    fold_norm_conv,
    recompute,
)
from mmcare.registry import MODELS

NUM_STAGES = 4
STEM_STRIDE = 4
TOTAL_STRIDE = STEM_STRIDE * 2 ** (NUM_STAGES - 1)
DECOUPLINGS = ('asymmetric', 'symmetric', 'stacked', 'global_only')
TRIAL_CHANNELS = 32
NUM_STRIP_STAGES = 2  # stages 1 and 2 aggregate with strip convolutions, 3 and 4 with attention


class DualInteraction(nn.Module):
    """Eq. 12: local and global features interact, then both interact with the memory.

    Args:
        memory_width: Channels of the memory Z, d'; they come first in the state. 0: no memory.
        width: Channels of the features X, d.
        mixer: Learns global and local information from the features.
        inter1: Interaction of the mixed features, (B, d, H, W).
        inter2: Interaction of memory and features, (B, d' + d, H, W).
    """

    def __init__(
        self, memory_width: int, width: int, mixer: nn.Module, inter1: nn.Module, inter2: nn.Module
    ) -> None:
        super().__init__()
        self.split_widths = (memory_width, width) if memory_width else (width,)
        self.mixer = mixer
        self.inter1 = inter1
        self.inter2 = inter2

    def forward(self, state: Tensor) -> Tensor:
        """Map the state (B, d' + d, H, W) to what ``inter2`` puts out."""
        *memory, features = state.split(self.split_widths, dim=1)
        features = self.inter1(self.mixer(features))
        return self.inter2(torch.cat([*memory, features], dim=1))


class CAREBlock(DualInteraction):
    """A block of the network: a dual interaction, scaled per channel and added to the state.

    The very last block of the published networks is a bare :class:`DualInteraction` that ends in
    an :class:`ExpandingInteraction` (or in nothing, with ``inter2=False``). The released training
    script drops that whole map for a sample with the drop path rate, which is left out here.

    Args:
        memory_width, width, mixer, inter1, inter2: See :class:`DualInteraction`.
        drop_path_rate: Probability with which a sample skips the block in training.
        layer_scale_init_value: Initial value of gamma, one factor a channel.
    """

    def __init__(
        self,
        memory_width: int,
        width: int,
        mixer: nn.Module,
        inter1: nn.Module,
        inter2: nn.Module,
        drop_path_rate: float,
        layer_scale_init_value: float,
    ) -> None:
        super().__init__(memory_width, width, mixer, inter1, inter2)
        self.gamma = nn.Parameter(
            torch.full((memory_width + width,), float(layer_scale_init_value))
        )
        self.drop_path = DropPath(drop_path_rate)

    def forward(self, state: Tensor) -> Tensor:
        """Map (B, d' + d, H, W) to (B, d' + d, H, W)."""
        return state + self.drop_path(self.gamma[:, None, None] * super().forward(state))


class Stage(nn.Module):
    """Downsampling, then blocks.

    Args:
        downsample: Norm and strided convolution of Eq. 11; empty, the identity, in stage 1.
        blocks: The blocks, in order.
        with_cp: Keep only each block's input and recompute the rest in the backward pass.
    """

    def __init__(
        self, downsample: nn.Sequential, blocks: Sequence[nn.Module], with_cp: bool
    ) -> None:
        super().__init__()
        self.downsample = downsample
        self.blocks = nn.ModuleList(blocks)
        self.with_cp = with_cp

    def forward(self, state: Tensor) -> Tensor:
        """Map the previous stage's state to this stage's, half as high and wide."""
        state = self.downsample(state)
        for block in self.blocks:
            if self.with_cp and torch.is_grad_enabled():
                state = recompute(block, state)
            else:
                state = block(state)
        return state


@MODELS.register_module()
@MMENGINE_MODELS.register_module()
class CARE(Foldable, BaseModule):
    """CARE backbone: one state [memory | features] goes through four stages.

    The linear attention of stages 3 and 4 is global: every position of a map depends on the whole
    image *as it is fed*, zero padding included. Features, and so predictions, change (a little)
    with how much padding a batch brings: evaluate with batches of one image or of equal sizes when
    figures must repeat, and do not expect tiles of an image to agree with the image.

    An image of any size is zero-padded once, right and bottom, to a multiple of 32, and each map
    is cropped to ceil(H / stride) x ceil(W / stride); strides are 4, 8, 16 and 32.

    Args:
        arch: ``'s0'``, ``'s1'``, ``'s2'``, or a dict with the keys below, a value for each of the
            four stages:

            - ``depths``: number of blocks;
            - ``widths``: channels of the features, d; divisible by 3;
            - ``memory_widths``: channels of the memory, d';
            - ``expansions``: pairs (r1, r2), the latent widths of the two interactions in
              multiples of their input's;
            - ``head_channels``: channels of an attention head; divides a third of the width (used
              in stages 3 and 4, the first two have no attention).
        in_channels: Channels of the image.
        out_indices: Stages whose output is returned, ascending, 0 to 3. Stages behind the last
            one are not built.
        drop_path_rate: Stochastic depth; rises linearly from 0 to this rate over all blocks of
            the network.
        layer_scale_init_value: Initial value of each block's layer scale (gamma).
        frozen_stages: -1: none; 0: the stem is frozen (evaluation mode, no gradient); n: the stem
            and the first n stages.
        norm_eval: Keep all batch norms of the backbone in evaluation mode while training.
        norm_cfg: Config of the norms.
        act_cfg: Config of the activations. The published weights need the exact (erf) GELU.
        with_cp: Trade compute for memory: recompute each block in the backward pass.
        out_norm_cfg: Config of a norm on each output map; None for raw stage outputs.
        expand_last: The published last block, whose output has the latent channels (1024, or 1536
            for S2). False: a last block like the others, whose output is the state.
        feature_map: Kernel of the attention: ``'elu'`` as released, ``'identity'`` as in the
            paper's text.
        decoupling: How features are shared out between global and local learners (Table 3):

            - ``'asymmetric'``: a third of the channels is global, two thirds are local;
            - ``'symmetric'``: half and half, with as many attention heads as before, so that heads
              are wider; widths must be divisible by 4 (by 2 without ``multi_scale``), and the
              number of heads must divide half the width;
            - ``'stacked'``: no split; local, global and again local learner on all channels;
              widths must be even (not without ``multi_scale``);
            - ``'global_only'``: no split, no local learner.
        inter1: Interaction of local and global features, Eq. 13 (Table 4).
        inter2: Interaction of memory and features (Table 4). Without it ``expand_last`` has
            nothing to expand: the last block's output is the concatenation itself, without layer
            scale or shortcut.
        memory: The memory Z (Table 4); False is d' = 0, whatever ``arch`` says.
        early_conv: Strip convolutions in stages 1 and 2 (Table 5); False: linear attention there
            too.
        multi_scale: Local learner of 3x3 and 7x7 (Table 5); False: 3x3 on all of its channels.
            Not with ``decoupling='global_only'``, which has no local learner.
        deploy: Build the folded network, for evaluation only, which takes the weights of a folded
            one, see :meth:`switch_to_deploy`.
        init_cfg: Config of the initialisation. By default truncated normal, std 0.02, biases 0;
            ``dict(type='Pretrained', checkpoint=...)`` takes published files, converted ones and
            checkpoints of MM toolboxes, whole or not at all.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is outside of what is allowed. The arguments from
            ``decoupling`` on, ablations of the paper, combine freely; a combination that is not
            well defined is named: symmetric decoupling of widths or heads that do not divide
            (which is so for the three published archs with ``early_conv=False``), stacked
            decoupling of odd widths, and ``'global_only'`` with ``multi_scale=False``.

    Example:
        >>> import torch
        >>> from mmcare.models import CARE
        >>> backbone = CARE('s1').eval()
        >>> backbone.out_channels
        (32, 64, 128, 1024)
        >>> with torch.no_grad():
        ...     maps = backbone(torch.rand(1, 3, 100, 224))
        >>> for stage_map in maps:
        ...     print(tuple(stage_map.shape))
        (1, 32, 25, 56)
        (1, 64, 13, 28)
        (1, 128, 7, 14)
        (1, 1024, 4, 7)
    """

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

    init_cfg: dict | list[dict] | None

    def __init__(
        self,
        arch: str | Mapping[str, Sequence] = 's0',
        in_channels: int = 3,
        out_indices: Sequence[int] = (0, 1, 2, 3),
        drop_path_rate: float = 0.0,
        layer_scale_init_value: float = 1e-6,
        frozen_stages: int = -1,
        norm_eval: bool = False,
        norm_cfg: dict | None = None,
        act_cfg: dict | None = None,
        with_cp: bool = False,
        out_norm_cfg: dict | None = None,
        expand_last: bool = True,
        feature_map: str = 'elu',
        decoupling: str = 'asymmetric',
        inter1: bool = True,
        inter2: bool = True,
        memory: bool = True,
        early_conv: bool = True,
        multi_scale: bool = True,
        deploy: bool = False,
        init_cfg: dict | list[dict] | None = None,
    ) -> None:
        self.arch = check_arch(arch, self.arch_zoo)
        check_switches(
            norm_eval=norm_eval,
            with_cp=with_cp,
            expand_last=expand_last,
            inter1=inter1,
            inter2=inter2,
            memory=memory,
            early_conv=early_conv,
            multi_scale=multi_scale,
            deploy=deploy,
        )
        _check_styles(norm_cfg=norm_cfg, act_cfg=act_cfg, out_norm_cfg=out_norm_cfg)
        check_init_cfg(init_cfg)
        _check_arguments(
            in_channels,
            out_indices,
            drop_path_rate,
            layer_scale_init_value,
            frozen_stages,
            feature_map,
        )
        _check_ablation(self.arch, decoupling, early_conv, multi_scale)
        super().__init__(
            init_cfg
            or [
                dict(type='TruncNormal', layer=['Conv2d', 'Linear'], std=0.02, bias=0.0),
                dict(
                    type='Constant',
                    layer=['_BatchNorm', 'LayerNorm', 'GroupNorm'],
                    val=1.0,
                    bias=0.0,
                ),
            ]
        )
        self.in_channels = in_channels
        self.out_indices = tuple(out_indices)
        self.drop_path_rate = drop_path_rate
        self.layer_scale_init_value = layer_scale_init_value
        self.frozen_stages = frozen_stages
        self.norm_eval = norm_eval
        self.norm_cfg = norm_cfg or dict(type='BN')
        self.act_cfg = act_cfg or dict(type='GELU')
        self.with_cp = with_cp
        self.expand_last = expand_last
        self.feature_map = feature_map
        self.decoupling = decoupling
        self.inter1 = inter1
        self.inter2 = inter2
        self.memory = memory
        self.early_conv = early_conv
        self.multi_scale = multi_scale

        stem_width = self._state_width(0)
        self.stem = nn.Sequential()
        self.stem.add_module('conv', nn.Conv2d(in_channels, stem_width, STEM_STRIDE, STEM_STRIDE))
        self.stem.add_module('norm', build_norm(self.norm_cfg, stem_width))
        stages = nn.ModuleList(
            self._build_stage(index) for index in range(self.out_indices[-1] + 1)
        )
        self.stages = cast('Sequence[Stage]', stages)  # a ModuleList, typed as what it holds
        self.out_norms = (
            nn.ModuleDict()
            if out_norm_cfg is None
            else nn.ModuleDict(
                {
                    str(index): build_norm(out_norm_cfg, channels)
                    for index, channels in zip(self.out_indices, self.out_channels, strict=True)
                }
            )
        )
        self._freeze_stages()  # now, since distributed wrappers ask once which parameters train
        if deploy:
            self.eval()
            self.switch_to_deploy()

    @property
    def out_channels(self) -> tuple[int, ...]:
        """Channels of each map that ``forward`` returns."""
        return tuple(
            self._state_width(index)
            * (
                self.arch['expansions'][index][1]
                if self.inter2 and self._expands(index, last_block=True)
                else 1
            )
            for index in self.out_indices
        )

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Compute the stage outputs of a batch of images.

        Args:
            x: (B, in_channels, H, W), of any size.

        Returns:
            For each of ``out_indices`` the state after that stage's last block,
            (B, C, ceil(H / stride), ceil(W / stride)) with C of :attr:`out_channels`.

        Raises:
            TypeError: If ``x`` is not of floating point.
            ValueError: If ``x`` is empty or not (B, in_channels, H, W).
        """
        self._check_images(x)
        height, width = x.shape[-2:]
        right, bottom = -width % TOTAL_STRIDE, -height % TOTAL_STRIDE
        state = self.stem(F.pad(x, (0, right, 0, bottom)) if right or bottom else x)
        outputs = []
        for index, stage in enumerate(self.stages):
            state = stage(state)
            if index in self.out_indices:
                stride = STEM_STRIDE * 2**index
                output = self.out_norms[str(index)](state) if self.out_norms else state
                outputs.append(
                    output[..., : math.ceil(height / stride), : math.ceil(width / stride)]
                )
        return tuple(outputs)

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode; frozen stages and norms stay in evaluation mode.

        Raises:
            RuntimeError: If a folded network is to train.
        """
        super().train(mode)
        self._freeze_stages()
        if mode and self.norm_eval:
            for module in self.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()
        return self

    def init_weights(self) -> None:
        """Initialise the weights as ``init_cfg`` says.

        Raises:
            FileNotFoundError: If ``init_cfg`` names a local file that does not exist.
            CheckpointError: If the file is damaged, refused, or does not fit.
        """
        check_pretrained_file(self.init_cfg)
        with naming(name_of_pretrained_file(self.init_cfg)):
            super().init_weights()

    def get_layer_depth(self, param_name: str, prefix: str = '') -> tuple[int, int]:
        """Return the depth of a parameter, for layer-wise learning-rate decay.

        The stem is layer 0, each block a layer with the downsampling before it, and everything
        else (output norms, necks, heads) the last layer.

        Args:
            param_name: Name of the parameter in the whole model.
            prefix: What stands before the backbone's own names, such as ``'backbone.'``.

        Returns:
            The layer's depth and the number of layers.
        """
        num_layers = sum(len(stage.blocks) for stage in self.stages) + 2
        if not param_name.startswith(prefix):
            return num_layers - 1, num_layers
        part, *rest = param_name[len(prefix) :].split('.')
        if part == 'stem':
            return 0, num_layers
        if part != 'stages':
            return num_layers - 1, num_layers
        stage_index, blocks_before = int(rest[0]), 0
        for stage in self.stages[:stage_index]:
            blocks_before += len(stage.blocks)
        block_index = int(rest[2]) if rest[1] == 'blocks' else 0
        return blocks_before + block_index + 1, num_layers

    def _fold(self) -> None:
        """Fold batch norms and gamma into convolutions, and attention into two matrix products.

        Norms of another kind stay, and so do those of ``out_norm_cfg``.
        """
        conv, norm = self.stem
        folded_conv = fold_conv_norm(cast(nn.Conv2d, conv), norm)
        self.stem = nn.Sequential(OrderedDict(folded_conv=folded_conv))
        for stage in self.stages:
            if len(stage.downsample):
                norm, conv = stage.downsample
                norm, conv = fold_norm_conv(norm, cast(nn.Conv2d, conv))
                stage.downsample = nn.Sequential(OrderedDict(norm=norm, conv=conv))
            stage.blocks = nn.ModuleList(
                FoldedBlock(cast(DualInteraction, block)) for block in stage.blocks
            )

    def _memory_width(self, index: int) -> int:
        """Channels of the memory in a stage, d'."""
        return self.arch['memory_widths'][index] if self.memory else 0

    def _state_width(self, index: int) -> int:
        """Channels of the state in a stage, d' + d."""
        return self._memory_width(index) + self.arch['widths'][index]

    def _expands(self, index: int, last_block: bool) -> bool:
        """Whether a block of a stage is the one that keeps its latent channels."""
        return self.expand_last and last_block and index == NUM_STAGES - 1

    def _build_stage(self, index: int) -> Stage:
        state_width = self._state_width(index)
        downsample = nn.Sequential()
        if index > 0:
            previous_width = self._state_width(index - 1)
            downsample.add_module('norm', build_norm(self.norm_cfg, previous_width))
            downsample.add_module('conv', nn.Conv2d(previous_width, state_width, 2, 2))
        depths = self.arch['depths']
        drop_path_rates = torch.linspace(0, self.drop_path_rate, sum(depths), device='cpu').split(
            depths
        )[index]
        blocks = [
            self._build_block(index, rate, last_block=position == depths[index] - 1)
            for position, rate in enumerate(drop_path_rates.tolist())
        ]
        return Stage(downsample, blocks, self.with_cp)

    def _build_block(self, index: int, drop_path_rate: float, last_block: bool) -> DualInteraction:
        memory_width, width = self._memory_width(index), self.arch['widths'][index]
        expansions = self.arch['expansions'][index]
        styles = self.norm_cfg, self.act_cfg
        bare = self._expands(index, last_block)
        mixer = self._build_mixer(index)
        inter1 = Interaction(width, expansions[0], *styles) if self.inter1 else nn.Identity()
        inter2: nn.Module = nn.Identity()
        if self.inter2:
            interaction = ExpandingInteraction if bare else Interaction
            inter2 = interaction(memory_width + width, expansions[1], *styles)
        if bare:
            return DualInteraction(memory_width, width, mixer, inter1, inter2)
        return CAREBlock(
            memory_width, width, mixer, inter1, inter2, drop_path_rate, self.layer_scale_init_value
        )

    def _build_mixer(self, index: int) -> nn.Module:
        width = self.arch['widths'][index]
        if self.decoupling == 'stacked':
            return StackedMixer(
                self._build_local_learner(width),
                self._build_global_learner(index, width),
                self._build_local_learner(width),
            )
        if self.decoupling == 'global_only':
            return GlobalMixer(self._build_global_learner(index, width))
        global_channels = width // 3 if self.decoupling == 'asymmetric' else width // 2  # d1
        local_channels = width - global_channels  # d2
        return DecoupledMixer(
            self._build_global_learner(index, global_channels),
            self._build_local_learner(local_channels),
            global_channels,
            local_channels,
        )

    def _build_global_learner(self, index: int, channels: int) -> nn.Module:
        if self.early_conv and index < NUM_STRIP_STAGES:
            return StripConv(channels)
        return LinearAttention(
            channels, _head_channels(self.arch, index, self.decoupling), self.feature_map
        )

    def _build_local_learner(self, channels: int) -> nn.Module:
        return LocalLearner(channels) if self.multi_scale else SingleScaleLearner(channels)

    def _freeze_stages(self) -> None:
        if self.frozen_stages < 0:
            return
        for part in (self.stem, *self.stages[: self.frozen_stages]):
            part.eval()
            part.requires_grad_(False)

    def _check_images(self, x: Tensor) -> None:
        if x.dim() != 4 or x.shape[1] != self.in_channels:
            raise ValueError(
                f'CARE takes images (B, {self.in_channels}, H, W), got a tensor of '
                f'shape {tuple(x.shape)}; see the argument in_channels'
            )
        if 0 in x.shape:
            raise ValueError(
                f'CARE got an empty batch of shape {tuple(x.shape)}; batch, height '
                'and width must be at least 1'
            )
        if not x.is_floating_point():
            raise TypeError(
                f'CARE takes images of floating point, got {x.dtype}; normalise them '
                'first, as a data_preprocessor does'
            )

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        """Take a state dict whole or raise, whatever ``strict`` says (the MM loaders pass False).

        See :func:`mmcare.checkpoint.prepare_backbone_state` for what is accepted.
        """
        prepare_backbone_state(self, state_dict, prefix, local_metadata)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


ARCH_KEYS = ('depths', 'widths', 'memory_widths', 'expansions', 'head_channels')


def check_arch(
    arch: str | Mapping[str, Sequence], arch_zoo: Mapping[str, Mapping[str, Sequence]]
) -> dict[str, tuple]:
    """Return the arch as a dict of tuples, or say what is wrong with it.

    Raises:
        TypeError: If ``arch`` is neither a name nor a dict, or a value is not of integers.
        ValueError: If the name is unknown, or the dict malformed.
    """
    if isinstance(arch, str):
        if arch not in arch_zoo:
            raise ValueError(
                f'arch={arch!r} is unknown; choose one of {sorted(arch_zoo)} or give '
                f'a dict with the keys {list(ARCH_KEYS)}'
            )
        return {key: tuple(values) for key, values in arch_zoo[arch].items()}
    if not isinstance(arch, Mapping):
        raise TypeError(
            f'arch must be one of {sorted(arch_zoo)} or a dict with the keys '
            f'{list(ARCH_KEYS)}, got {arch!r}'
        )
    missing, unknown = set(ARCH_KEYS) - set(arch), set(arch) - set(ARCH_KEYS)
    if missing or unknown:
        raise ValueError(
            f'arch must have exactly the keys {list(ARCH_KEYS)}; missing: '
            f'{sorted(missing)}, unknown: {sorted(unknown)}'
        )
    for key in ARCH_KEYS:
        if not isinstance(arch[key], Sequence) or len(arch[key]) != NUM_STAGES:
            raise ValueError(
                f'arch[{key!r}] must hold a value for each of the {NUM_STAGES} '
                f'stages, got {arch[key]!r}'
            )
    checked = {key: tuple(arch[key]) for key in ARCH_KEYS}
    for pair in checked['expansions']:
        if not isinstance(pair, Sequence) or len(pair) != 2:
            raise ValueError(
                "arch['expansions'] must hold a pair (r1, r2) for each stage, got "
                f'{arch["expansions"]!r}'
            )
    checked['expansions'] = tuple(tuple(pair) for pair in checked['expansions'])
    for key in ARCH_KEYS:
        values = sum(checked[key], ()) if key == 'expansions' else checked[key]
        if not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
            raise TypeError(f'arch[{key!r}] must hold integers, got {arch[key]!r}')
        if min(values) < 1:
            raise ValueError(f'arch[{key!r}] must hold numbers of at least 1, got {arch[key]!r}')
    for width, head in zip(checked['widths'], checked['head_channels'], strict=True):
        if width % 3:
            raise ValueError(
                f"arch['widths'] must be divisible by 3, for the global, 3x3 and 7x7 "
                f'groups; got {arch["widths"]!r}'
            )
        if width // 3 % head:
            raise ValueError(
                f"arch['head_channels'] must divide a third of the stage's width: "
                f'{head} does not divide {width // 3} (widths {arch["widths"]!r}, '
                f'head_channels {arch["head_channels"]!r})'
            )
    return checked


def _check_styles(**configs: dict | None) -> None:
    """Try to build a layer from each config: the toolboxes' errors do not name the argument."""
    for name, config in configs.items():
        if config is None:
            continue
        if not isinstance(config, Mapping) or not config.get('type'):
            raise TypeError(f"{name} must be a dict with 'type', or None, got {config!r}")
        try:
            if name == 'act_cfg':
                build_activation_layer(dict(config))
            else:
                build_norm(dict(config), TRIAL_CHANNELS)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f'{name}={config!r} cannot be built: {error}') from error
        except ValueError:
            continue  # channels and groups that do not divide are for the layers themselves to say


def _check_arguments(
    in_channels: int,
    out_indices: Sequence[int],
    drop_path_rate: float,
    layer_scale_init_value: float,
    frozen_stages: int,
    feature_map: str,
) -> None:
    if not isinstance(in_channels, int) or isinstance(in_channels, bool) or in_channels < 1:
        raise ValueError(f'in_channels must be an integer of at least 1, got {in_channels!r}')
    if not isinstance(out_indices, Sequence) or isinstance(out_indices, str):
        raise TypeError(f'out_indices must be a sequence of stage indices, got {out_indices!r}')
    if (
        not out_indices
        or any(index not in range(NUM_STAGES) for index in out_indices)
        or any(first >= second for first, second in pairwise(out_indices))
    ):
        raise ValueError(
            'out_indices must name at least one of the stages 0 to '
            f'{NUM_STAGES - 1}, in ascending order; got {out_indices!r}'
        )
    check_numbers(drop_path_rate=drop_path_rate, layer_scale_init_value=layer_scale_init_value)
    if not 0 <= drop_path_rate < 1:
        raise ValueError(f'drop_path_rate must lie in [0, 1), got {drop_path_rate!r}')
    if not 0 <= layer_scale_init_value < math.inf:
        raise ValueError(
            'layer_scale_init_value must be finite and not negative, got '
            f'{layer_scale_init_value!r}'
        )
    if not isinstance(frozen_stages, int) or frozen_stages not in range(-1, NUM_STAGES + 1):
        raise ValueError(
            f'frozen_stages must lie between -1 (none) and {NUM_STAGES} (all), got '
            f'{frozen_stages!r}'
        )
    if not isinstance(feature_map, str) or feature_map not in FEATURE_MAPS:
        raise ValueError(f'feature_map must be one of {sorted(FEATURE_MAPS)}, got {feature_map!r}')


def _head_channels(arch: Mapping[str, Sequence], index: int, decoupling: str) -> int:
    """Channels of an attention head in a stage.

    Symmetric decoupling widens the heads and keeps their number; everything else has the arch's
    heads, more of them where more channels are global.
    """
    head_channels = arch['head_channels'][index]
    if decoupling != 'symmetric':
        return head_channels
    num_heads = arch['widths'][index] // 3 // head_channels
    return arch['widths'][index] // 2 // num_heads


def _check_ablation(
    arch: Mapping[str, Sequence], decoupling: str, early_conv: bool, multi_scale: bool
) -> None:
    if decoupling not in DECOUPLINGS:
        raise ValueError(f'decoupling must be one of {list(DECOUPLINGS)}, got {decoupling!r}')
    if decoupling == 'global_only' and not multi_scale:
        raise ValueError(
            "decoupling='global_only' has no local learner that multi_scale=False could change; "
            'leave multi_scale out'
        )
    divisor = dict(symmetric=2, stacked=1).get(decoupling, 1)
    if multi_scale and decoupling in ('symmetric', 'stacked'):
        divisor *= 2  # 3x3 and 7x7 take half each
    for index, width in enumerate(arch['widths']):
        if width % divisor:
            raise ValueError(
                f'decoupling={decoupling!r} with multi_scale={multi_scale} needs widths divisible '
                f"by {divisor}, got arch['widths'] {arch['widths']!r}"
            )
        if decoupling == 'symmetric' and (index >= NUM_STRIP_STAGES or not early_conv):
            num_heads = width // 3 // arch['head_channels'][index]
            if width // 2 % num_heads:
                raise ValueError(
                    "decoupling='symmetric' keeps the number of attention heads, and the "
                    f'{num_heads} heads of stage {index + 1} do not divide half of its width, '
                    f'{width // 2}; '
                    + (
                        "choose other arch['head_channels']"
                        if index >= NUM_STRIP_STAGES
                        else 'early_conv=True has no heads there, or choose other '
                        "arch['head_channels']"
                    )
                )
