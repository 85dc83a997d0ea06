"""Complexity as pictures: bars of a network, of the paper's tables, and the proposition's map."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from mmcare.analysis.counting import PARTS, Complexity
from mmcare.analysis.equations import delta_limit, omega
from mmcare.analysis.paper import Comparison
from mmcare.analysis.proposition import network_stages
from mmcare.analysis.report import parts_of, stages_of
from mmcare.output import moved_into_place

PANELS = (((7,), 1), ((3, 7), 1), ((7,), 8), ((3, 7), 8))  # kernels, heads
WIDTHS = (12, 400)  # of the map of the proposition, in channels


def check_matplotlib() -> None:
    """Check that matplotlib is there.

    Raises:
        ImportError: If it is not; the message says what to install.
    """
    try:
        import_module('matplotlib')
    except ModuleNotFoundError as error:
        raise ImportError(
            'plots need matplotlib, which is not installed: pip install matplotlib'
        ) from error


def plot_complexity(complexity: Complexity, filename: Path) -> None:
    """Stacked bars, a stage each: parameters on the left, multiply-adds on the right."""
    figure = new_figure(10, 4.5)
    stages, parts = stages_of(complexity), parts_of(complexity)
    for axes, quantity, unit, scale in zip(
        figure.subplots(1, 2),
        ('params', 'macs'),
        ('M parameters', 'GMACs'),
        (1e6, 1e9),
        strict=True,
    ):
        bottom = np.zeros(len(stages))
        for part in parts:
            heights = np.array([complexity.total(quantity, one, part) for one in stages]) / scale
            color = f'C{PARTS.index(part)}'
            axes.bar(stages, heights, bottom=bottom, label=part, color=color, width=0.7)
            bottom += heights
        total = complexity.total(quantity) / scale
        axes.set(xlabel='stage', ylabel=unit, title=f'{total:.4g} {unit}')
        axes.spines[['top', 'right']].set_visible(False)
    # The stack's order: its top first.
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc='outside right upper', frameon=False)
    figure.suptitle(f'{complexity.name}, {complexity.shape[0]} x {complexity.shape[1]}')
    write_png(figure, filename)


def plot_paper(comparisons: Sequence[Comparison], filename: Path) -> None:
    """Bars of the paper's figures and ours, a row each; starred where rounding is not enough."""
    figure = new_figure(11, 6.5)
    for axes, unit in zip(figure.subplots(1, 2), ('GMACs', 'M parameters'), strict=True):
        chosen = [one for one in comparisons if one.unit == unit]
        places = np.arange(len(chosen))[::-1]
        for values, shift, label in (
            ([float(one.printed) for one in chosen], 0.2, 'paper, as printed'),
            ([float(one.ours) for one in chosen], -0.2, 'counted'),
        ):
            axes.barh(places + shift, values, height=0.38, label=label)
        for place, one in zip(places, chosen, strict=True):
            star = '' if one.explained_by_rounding else '  *'
            largest = max(float(one.printed), float(one.ours))
            axes.annotate(
                f' {float(one.difference):+.3f}{star}',
                (largest, place),
                va='center',
                fontsize=8,
                weight='bold' if star else 'normal',
            )
        names = [f'T{one.row.table}  CARE-{one.row.arch.upper()}  {one.row.name}' for one in chosen]
        axes.set_yticks(places, names if unit == 'GMACs' else [''] * len(names), fontsize=8)
        axes.set(xlabel=unit)
        axes.margins(x=0.15, y=0.01)
        axes.spines[['top', 'right']].set_visible(False)
    figure.legend(*axes.get_legend_handles_labels(), loc='outside lower center', ncols=2)
    figure.suptitle(
        'Tables 3 to 5 at 224 x 224; at the bars: counted less printed\n'
        '* more than the rounding of the printed digits explains',
        fontsize=11,
    )
    write_png(figure, filename)


def plot_proposition(filename: Path) -> None:
    """Omega(D) / Omega(0) over d and D / d, with its limit and the networks' stages."""
    figure = new_figure(11, 8.5)
    grid = figure.subplots(2, 2, sharex=True, sharey=True)
    widths = np.geomspace(*WIDTHS, 100)
    shares = np.linspace(0, 1, 61)
    for axes, (kernels, heads) in zip(grid.flat, PANELS, strict=True):
        symmetric = [omega(1, 1, d, 0, kernels, heads) for d in widths]
        ratios = [
            [
                omega(1, 1, d, share * d, kernels, heads) / one
                for d, one in zip(widths, symmetric, strict=True)
            ]
            for share in shares
        ]
        mesh = axes.pcolormesh(
            widths, shares, ratios, cmap='RdBu_r', vmin=0.4, vmax=1.6, shading='gouraud'
        )
        limits = [float(delta_limit(d, kernels, heads)) / d for d in widths]
        axes.plot(widths, limits, color='black', label='limit: Omega(D) = Omega(0)')
        for attends, face, label in (
            (True, 'black', 'stages of the networks, attention'),
            (False, 'white', 'stages of the networks, strip convolutions'),
        ):
            chosen = [one for one in network_stages() if one.attends is attends]
            axes.plot(
                [one.d for one in chosen],
                [one.delta / one.d for one in chosen],
                linestyle='none',
                marker='o',
                markerfacecolor=face,
                markeredgecolor='black',
                label=label,
            )
        sizes = ' and '.join(f'{kernel}x{kernel}' for kernel in kernels)
        number = {(1, 1): 9, (2, 1): 17, (1, 8): 24, (2, 8): 27}[len(kernels), heads]
        axes.set(
            xscale='log',
            ylim=(0, 1),
            title=f'{sizes}, {heads} head{"s" if heads > 1 else ""} (Eq. {number})',
        )
        ticks = (12, 24, 48, 96, 144, 192, 288)
        axes.set_xticks(ticks, list(map(str, ticks)))
        axes.minorticks_off()
    for axes in grid[-1]:
        axes.set_xlabel('d, channels of the features')
    for axes in grid[:, 0]:
        axes.set_ylabel('D / d  (D = d2 - d1; 0: symmetric)')
    figure.colorbar(
        mesh, ax=grid, extend='both', label='Omega(D) / Omega(0); the proposition holds below 1'
    )
    figure.legend(*axes.get_legend_handles_labels(), loc='outside lower center', ncols=3)
    figure.suptitle('Is asymmetric decoupling the cheaper one? Blue: yes. Red: no.')
    write_png(figure, filename)


def new_figure(width: float, height: float) -> Any:
    """A figure of so many inches, without pyplot and its global state."""
    check_matplotlib()
    figure = import_module('matplotlib.figure')
    return figure.Figure(figsize=(width, height), layout='constrained')


def write_png(figure: Any, filename: Path, dpi: int = 110) -> None:
    """Write a figure, whole or not at all; a file that is there is replaced."""
    with moved_into_place(filename) as temporary:
        figure.savefig(temporary, dpi=dpi, format='png')
