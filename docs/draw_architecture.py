"""Draw a CARE network, s0 unless an argument names another: its four stages, and a block opened.

The network is built and an image runs through it. Every number and every name of a module in the
picture is read off the modules and off the tensors that pass.
"""

import sys
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle
from torch import nn

from mmcare.models import CARE
from mmcare.models.backbones.care import CAREBlock, LinearAttention, Stage

IMAGE = (3, 224, 224)
WIDTH, HEIGHT = 160, 92  # of the drawing, in units of about a tenth of an inch
MEMORY, GLOBAL, NEAR, FAR = GROUPS = '#b9b4c7', '#f2b263', '#7fb7be', '#4f8fba'
LATENT, INTERACTION, LINE, FAINT = '#d9a5a0', '#e9efe2', '#333333', '#777777'
CODE: dict[str, Any] = dict(size=7.5, family='monospace', color=FAINT)


@dataclass(frozen=True)
class Layer:
    """A module at work: its name in the backbone, and the (C, H, W) of its input and output."""

    name: str
    module: Any
    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]

    @property
    def label(self) -> str:
        """What it is, such as ``depth-wise conv 7x7``."""
        if not isinstance(self.module, nn.Conv2d):
            return type(self.module).__name__.replace('BatchNorm2d', 'batch norm')
        height, width = self.module.kernel_size
        depthwise = 'depth-wise ' if self.module.groups > 1 else ''
        return f'{depthwise}conv {height}x{width}'


def trace(backbone: CARE) -> list[Layer]:
    """Run an image, and list stages and modules without children in the order of their work."""
    names = {module: name for name, module in backbone.named_modules()}
    layers: list[Layer] = []

    def record(module: nn.Module, inputs: Any, output: Any) -> None:
        shapes = tuple(inputs[0].shape[1:]), tuple(output.shape[1:])
        layers.append(Layer(names[module], module, *shapes))

    for module in backbone.modules():
        leaf = not list(module.children()) and not isinstance(module, nn.Identity)
        if isinstance(module, Stage) or leaf:
            module.register_forward_hook(record)  # a norm with a hook is called, not merged
    with torch.no_grad():
        backbone(torch.zeros(1, *IMAGE))
    return layers


def count(module: nn.Module) -> int:
    """Count parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def global_learner(block: CAREBlock) -> str:
    """Say how a block learns global information."""
    learner = block.mixer.global_learner
    if isinstance(learner, LinearAttention):
        heads = learner.query_key.in_channels // learner.head_channels
        return f'linear attention, {heads} head{"s" * (heads > 1)} of {learner.head_channels}'
    return f'depth-wise convs {kernels(learner, " + ")}'


def kernels(module: nn.Module, separator: str) -> str:
    """List the kernel sizes of a module's convolutions."""
    convs = (layer for layer in module.modules() if isinstance(layer, nn.Conv2d))
    return separator.join('{}x{}'.format(*conv.kernel_size) for conv in convs)


class Canvas:
    """Axes without axes, on which boxes, arrows and words are put."""

    def __init__(self) -> None:
        self.figure = Figure(figsize=(15.5, 9), layout='constrained')
        self.axes = self.figure.add_subplot()
        self.axes.set(xlim=(0, WIDTH), ylim=(0, HEIGHT), aspect='equal')
        self.axes.axis('off')

    def write(self, x: float, y: float, text: str, size: float = 9, **style: Any) -> None:
        """Put words at a point, centred unless ``ha`` says otherwise."""
        look = dict(fontsize=size, ha='center', va='center', color=LINE) | style
        self.axes.text(x, y, text, **look)

    def box(self, x: float, y: float, w: float, h: float, text: str = '', **style: Any) -> None:
        """Put a rounded box of width w and height h, with its lower left corner at (x, y)."""
        size = style.pop('size', 8.5)
        look = dict(facecolor='white', edgecolor=LINE, linewidth=0.9, zorder=1) | style
        round_box = dict(boxstyle='round,pad=0.5', **look)
        self.axes.add_patch(FancyBboxPatch((x + 0.5, y + 0.5), w - 1, h - 1, **round_box))
        self.write(x + w / 2, y + h / 2, text, size=size, linespacing=1.25, zorder=2)

    def bar(self, x: float, y: float, w: float, h: float, color: str, text: str = '') -> None:
        """Put a bar of width w and height h, with its lower left corner at (x, y)."""
        look = dict(facecolor=color, edgecolor=LINE, linewidth=0.7)
        self.axes.add_patch(Rectangle((x, y), w, h, **look))
        self.write(x + w / 2, y + h / 2, text)

    def arrow(self, *points: tuple[float, float]) -> None:
        """Draw a line through points, with a head at its end."""
        self.axes.plot(*zip(*points, strict=True), color=LINE, linewidth=1, zorder=0.5)
        head = dict(arrowstyle='-|>', color=LINE, linewidth=1, shrinkA=0, shrinkB=0)
        self.axes.annotate('', points[-1], points[-2], zorder=0.5, arrowprops=head)

    def plus(self, x: float, y: float) -> None:
        """Put a sum."""
        look = dict(marker='o', markersize=13, color='white', markeredgecolor=LINE)
        self.axes.plot([x], [y], zorder=3, **look)
        self.write(x, y - 0.1, '+', size=13, zorder=4)


