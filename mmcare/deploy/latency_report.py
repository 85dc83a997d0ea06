"""Tables of a recording: latencies beside CARE's, who is not beaten, growth with the size."""

from statistics import median, quantiles
from typing import Any

import numpy as np

from mmcare.deploy.latency_peers import read_contenders
from mmcare.deploy.latency_recording import Measurement, Recording

BUSY = 0.9  # of a core: below it, something else was running
Rows = list[dict[str, Any]]


def main_measurements(recording: Recording) -> list[Measurement]:
    """The measurements of all networks, one for each backend."""
    shape = tuple(recording.settings['shape'])
    return [one for one in recording.measurements if one.shape == shape]


def latency_rows(recording: Recording) -> Rows:
    """A row for each backend and network, by class and latency.

    ``ratio`` is the median over the rounds of the network's time over that of CARE of its class in
    the same round: above 1 CARE is faster. ``pareto`` says whether no other network is both
    as fast and as accurate, and better in one of them.
    """
    contenders = read_contenders()
    rows: Rows = []
    for measurement in main_measurements(recording):
        times = measurement.milliseconds
        unbeaten = pareto_line({key: median(values) for key, values in times.items()})
        part = []
        for key, values in times.items():
            one = contenders[key]
            care = times.get(one.care_class)
            lower, _, upper = quantiles(values, n=4, method='inclusive')
            ratios = [] if care is None else [a / b for a, b in zip(values, care, strict=True)]
            part.append(
                dict(
                    backend=measurement.backend,
                    height=measurement.shape[0],
                    width=measurement.shape[1],
                    care_class=one.care_class,
                    key=key,
                    model=one.label,
                    top1=one.top1,
                    parameters=recording.parameters[key],
                    milliseconds=round(median(values), 3),
                    lower_quartile=round(lower, 3),
                    upper_quartile=round(upper, 3),
                    ratio=round(median(ratios), 3) if ratios else '',
                    pareto='yes' if key in unbeaten else 'no',
                    accuracy_note=one.note,
                    accuracy_source=one.source,
                    accuracy_link=one.link,
                )
            )
        rows += sorted(part, key=lambda row: (row['care_class'], row['milliseconds']))
    return rows


def pareto_line(milliseconds: dict[str, float]) -> list[str]:
    """Keys of the networks that no other one beats, from the fastest to the most accurate."""
    contenders = read_contenders()
    ordered = sorted(milliseconds, key=lambda key: (milliseconds[key], -contenders[key].top1))
    line: list[str] = []
    for key in ordered:
        if not line or contenders[key].top1 > contenders[line[-1]].top1:
            line.append(key)
    return line


def growth_of(recording: Recording) -> dict[str, dict[int, float]]:
    """Median milliseconds by side, for square images, of each network measured at two or more."""
    backend = recording.settings['backends'][0]
    sides: dict[str, dict[int, float]] = {}
    for measurement in recording.measurements:
        height, width = measurement.shape
        if measurement.backend == backend and height == width:
            for key, values in measurement.milliseconds.items():
                sides.setdefault(key, {})[height] = median(values)
    return {key: dict(sorted(one.items())) for key, one in sides.items() if len(one) > 1}


def growth_exponent(milliseconds: dict[int, float]) -> float:
    """Fit p of latency = c side^p, least squares of the logarithms.

    2 is linear in the number of pixels, 4 quadratic in it.
    """
    sides, times = np.log(np.array(list(milliseconds.items()), dtype=float)).T
    return float(np.polyfit(sides, times, 1)[0])


def growth_rows(recording: Recording) -> Rows:
    """A row for each network that was measured at several sizes; empty if none was."""
    growth = growth_of(recording)
    sides = sorted({side for one in growth.values() for side in one})
    return [
        dict(
            backend=recording.settings['backends'][0],
            key=key,
            model=read_contenders()[key].label,
            **{f'ms_{side}': round(one[side], 3) if side in one else '' for side in sides},
            exponent=round(growth_exponent(one), 3),
        )
        for key, one in growth.items()
    ]


# ---------------------------------------------------------------- Markdown


