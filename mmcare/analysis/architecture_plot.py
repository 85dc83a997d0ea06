"""A picture of a CARE network: its four stages, and one block opened.

Every number and module name in it comes from :class:`mmcare.analysis.architecture.Architecture`.
"""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from mmcare.analysis.architecture import Architecture, BlockFacts, Layer, StageFacts
from mmcare.analysis.plots import new_figure, write_png

WIDTH, HEIGHT = 160, 92  # of the drawing, in units of about a tenth of an inch
MEMORY, GLOBAL, NEAR, FAR = '#b9b4c7', '#f2b263', '#7fb7be', '#4f8fba'
LATENT, INTERACTION, LINE, FAINT = '#d9a5a0', '#e9efe2', '#333333', '#777777'
SHORT = {'BatchNorm2d': 'batch\nnorm'}


def plot_architecture(architecture: Architecture, filename: Path) -> None:
    """Draw a network into a PNG file, which is replaced if it exists.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    figure = new_figure(15.5, 9)
    canvas = _Canvas(figure.add_subplot())
    _, height, width = architecture.image_shape
    canvas.write(
        2,
        89.5,
        f'{architecture.name}: {architecture.params / 1e6:.2f} M parameters without a head, '
        f'image of {height} x {width}',
        size=15,
        weight='bold',
        ha='left',
    )
    _draw_stages(canvas, architecture)
    _draw_block(canvas, architecture.block)
    _draw_legend(canvas, architecture.block)
    write_png(figure, filename, dpi=100)


class _Canvas:
    """Axes without axes, on which boxes, arrows and words are put."""

    def __init__(self, axes: Any) -> None:
        axes.set(xlim=(0, WIDTH), ylim=(0, HEIGHT), aspect='equal')
        axes.axis('off')
        self.axes = axes
        self.patches = import_module('matplotlib.patches')

    def write(self, x: float, y: float, text: str, size: float = 9, **style: Any) -> None:
        self.axes.text(
            x, y, text, **dict(fontsize=size, ha='center', va='center', color=LINE) | style
        )

    def box(
        self, x: float, y: float, width: float, height: float, text: str = '', **style: Any
    ) -> None:
        """A rounded box with its lower left corner at (x, y)."""
        size = style.pop('size', 8.5)
        look = dict(facecolor='white', edgecolor=LINE, linewidth=0.9, zorder=1) | style
        shape = self.patches.FancyBboxPatch(
            (x + 0.5, y + 0.5), width - 1, height - 1, boxstyle='round,pad=0.5', **look
        )
        self.axes.add_patch(shape)
        self.write(x + width / 2, y + height / 2, text, size=size, linespacing=1.25, zorder=2)

    def bar(self, x: float, y: float, width: float, height: float, color: str) -> None:
        self.axes.add_patch(
            self.patches.Rectangle(
                (x, y), width, height, facecolor=color, edgecolor=LINE, linewidth=0.7
            )
        )

    def arrow(self, *points: tuple[float, float], head: bool = True) -> None:
        """A line through points, with a head at its end."""
        self.axes.plot(*zip(*points, strict=True), color=LINE, linewidth=1, zorder=0.5)
        if head:
            self.axes.annotate(
                '',
                points[-1],
                points[-2],
                zorder=0.5,
                arrowprops=dict(arrowstyle='-|>', color=LINE, linewidth=1, shrinkA=0, shrinkB=0),
            )

    def plus(self, x: float, y: float) -> None:
        self.axes.plot(
            [x], [y], marker='o', markersize=13, color='white', markeredgecolor=LINE, zorder=3
        )
        self.write(x, y - 0.1, '+', size=13, zorder=4)


# ---------------------------------------------------------------- stages


def _draw_stages(canvas: _Canvas, architecture: Architecture) -> None:
    channels, height, width = architecture.image_shape
    middle = 76.0
    canvas.box(2, middle - 4, 11, 8, f'image\n{channels} x {height} x {width}')
    left, card = 23.5, 26.0
    for stage in architecture.stages:
        canvas.arrow((left - (10.5 if stage.number == 1 else 9), middle), (left - 0.3, middle))
        downsampling = next(layer for layer in stage.entrance if 'conv' in layer.label)
        canvas.write(left - 5, middle + 3, downsampling.label.replace(', ', '\n'), size=8)
        _draw_card(canvas, stage, left, card, architecture.image_shape[1])
        left += card + 9


def _draw_card(
    canvas: _Canvas, stage: StageFacts, left: float, width: float, image_height: int
) -> None:
    bottom, top = 57.5, 86.5
    canvas.box(left, bottom, width, top - bottom, facecolor='#fafafa')
    centre = left + width / 2
    canvas.write(left + 1.5, top - 2, f'stage {stage.number}', size=12, weight='bold', ha='left')
    canvas.write(
        left + width - 1.5,
        top - 2,
        f'{stage.depth} block{"s" * (stage.depth > 1)}',
        size=11,
        ha='right',
    )
    slab = (width - 3) / 12
    for block in range(stage.depth):
        latent = stage.keeps_latent and block == stage.depth - 1
        color = LATENT if latent else INTERACTION
        canvas.bar(left + 1.5 + block * slab, top - 9, 0.75 * slab, 4.5, color)
    scale = (width - 3) / (stage.memory_width + stage.global_width + stage.local_width)
    x = left + 1.5
    for channels, color in _groups(stage):
        canvas.bar(x, top - 14.5, channels * scale, 3.6, color)
        canvas.write(x + channels * scale / 2, top - 12.7, str(channels), size=8.5)
        x += channels * scale
    out_channels, height, width_out = stage.out_shape
    r1, r2 = stage.expansions
    for line, text in enumerate(
        (
            f'global: {stage.global_learner}',
            f'local: {stage.local_learner}',
            f"latent widths: {r1} d, {r2} (d' + d)",
            f'{stage.params:,} parameters',
        )
    ):
        canvas.write(left + 1.5, top - 17 - 2 * line, text, size=8, ha='left')
    canvas.write(
        centre,
        bottom + 2,
        f'{out_channels} x {height} x {width_out}',
        size=11,
        weight='bold',
        color='#8c2f24' if stage.keeps_latent else LINE,
    )
    canvas.write(centre, bottom - 1.6, f'stride {image_height // height}', size=9, color=FAINT)


def _groups(stage: StageFacts) -> list[tuple[int, str]]:
    """Channels and colour of the parts of the state; a part without channels is left out."""
    half = stage.local_width // 2
    widths = (stage.memory_width, stage.global_width, half, half)
    return [
        (width, color)
        for width, color in zip(widths, (MEMORY, GLOBAL, NEAR, FAR), strict=True)
        if width
    ]


# ---------------------------------------------------------------- the block


def _draw_block(canvas: _Canvas, block: BlockFacts) -> None:
    stage = block.stage
    canvas.box(1, 1.5, WIDTH - 2, 51, facecolor='#fdfdfd', edgecolor=FAINT, zorder=0.1)
    canvas.write(
        3,
        50,
        f'The first block of stage {stage.number}, opened: {block.params:,} parameters',
        size=13,
        weight='bold',
        ha='left',
    )
    canvas.write(157, 50, block.path, size=10, ha='right', family='monospace', color=FAINT)
    bottom, lane = 13.0, 7.4  # four lanes, from below: 7x7, 3x3, global, memory
    far, near, long_range, memory = (bottom + lane * (number + 0.5) for number in range(4))
    whole = stage.memory_width + stage.global_width + stage.local_width
    features = stage.global_width + stage.local_width
    _draw_state(canvas, block, 5, bottom, lane, f"state, d' + d = {whole}")
    if stage.memory_width:
        canvas.write(3.4, memory, 'Z', size=11)
    canvas.write(3.4, near, 'X', size=11)

    # Learners, each on its own channels.
    _draw_global(canvas, block, long_range)
    for y, layer in zip((near, far), block.local_learner, strict=True):
        canvas.arrow((8, y), (26, y))
        label = f'{layer.label}\n{layer.in_shape[0]} channels'
        color = NEAR if y == near else FAR
        canvas.box(26, y - 2.6, 17, 5.2, label, facecolor=color)
        canvas.write(34.5, y - 3.35, _name(block, layer), **_CODE)
    for y in (long_range, near, far):
        canvas.arrow((43, y), (47.5, y))
    for number, color in enumerate((FAR, NEAR, GLOBAL)):
        canvas.bar(47.5, bottom + number * lane, 2.4, lane, color)
    canvas.write(48.7, bottom - 1.5, f'd = {features}', size=9)

    # Interactions.
    middle = near
    _draw_interaction(canvas, block, block.inter1, 'inter1', 53, middle)
    canvas.arrow((49.9, middle), (53, middle))
    canvas.arrow((93, middle), (97, middle))
    canvas.arrow((8, memory), (97, memory))
    for number, color in enumerate((FAR, NEAR, GLOBAL, MEMORY)):
        canvas.bar(97, bottom + number * lane, 2.4, lane, color)
    canvas.write(98.2, bottom - 1.5, f"d' + d = {whole}", size=9)
    canvas.write(70, memory + 1.3, f"memory, d' = {stage.memory_width}: waits for the features")
    centre = bottom + 2 * lane
    canvas.arrow((99.4, centre), (102.5, centre))
    _draw_interaction(canvas, block, block.inter2, 'inter2', 102.5, centre)

    # Back to the state.
    if not block.adds:
        canvas.arrow((142.5, centre), (152, centre))
        out_channels = block.inter2[-1].out_shape[0]
        canvas.bar(152, bottom, 2.4, 4 * lane, LATENT)
        canvas.write(153.2, bottom - 1.5, str(out_channels), size=9)
        return
    canvas.arrow((142.5, centre), (148.2, centre))
    canvas.box(143.5, centre - 2.4, 3.8, 4.8, 'γ ×', size=11)
    canvas.write(145.4, centre - 5.4, 'gamma\ndrop_path', **_CODE)
    canvas.arrow((6.2, bottom), (6.2, 5.5), (149.5, 5.5), (149.5, centre - 1.4))
    canvas.write(78, 6.8, 'shortcut of the whole state')
    canvas.plus(149.5, centre)
    canvas.arrow((150.9, centre), (153, centre))
    _draw_state(canvas, block, 153, bottom, lane, 'next state')


_CODE: dict[str, Any] = dict(size=7.5, family='monospace', color=FAINT)


def _name(block: BlockFacts, layer: Layer) -> str:
    return layer.path.removeprefix(f'{block.path}.')


def _draw_state(
    canvas: _Canvas, block: BlockFacts, x: float, bottom: float, lane: float, label: str
) -> None:
    for number, (channels, color) in enumerate(reversed(_groups(block.stage))):
        canvas.bar(x, bottom + number * lane, 2.4 + 0.6, lane, color)
        canvas.write(x + 1.5, bottom + (number + 0.5) * lane, str(channels))
    canvas.write(x + 1.5, bottom + 4 * lane + 1.6, label, ha='left' if x < 80 else 'center')


def _draw_global(canvas: _Canvas, block: BlockFacts, y: float) -> None:
    """The global learner: projections and attention, or the sum of two strip convolutions."""
    layers = block.global_learner
    if len(layers) == 1:  # q and k; the values are the input itself
        canvas.arrow((8, y), (12.5, y))
        (projection,) = layers
        size = f'{projection.in_shape[0]} → {projection.out_shape[0]}'
        canvas.box(12.5, y - 2.6, 9.5, 5.2, f'{projection.label}\n{size}', facecolor=GLOBAL)
        canvas.arrow((22, y), (26, y))
        canvas.write(24, y + 1, 'q, k', size=8)
        canvas.arrow((10, y), (10, y + 3.3), (34.5, y + 3.3), (34.5, y + 2.6))
        canvas.write(24, y + 4.1, 'v', size=8)
        text = block.stage.global_learner.replace(', ', ',\n')
        canvas.write(24, y - 3.35, _name(block, projection), **_CODE)
    else:
        text = ' +\n'.join(layer.label for layer in layers)
        canvas.arrow((8, y), (26, y))
        canvas.write(34.5, y - 3.35, _name(block, layers[0]).rpartition('.')[0], **_CODE)
    canvas.box(26, y - 2.6, 17, 5.2, text, facecolor=GLOBAL)


def _draw_interaction(
    canvas: _Canvas, block: BlockFacts, layers: Sequence[Layer], name: str, left: float, y: float
) -> None:
    """Layers side by side, with the shortcut above them if they end where they began."""
    width, gap = 6.4, 0.7
    closes = layers[-1].out_shape == layers[0].in_shape
    canvas.box(left, y - 8.5, 40, 17.5, facecolor=INTERACTION, edgecolor=FAINT, zorder=0.2)
    canvas.write(left + 1.5, y - 7, name, **{**_CODE, 'size': 9, 'ha': 'left'})
    params = sum(layer.params for layer in layers)
    canvas.write(left + 38.5, y - 7, f'{params:,} parameters', size=8, ha='right')
    x = left + 1.8
    canvas.arrow((left, y), (left + (37 if closes else 40), y))
    for layer in layers:
        changed = layer.in_shape[0] != layer.out_shape[0]
        channels = (
            f'{layer.in_shape[0]}\n→ {layer.out_shape[0]}' if changed else f'{layer.in_shape[0]}'
        )
        label = SHORT.get(layer.label, layer.label.replace(' ', '\n'))
        canvas.box(x, y - 4.4, width, 8.8, f'{label}\n{channels}', size=7.5)
        x += width + gap
    if closes:
        start, end, above = left + 0.9, left + 38.2, y + 6.5
        canvas.arrow((start, y), (start, above), (end, above), (end, y + 1.4))
        canvas.write(left + 19, y + 7.5, 'shortcut', size=8)
        canvas.plus(end, y)


def _draw_legend(canvas: _Canvas, block: BlockFacts) -> None:
    x = 92.0
    near, far = (f'local {layer.label.rpartition(" ")[2]}' for layer in block.local_learner)
    for color, label in (
        (MEMORY, "memory, d'"),
        (GLOBAL, 'global'),
        (NEAR, near),
        (FAR, far),
        (LATENT, 'keeps its latent channels'),
    ):
        canvas.bar(x, 88.6, 2.2, 1.8, color)
        canvas.write(x + 3, 89.5, label, size=9, ha='left')
        x += 5.5 + 0.72 * len(label)
