"""What a CARE network is made of, read off its modules while an image runs through it.

Nothing here repeats the arch's definition: depths, channels, kernels, heads and sizes are those of
the modules that are there, and shapes are those of the tensors that pass through them. The picture
of it is in :mod:`mmcare.analysis.architecture_plot`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from mmcare.analysis.counting import check_shape
from mmcare.models import CARE
from mmcare.models.backbones.care import NUM_STAGES, CAREBlock, DualInteraction
from mmcare.models.layers import (
    DecoupledMixer,
    ExpandingInteraction,
    Interaction,
    LinearAttention,
)

Shape = tuple[int, int, int]  # C, H, W


@dataclass(frozen=True)
class Layer:
    """A module without children, as it worked on the image.

    Attributes:
        path: Its name in the backbone, such as ``'stages.2.blocks.0.inter1.expand'``.
        label: What it is, such as ``'depth-wise conv 7x7'``.
        in_shape, out_shape: (C, H, W) of its input and output.
        params: Number of its parameters.
    """

    path: str
    label: str
    in_shape: Shape
    out_shape: Shape
    params: int


@dataclass(frozen=True)
class StageFacts:
    """A stage.

    Attributes:
        number: 1 to 4.
        entrance: What comes before the first block: stem or downsampling.
        depth: Number of blocks.
        memory_width, global_width, local_width: Channels of the three parts of the state.
        expansions: Latent widths of the two interactions, in multiples of their input's.
        global_learner: What it is, such as ``'linear attention, 2 heads of 16'``.
        local_learner: What it is, such as ``'depth-wise convs 3x3 and 7x7'``.
        keeps_latent: Whether the last block ends in its latent channels.
        out_shape: (C, H, W) of the stage's output.
        params: Number of parameters, those of the entrance included.
    """

    number: int
    entrance: tuple[Layer, ...]
    depth: int
    memory_width: int
    global_width: int
    local_width: int
    expansions: tuple[int, int]
    global_learner: str
    local_learner: str
    keeps_latent: bool
    out_shape: Shape
    params: int


@dataclass(frozen=True)
class BlockFacts:
    """The first block of a stage, opened.

    Attributes:
        path: Its name in the backbone.
        stage: The stage's facts, which hold the widths.
        global_learner, local_learner, inter1, inter2: Layers of its parts, in order.
        adds: Whether its output is scaled and added to the state.
        params: Number of parameters.
    """

    path: str
    stage: StageFacts
    global_learner: tuple[Layer, ...]
    local_learner: tuple[Layer, ...]
    inter1: tuple[Layer, ...]
    inter2: tuple[Layer, ...]
    adds: bool
    params: int


@dataclass(frozen=True)
class Architecture:
    """A backbone: its name, the (C, H, W) of the image, its stages, one block, its parameters."""

    name: str
    image_shape: Shape
    stages: tuple[StageFacts, ...]
    block: BlockFacts
    params: int


def describe_architecture(
    arch: str | Mapping[str, Sequence], shape: Sequence[int] = (224, 224), open_stage: int = 3
) -> Architecture:
    """Build a backbone, run an image of zeros through it and write down what is met.

    Args:
        arch: As for :class:`mmcare.models.CARE`.
        shape: Height and width of the image.
        open_stage: 1 to 4: the stage whose first block is opened.

    Raises:
        TypeError: If ``shape`` is not two integers.
        ValueError: If the arch is unknown, the image too small, or there is no such stage.
    """
    height, width = check_shape(shape)
    if open_stage not in range(1, NUM_STAGES + 1):
        raise ValueError(f'the stage to open must be 1 to {NUM_STAGES}, got {open_stage!r}')
    backbone = CARE(arch).eval()
    image = torch.zeros(1, backbone.in_channels, height, width)
    layers = _trace(backbone, image)
    with torch.no_grad():
        maps = backbone(image)
    stages = tuple(
        _describe_stage(backbone, layers, index, _chw(stage_map))
        for index, stage_map in enumerate(maps)
    )
    return Architecture(
        name=f'CARE-{arch.upper()}' if isinstance(arch, str) else 'CARE',
        image_shape=_chw(image),
        stages=stages,
        block=_describe_block(backbone, layers, stages[open_stage - 1]),
        params=_count(backbone),
    )


def _trace(network: nn.Module, image: Tensor) -> list[Layer]:
    """Run an image, and list the modules without children in the order in which they worked."""
    layers: list[Layer] = []
    handles = []
    for path, module in network.named_modules():
        if next(module.children(), None) is None and not isinstance(module, nn.Identity):
            handles.append(module.register_forward_hook(_recorder(layers, path)))
    try:
        with torch.no_grad():
            network(image)
    finally:
        for handle in handles:
            handle.remove()
    return layers


def _recorder(layers: list[Layer], path: str) -> Any:
    def record(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        layers.append(Layer(path, _label(module), _chw(inputs[0]), _chw(output), _count(module)))

    return record


def _label(module: nn.Module) -> str:
    if not isinstance(module, nn.Conv2d):
        return type(module).__name__
    height, width = module.kernel_size
    depthwise = 'depth-wise ' if module.groups == module.in_channels > 1 else ''
    stride = f', stride {module.stride[0]}' if module.stride[0] > 1 else ''
    return f'{depthwise}conv {height}x{width}{stride}'


def _chw(x: Tensor) -> Shape:
    return cast(Shape, tuple(x.shape[-3:]))


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _under(layers: list[Layer], *paths: str) -> tuple[Layer, ...]:
    """Those of the layers that lie in one of the modules."""
    prefixes = tuple(f'{path}.' for path in paths)
    return tuple(layer for layer in layers if layer.path.startswith(prefixes))


def _describe_stage(
    backbone: CARE, layers: list[Layer], index: int, out_shape: Shape
) -> StageFacts:
    stage = backbone.stages[index]
    first, last = cast(DualInteraction, stage.blocks[0]), stage.blocks[len(stage.blocks) - 1]
    mixer = cast(DecoupledMixer, first.mixer)
    *memory_width, _ = first.split_widths
    return StageFacts(
        number=index + 1,
        entrance=_under(layers, f'stages.{index}.downsample', *(['stem'] if index == 0 else [])),
        depth=len(stage.blocks),
        memory_width=sum(memory_width),
        global_width=mixer.split_widths[0],
        local_width=mixer.split_widths[1],
        expansions=(_expansion(first.inter1), _expansion(first.inter2)),
        global_learner=_describe_learner(mixer.global_learner),
        local_learner=_describe_learner(mixer.local_learner),
        keeps_latent=not isinstance(last.get_submodule('inter2'), Interaction),
        out_shape=out_shape,
        params=_count(stage) + (_count(backbone.stem) if index == 0 else 0),
    )


def _expansion(interaction: nn.Module) -> int:
    expand = cast(ExpandingInteraction, interaction).expand
    return expand.out_channels // expand.in_channels


def _describe_learner(learner: nn.Module) -> str:
    if isinstance(learner, LinearAttention):
        heads = learner.query_key.in_channels // learner.head_channels
        return f'linear attention, {heads} head{"s" * (heads > 1)} of {learner.head_channels}'
    kernels = [conv.kernel_size for conv in learner.modules() if isinstance(conv, nn.Conv2d)]
    return 'depth-wise convs ' + ' and '.join(f'{height}x{width}' for height, width in kernels)


def _describe_block(backbone: CARE, layers: list[Layer], stage: StageFacts) -> BlockFacts:
    path = f'stages.{stage.number - 1}.blocks.0'
    block = backbone.get_submodule(path)
    return BlockFacts(
        path=path,
        stage=stage,
        global_learner=_under(layers, f'{path}.mixer.global_learner'),
        local_learner=_under(layers, f'{path}.mixer.local_learner'),
        inter1=_under(layers, f'{path}.inter1'),
        inter2=_under(layers, f'{path}.inter2'),
        adds=isinstance(block, CAREBlock),
        params=_count(block),
    )