def markdown_report(recording: Recording) -> str:
    """All tables, and plain words on where CARE loses."""
    settings = recording.settings
    parts = [_conditions(recording)]
    rows = latency_rows(recording)
    for measurement in main_measurements(recording):
        height, width = measurement.shape
        parts.append(f'## {measurement.backend}, {height}x{width}, batch {settings["batch"]}')
        chosen = [row for row in rows if row['backend'] == measurement.backend]
        parts.append(_latency_table(chosen))
        parts.append('\n'.join(f'- {line}' for line in verdicts(chosen)))
        share = measurement.processor_share
        if share is not None and share < BUSY:
            parts.append(
                f'The machine was busy: this process had {share:.2f} of a core. '
                'Measure again on an idle one.'
            )
    growth = growth_rows(recording)
    if growth:
        parts.append(
            f'## Growth with the size ({settings["backends"][0]}, ms, latency ~ side^p)\n\n'
            'p = 2 is linear in the number of pixels, p = 4 quadratic.'
        )
        parts.append(_growth_table(growth))
    return '\n\n'.join(parts)


def verdicts(rows: Rows) -> list[str]:
    """A sentence on each CARE network: whom it beats in its class, and who beats it."""
    sentences = []
    for care in (row for row in rows if row['key'] == row['care_class']):
        others = [row for row in rows if row['key'] != row['care_class']]
        slower = [
            row
            for row in others
            if row['care_class'] == care['key'] and row['milliseconds'] > care['milliseconds']
        ]
        number = sum(row['care_class'] == care['key'] for row in others)
        better = [
            row['model']
            for row in others
            if row['milliseconds'] <= care['milliseconds'] and row['top1'] >= care['top1']
        ]
        sentence = (
            f'{care["model"]}: {care["milliseconds"]:.1f} ms, {care["top1"]:.1f} %; faster than '
            f'{len(slower)} of {number} peers of its class.'
        )
        if better:
            sentence += f' At least as fast and as accurate: {", ".join(better)}.'
        elif others:
            sentence += ' No peer is at least as fast and as accurate.'
        sentences.append(sentence)
    return sentences


def _conditions(recording: Recording) -> str:
    settings, machine, versions = recording.settings, recording.machine, recording.versions
    where = (
        f'a GPU ({machine["gpu"]}, {"float16" if settings["half"] else "float32"})'
        if settings['device'] == 'cuda'
        else f'the CPU, {settings["threads"]} thread{"s" * (settings["threads"] > 1)}, float32'
    )
    layout = ', channels last' if settings['channels_last'] else ''
    return (
        'Backbones with four maps, folded, random weights, measured in turn on '
        f'{where}{layout}. Median and quartiles of {settings["runs"]} rounds; '
        '"x CARE" is the time over that of CARE of the same class in the same round (above 1: CARE '
        'is faster). Bold: on the Pareto line. Accuracies are published ones, at the sizes of '
        'their papers (224x224 but for a few), with sources in latency.csv.\n\n'
        f'Machine: {machine["cores"]} cores, {machine["architecture"]}, '
        f'{machine["vector_instructions"]}, {machine["system"]}. '
        f'Versions: {", ".join(f"{name} {version}" for name, version in versions.items())}.'
    )


def _latency_table(rows: Rows) -> str:
    lines = [
        '| class | backbone | top-1, % | parameters, M | ms | quartiles | x CARE |',
        '|---|---|---|---|---|---|---|',
    ]
    for row in rows:
        name = row['model']
        ratio = '' if row['ratio'] == '' else f'{row["ratio"]:.2f}'
        cells = (
            row['care_class'],
            f'**{name}**' if row['pareto'] == 'yes' else name,
            f'{row["top1"]:.1f}',
            f'{row["parameters"] / 1e6:.1f}',
            f'{row["milliseconds"]:.1f}',
            f'{row["lower_quartile"]:.1f} to {row["upper_quartile"]:.1f}',
            ratio,
        )
        lines.append(f'| {" | ".join(cells)} |')
    return '\n'.join(lines)


def _growth_table(rows: Rows) -> str:
    sides = [name.removeprefix('ms_') for name in rows[0] if name.startswith('ms_')]
    lines = [f'| backbone | {" | ".join(sides)} | p |', '|---' * (len(sides) + 2) + '|']
    for row in rows:
        times = [row[f'ms_{side}'] for side in sides]
        cells = ['' if value == '' else f'{value:.1f}' for value in times]
        lines.append(f'| {row["model"]} | {" | ".join(cells)} | {row["exponent"]:.2f} |')
    return '\n'.join(lines)
