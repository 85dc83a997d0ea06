"""The operators of an ML Program as a picture, coloured by the device."""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from mmcare.deploy import placement_plan as planned
from mmcare.deploy.placement_plan import Plan
from mmcare.deploy.placement_rules import CONVERSION, ELSEWHERE, NEURAL_ENGINE, UNCERTAIN, Verdict

COLORS = {  # light, so that the words in them can be read; colour-blind readers tell them apart
    NEURAL_ENGINE: '#77aadd',
    ELSEWHERE: '#ee8866',
    planned.CPU: '#ee8866',
    planned.GPU: '#ffaabb',
    UNCERTAIN: '#eedd88',
    CONVERSION: '#bbbbbb',
    planned.NOT_TOLD: '#dddddd',
}
SHORT = {
    'batch_norm': 'norm',
    'concat': 'cat',
    'layer_norm': 'norm',
    'linear_activation': 'lin',
    'matmul': 'mm',
    'real_div': 'div',
    'reduce_mean': 'mean',
    'reshape': 'resh',
    'transpose': 'perm',
}
FEWEST_COLUMNS, MOST_ROWS, LABELLED = 40, 60, 2000
COLORS_IN_FILE = 64


@dataclass(frozen=True)
class Cell:
    """An operator in the picture: its group, its type and its device."""

    group: str
    type: str
    device: str


def draw_placement(
    name: str, verdicts: Sequence[Verdict], plan: Plan | str, filename: Path
) -> None:
    """Draw what is expected and, if there is one, Core ML's own plan below, as PNG.

    Raises:
        ImportError: If matplotlib is missing; the message says what to install.
    """
    panels = {'expected by the rules': [_cell(verdict) for verdict in verdicts]}
    if not isinstance(plan, str):
        groups = {verdict.operator.name: verdict.operator.group for verdict in verdicts}
        panels[f"Core ML's own plan ({plan.compute_units})"] = [
            Cell(groups.get(one.name, ''), one.type, one.device) for one in plan.operators
        ]
    columns = max(FEWEST_COLUMNS, math.ceil(max(map(len, panels.values())) / MOST_ROWS))
    rows = [_count_rows(cells, columns) for cells in panels.values()]
    figure = import_module('matplotlib.figure').Figure(
        figsize=(13, 1.2 * len(panels) + 0.6 + 0.27 * sum(rows)), layout='constrained'
    )
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=rows)[:, 0]
    for one, (title, cells) in zip(axes, panels.items(), strict=True):
        _draw(one, cells, columns, labelled=len(cells) <= LABELLED)
        one.set_title(f'{name}, {title}', fontsize=10, loc='left')
    used = {cell.type for cells in panels.values() for cell in cells} & SHORT.keys()
    words = ', '.join(f'{SHORT[word]}: {word}' for word in sorted(used))
    figure.supxlabel(f'in the order of the program. {words}', fontsize=8)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=100, format='png')
    # A palette, since flat colours in many shades at the edges of letters make large files.
    image = import_module('PIL.Image').open(picture).convert('RGB').quantize(COLORS_IN_FILE)
    image.save(filename, format='png', optimize=True)


def _cell(verdict: Verdict) -> Cell:
    return Cell(verdict.operator.group, verdict.operator.type, verdict.device)


def _by_group(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.group, []).append(cell)
    return groups


def _count_rows(cells: Sequence[Cell], columns: int) -> int:
    return sum(math.ceil(len(members) / columns) for members in _by_group(cells).values())


def _draw(axes: Any, cells: Sequence[Cell], columns: int, labelled: bool) -> None:
    patches = import_module('matplotlib.patches')
    row, ticks = 0, {}
    for group, members in _by_group(cells).items():
        ticks[row + 0.5] = f'up to {group}' if group else 'elsewhere'
        for index, cell in enumerate(members):
            x, y = index % columns, row + index // columns
            axes.add_patch(
                patches.Rectangle((x + 0.03, y + 0.05), 0.94, 0.9, color=COLORS[cell.device])
            )
            if labelled:
                word = SHORT.get(cell.type, cell.type)[:5]
                axes.text(x + 0.5, y + 0.53, word, ha='center', va='center', fontsize=7)
        row += math.ceil(len(members) / columns)
    axes.set(xlim=(0, columns), ylim=(row, 0), xticks=[])
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    counts = {device: sum(cell.device == device for cell in cells) for device in COLORS}
    handles = [
        patches.Patch(color=COLORS[device], label=f'{device} ({number})')
        for device, number in counts.items()
        if number
    ]
    axes.legend(
        handles=handles,
        loc='lower right',
        bbox_to_anchor=(1, 1),
        ncols=len(handles),
        frameon=False,
        fontsize=9,
    )