def draw_stages(canvas: Canvas, backbone: CARE, layers: list[Layer]) -> None:
    """Draw the image and a card for each stage."""
    canvas.box(2, 72, 11, 8, 'image\n{} x {} x {}'.format(*IMAGE))
    entrances = [layer for layer in layers if getattr(layer.module, 'stride', (1, 1)) > (1, 1)]
    stages = [layer for layer in layers if isinstance(layer.module, Stage)]
    for index, (entrance, stage) in enumerate(zip(entrances, stages, strict=True)):
        left = 23.5 + 35 * index
        canvas.arrow((left - (9 if index else 10.5), 76), (left - 0.3, 76))
        text = f'{entrance.label}\nstride {entrance.module.stride[0]}'
        canvas.write(left - 5, 79, text, size=8)
        stem = count(backbone.stem) if index == 0 else 0
        draw_card(canvas, stage, index + 1, left, count(stage.module) + stem)


def draw_card(canvas: Canvas, stage: Layer, number: int, left: float, params: int) -> None:
    """Draw one stage: its blocks, the parts of its state, and what comes out."""
    blocks, top = list(stage.module.blocks), 86.5
    first, keeps_latent = blocks[0], blocks[-1].gamma is None
    canvas.box(left, 57.5, 26, 29, facecolor='#fafafa')
    left += 1.5
    canvas.write(left, top - 2, f'stage {number}', size=12, weight='bold', ha='left')
    canvas.write(left + 23, top - 2, f'{len(blocks)} blocks', size=11, ha='right')
    for place, block in enumerate(blocks):
        color = LATENT if block.gamma is None else INTERACTION
        canvas.bar(left + place * 23 / 12, top - 9, 1.44, 4.5, color)
    x, scale = left, 23 / sum(first.widths)
    for width, color in zip(first.widths, GROUPS, strict=True):
        canvas.bar(x, top - 14.5, width * scale, 3.6, color, str(width))
        x += width * scale
    expands = first.inter1.expand, first.inter2.expand
    inter1, inter2 = (expand.out_channels // expand.in_channels for expand in expands)
    lines = (
        f'global: {global_learner(first)}',
        f'local: depth-wise convs {kernels(first.mixer.local_learner, " and ")}',
        f"latent widths: {inter1} d, {inter2} (d' + d)",
        f'{params:,} parameters',
    )
    for row, text in enumerate(lines):
        canvas.write(left, top - 17 - 2 * row, text, size=7.8, ha='left')
    middle, color = left + 11.5, '#8c2f24' if keeps_latent else LINE
    text = '{} x {} x {}'.format(*stage.out_shape)
    canvas.write(middle, 59.5, text, size=11, weight='bold', color=color)
    canvas.write(middle, 55.9, f'stride {IMAGE[1] // stage.out_shape[1]}', color=FAINT)


def draw_block(canvas: Canvas, backbone: CARE, layers: list[Layer]) -> None:
    """Draw the first block of the third stage, which has linear attention in every arch."""
    path = 'stages.2.blocks.0'
    block = backbone.get_submodule(path)
    parts = {
        part: [layer for layer in layers if layer.name.startswith(f'{path}.{part}.')]
        for part in ('mixer.global_learner', 'mixer.local_learner', 'inter1', 'inter2')
    }
    canvas.box(1, 1.5, WIDTH - 2, 51, facecolor='#fdfdfd', edgecolor=FAINT, zorder=0.1)
    title = f'The first block of stage 3, opened: {count(block):,} parameters'
    canvas.write(3, 50, title, size=13, weight='bold', ha='left')
    canvas.write(157, 50, path, **CODE | dict(size=10, ha='right'))
    bottom, lane = 13.0, 7.4  # four lanes, from below: 7x7, 3x3, global, memory
    far, near, long_range, memory = (bottom + lane * (number + 0.5) for number in range(4))
    whole = f"d' + d = {sum(block.widths)}"

    def draw_state(x: float, width: float, texts: bool, groups: int = 4) -> None:
        for number, color in enumerate(GROUPS[: -groups - 1 : -1]):
            text = str(block.widths[-1 - number]) if texts else ''
            canvas.bar(x, bottom + number * lane, width, lane, color, text)

    draw_state(5, 3, texts=True)
    canvas.write(6.5, bottom + 4 * lane + 1.6, f'state, {whole}', ha='left')
    canvas.write(3.4, memory, 'Z', size=11)
    canvas.write(3.4, near, 'X', size=11)

    # Learners, each on its own channels.
    draw_global(canvas, block, parts['mixer.global_learner'], long_range)
    for y, color, layer in zip((near, far), (NEAR, FAR), parts['mixer.local_learner'], strict=True):
        canvas.arrow((8, y), (26, y))
        text = f'{layer.label}\n{layer.in_shape[0]} channels'
        canvas.box(26, y - 2.6, 17, 5.2, text, facecolor=color)
        canvas.write(34.5, y - 3.35, layer.name.removeprefix(f'{path}.'), **CODE)
    for y in (long_range, near, far):
        canvas.arrow((43, y), (47.5, y))
    draw_state(47.5, 2.4, texts=False, groups=3)
    canvas.write(48.7, bottom - 1.5, f'd = {sum(block.widths[1:])}')

    # Interactions.
    centre = bottom + 2 * lane
    draw_interaction(canvas, parts['inter1'], 'inter1', 53, near)
    canvas.arrow((49.9, near), (53, near))
    canvas.arrow((93, near), (96, near))
    canvas.arrow((8, memory), (96, memory))
    draw_state(96, 2.4, texts=False)
    canvas.write(97.2, bottom - 1.5, whole)
    canvas.write(70, memory + 1.3, f"memory, d' = {block.widths[0]}: waits for the features")
    canvas.arrow((98.4, centre), (101.5, centre))
    draw_interaction(canvas, parts['inter2'], 'inter2', 101.5, centre)

    # Back to the state.
    canvas.arrow((141.5, centre), (148.4, centre))
    canvas.box(143.4, centre - 2.4, 3.8, 4.8, 'γ ×', size=11)
    canvas.write(145.3, centre - 4.8, 'gamma\ndrop_path', **CODE)
    canvas.arrow((6.2, bottom), (6.2, 5.5), (149.7, 5.5), (149.7, centre - 1.4))
    canvas.write(78, 6.8, 'shortcut of the whole state')
    canvas.plus(149.7, centre)
    canvas.arrow((151, centre), (153, centre))
    draw_state(153, 3, texts=True)
    canvas.write(154.5, bottom + 4 * lane + 1.6, 'next state')


def draw_global(canvas: Canvas, block: CAREBlock, layers: list[Layer], y: float) -> None:
    """Draw linear attention, whose values are its input, and the projection before it."""
    text, channels = layers[0].label, f'{layers[0].in_shape[0]} → {layers[0].out_shape[0]}'
    canvas.arrow((8, y), (12.5, y))
    canvas.box(12.5, y - 2.6, 9.5, 5.2, f'{text}\n{channels}', facecolor=GLOBAL)
    canvas.arrow((22, y), (26, y))
    canvas.write(24, y + 1, 'q, k', size=8)
    canvas.arrow((10, y), (10, y + 3.3), (34.5, y + 3.3), (34.5, y + 2.6))
    canvas.write(24, y + 4.1, 'v', size=8)
    canvas.write(24, y - 3.35, 'mixer.' + layers[0].name.partition('.mixer.')[2], **CODE)
    text = global_learner(block).replace(', ', ',\n')
    canvas.box(26, y - 2.6, 17, 5.2, text, facecolor=GLOBAL)


def draw_interaction(canvas: Canvas, layers: list[Layer], name: str, left: float, y: float) -> None:
    """Draw layers side by side, with the shortcut above them."""
    canvas.box(left, y - 8.5, 40, 17.5, facecolor=INTERACTION, edgecolor=FAINT, zorder=0.2)
    canvas.write(left + 1.5, y - 7, name, **CODE | dict(size=9, ha='left'))
    params = sum(count(layer.module) for layer in layers)
    canvas.write(left + 38.5, y - 7, f'{params:,} parameters', size=8, ha='right')
    canvas.arrow((left, y), (left + 37, y))
    for place, layer in enumerate(layers):
        before, after = layer.in_shape[0], layer.out_shape[0]
        channels = str(before) if before == after else f'{before}\n→ {after}'
        text = f'{layer.label.replace(" ", chr(10))}\n{channels}'
        canvas.box(left + 1.8 + 7.1 * place, y - 4.4, 6.4, 8.8, text, size=7.5)
    start, end, above = left + 0.9, left + 38.2, y + 6.5
    canvas.arrow((start, y), (start, above), (end, above), (end, y + 1.4))
    canvas.write(left + 19, y + 7.5, 'shortcut', size=8)
    canvas.plus(end, y)


def draw(arch: str, filename: str) -> None:
    """Draw a network into a PNG file."""
    backbone = CARE(arch).eval()
    layers, canvas = trace(backbone), Canvas()
    title = f'CARE-{arch.upper()}: {count(backbone) / 1e6:.2f} M parameters without a head'
    canvas.write(2, 89.5, title, size=15, weight='bold', ha='left')
    labels = "memory, d'", 'global', 'local 3x3', 'local 7x7', 'keeps its latent channels'
    x = 92.0
    for color, label in zip((*GROUPS, LATENT), labels, strict=True):
        canvas.bar(x, 88.6, 2.2, 1.8, color)
        canvas.write(x + 3, 89.5, label, ha='left')
        x += 5.5 + 0.72 * len(label)
    draw_stages(canvas, backbone, layers)
    draw_block(canvas, backbone, layers)
    canvas.figure.savefig(filename, dpi=100)


if __name__ == '__main__':
    arch = sys.argv[1] if sys.argv[1:] else 's0'
    draw(arch, f'care_{arch}.png')
