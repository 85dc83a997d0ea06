"""Pictures of a recording: latency against accuracy, and against the size of the images."""

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from mmcare.analysis.plots import new_figure, write_png
from mmcare.deploy.latency_peers import read_contenders
from mmcare.deploy.latency_recording import Recording
from mmcare.deploy.latency_report import (
    growth_exponent,
    growth_of,
    latency_rows,
    pareto_line,
)

COLORS = dict(s0='C0', s1='C1', s2='C2')  # by class


def plot_accuracy(recording: Recording, backend: str, path: Path) -> None:
    """Published accuracy over measured latency, with quartiles and the Pareto line."""
    rows = [row for row in latency_rows(recording) if row['backend'] == backend]
    figure = new_figure(10, 8)
    axes = figure.subplots()
    times = {row['key']: row['milliseconds'] for row in rows}
    line = pareto_line(times)
    axes.step(
        [times[key] for key in line],
        [read_contenders()[key].top1 for key in line],
        where='post',
        color='0.6',
        linestyle='--',
        label='Pareto line',
    )
    for arch, color in COLORS.items():
        chosen = [row for row in rows if row['care_class'] == arch]
        for ours, marker, size in ((True, '*', 15), (False, 'o', 6)):
            part = [row for row in chosen if (row['key'] == arch) == ours]
            if not part:
                continue
            middle = np.array([row['milliseconds'] for row in part])
            lower = np.array([row['lower_quartile'] for row in part])
            upper = np.array([row['upper_quartile'] for row in part])
            axes.errorbar(
                middle,
                [row['top1'] for row in part],
                xerr=np.stack([middle - lower, upper - middle]),
                fmt=marker,
                markersize=size,
                color=color,
                label=f'CARE-{arch.upper()}' if ours else f'peers of its class ({arch})',
            )
    for row in rows:
        axes.annotate(
            row['model'],
            (row['milliseconds'], row['top1']),
            xytext=(6, -11) if row['key'] in COLORS else (5, 4),
            textcoords='offset points',
            fontsize=7,
            weight='bold' if row['key'] in COLORS else 'normal',
        )
    settings = recording.settings
    height, width = settings['shape']
    axes.set_xscale('log')
    axes.margins(x=0.08)
    _plain_ticks(axes.xaxis)
    axes.set(
        xlabel=f'latency of the backbone at {height} x {width}, batch {settings["batch"]}, in ms '
        f'({_conditions(recording, backend)})',
        ylabel='published top-1 accuracy on ImageNet-1K, in %',
    )
    axes.grid(alpha=0.3, which='both')
    figure.legend(loc='outside lower center', ncols=len(COLORS) + 1, fontsize=8, frameon=False)
    write_png(figure, path)


def plot_growth(recording: Recording, path: Path) -> None:
    """Latency over the side of square images, with the exponent of the growth."""
    figure = new_figure(8, 6)
    axes = figure.subplots()
    for key, one in growth_of(recording).items():
        axes.plot(
            list(one),
            list(one.values()),
            marker='*' if key in COLORS else 'o',
            linewidth=2 if key in COLORS else 1,
            linestyle='-' if key in COLORS else '--',
            label=f'{read_contenders()[key].label}: p = {growth_exponent(one):.2f}',
        )
    axes.set_xscale('log')
    axes.set_yscale('log')
    sides = sorted({side for one in growth_of(recording).values() for side in one})
    axes.set_xticks(sides, [str(side) for side in sides])
    axes.minorticks_off()
    _plain_ticks(axes.yaxis)
    axes.set(
        xlabel='side of the square image, in pixels',
        ylabel=f'latency in ms ({_conditions(recording, recording.settings["backends"][0])})',
    )
    axes.grid(alpha=0.3)
    axes.legend(title='latency ~ side^p; p = 2: linear in pixels', fontsize=9)
    write_png(figure, path)


def _conditions(recording: Recording, backend: str) -> str:
    settings = recording.settings
    if settings['device'] == 'cuda':
        return f'{backend}, GPU, {"float16" if settings["half"] else "float32"}'
    return f'{backend}, {settings["threads"]} thread{"s" * (settings["threads"] > 1)}'


def _plain_ticks(axis: Any) -> None:
    """Write 50, 100, 200, 500 on a logarithmic axis, not powers of ten."""
    ticker = import_module('matplotlib.ticker')
    axis.set_major_locator(ticker.LogLocator(base=10, subs=(1, 2, 5)))
    axis.set_major_formatter(ticker.FormatStrFormatter('%g'))
    axis.set_minor_formatter(ticker.NullFormatter())
