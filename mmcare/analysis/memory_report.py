"""Memory of a training step as text, CSV and PNG."""

from collections.abc import Sequence
from pathlib import Path

from mmcare.analysis.memory import Activations
from mmcare.analysis.plots import new_figure, write_png
from mmcare.analysis.report import Rows, format_table

MIB = 2**20


def memory_text(measured: Sequence[Activations]) -> str:
    """A table in MiB an image, a row for each backbone, image and precision."""
    head = ['backbone', 'image', 'precision', 'kept', 'with_cp', 'and a block', 'share']
    rows = [
        [
            f'care_{one.arch}',
            _image(one),
            one.precision,
            *(f'{size / MIB:,.0f}' for size in (one.plain, one.with_cp, one.with_cp_peak)),
            f'{one.with_cp_peak / one.plain:.0%}',
        ]
        for one in measured
    ]
    rules = [
        index
        for index in range(1, len(measured))
        if measured[index].arch != measured[index - 1].arch
    ]
    return 'Kept for the backward pass, in MiB an image:\n\n' + format_table(
        head, rows, rules=rules, left=3
    )


def memory_rows(measured: Sequence[Activations]) -> Rows:
    """The same in bytes, for CSV."""
    return [
        dict(
            backbone=f'care_{one.arch}',
            height=one.shape[0],
            width=one.shape[1],
            precision=one.precision,
            kept=one.plain,
            kept_with_cp=one.with_cp,
            largest_block=one.largest_block,
        )
        for one in measured
    ]


def plot_memory(measured: Sequence[Activations], filename: Path) -> None:
    """Bars in MiB an image: everything kept, beside what ``with_cp`` needs at once."""
    figure = new_figure(9, 1.5 + 0.45 * len(measured))
    axes = figure.subplots()
    places = [-float(index) for index in range(len(measured))]
    inputs = [one.with_cp / MIB for one in measured]
    above, below = ([place + shift for place in places] for shift in (0.2, -0.2))
    axes.barh(above, [one.plain / MIB for one in measured], height=0.38, label='all blocks kept')
    axes.barh(below, inputs, height=0.38, label='with_cp: inputs of the blocks')
    axes.barh(
        below,
        [one.largest_block / MIB for one in measured],
        left=inputs,
        height=0.38,
        label='with_cp: the largest block, recomputed',
    )
    axes.set_yticks(
        places, [f'CARE-{one.arch.upper()}, {_image(one)}, {one.precision}' for one in measured]
    )
    axes.set(xlabel='MiB an image', title='Kept for the backward pass by the backbone')
    axes.spines[['top', 'right']].set_visible(False)
    figure.legend(loc='outside lower center', ncols=3, frameon=False)
    write_png(figure, filename)


def _image(one: Activations) -> str:
    return f'{one.shape[0]} x {one.shape[1]}'
