"""Complexity as text to read, and as CSV to compute with."""

import csv
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmcare.analysis.counting import HEAD_STAGE, PARTS, STAGES, Complexity
from mmcare.analysis.equations import smallest_width
from mmcare.analysis.mixer import MixerTerms
from mmcare.analysis.paper import Comparison
from mmcare.analysis.proposition import StageOfNetwork
from mmcare.output import moved_into_place

Rows = list[dict[str, Any]]


# ---------------------------------------------------------------- text


def complexity_text(complexity: Complexity) -> str:
    """Parameters and multiply-adds, parts down and stages across."""
    lines = [
        f'{complexity.name}, image of {complexity.shape[0]} x {complexity.shape[1]}: '
        f'{complexity.params:,} parameters, {complexity.macs:,} multiply-adds '
        f'({complexity.macs / 1e9:.4f} GMACs)'
    ]
    stages = stages_of(complexity)
    head = [*(f'stage {stage}' if stage in STAGES else stage for stage in stages), 'all']
    for quantity, title in (('params', 'parameters'), ('macs', 'multiply-adds')):
        counts = {(one.part, one.stage): getattr(one, quantity) for one in complexity.shares}
        rows = []
        for part in parts_of(complexity):
            row = [counts.get((part, stage), '-') for stage in stages]
            rows.append([part, *row, complexity.total(quantity, part=part)])
        total = ['all', *(complexity.total(quantity, stage) for stage in stages)]
        table = [*rows, [*total, complexity.total(quantity)]]
        lines += ['', format_table([title, *head], table, rules=(len(rows),))]
    return '\n'.join(lines)


def stages_of(complexity: Complexity) -> list[str]:
    """The stages that a network has, the head among them."""
    found = {share.stage for share in complexity.shares}
    return [stage for stage in (*STAGES, HEAD_STAGE) if stage in found]


def parts_of(complexity: Complexity) -> list[str]:
    """The parts that a network has."""
    found = {share.part for share in complexity.shares}
    return [part for part in PARTS if part in found]


def paper_text(comparisons: Sequence[Comparison]) -> str:
    """The paper's figures beside ours; what rounding does not explain is marked and said."""
    head = ['table', 'model', 'row', 'GMACs paper', 'ours', 'diff.', '']
    head += ['M params paper', 'ours', 'diff.', '']
    rows, rules = [], []
    pairs = list(zip(comparisons[::2], comparisons[1::2], strict=True))
    for index, pair in enumerate(pairs):
        paper_row = pair[0].row
        if index and paper_row.table != pairs[index - 1][0].row.table:
            rules.append(index)
        cells = [str(paper_row.table), f'CARE-{paper_row.arch.upper()}', paper_row.name]
        for one, digits in zip(pair, (4, 3), strict=True):
            mark = '' if one.explained_by_rounding else '*'
            cells += [one.printed, f'{one.ours:.{digits}f}', f'{one.difference:+.{digits}f}', mark]
        rows.append(cells)
    table = format_table(head, rows, rules=rules, left=3)
    differing = [one.in_words() for one in comparisons if not one.explained_by_rounding]
    if not differing:
        return f'{table}\n\nAll of ours round to what the paper prints.'
    lines = [table, '', '* More than the rounding of the printed digits explains:']
    for words in differing:
        lines.append(textwrap.fill(words, 97, initial_indent='  ', subsequent_indent='  '))
    return '\n'.join(lines)


def mixer_text(name: str, terms: MixerTerms, counted: int) -> str:
    """Omega and the network's mixer side by side, term by term."""
    d1 = terms.global_channels
    title = (
        f'{name}, stage {terms.stage}: one mixer on {terms.height} x {terms.width} positions, '
        f'd = {3 * d1}, d1 = {d1}, d2 = {2 * d1}, n = {terms.heads}'
    )
    rows = [
        [term.name, term.formula, term.omega, term.network, term.omega - term.network]
        for term in terms.terms
    ]
    rows.append(['all', '', terms.omega, terms.network, terms.omega - terms.network])
    rows.append(['counted by mmengine.analysis', '', '', counted, ''])
    head = ['multiply-adds', 'formula', 'omega', 'network', 'difference']
    return f'{title}\n' + format_table(head, rows, rules=(len(terms.terms),), left=2)


def proposition_text(stages: Sequence[StageOfNetwork]) -> str:
    """Where Omega(D) < Omega(0) holds at the widths of the networks."""
    head = ['stage', 'd', 'own D', 'kernels', 'heads', 'holds for D <', 'all D < d', 'at own D']
    rows = [
        [
            stage.name,
            stage.d,
            stage.delta,
            _kernels(stage.kernels),
            stage.heads,
            f'{float(stage.limit):.2f}',
            _yes(stage.holds_for_all),
            _yes(stage.holds_here),
        ]
        for stage in stages
    ]
    rules = [
        index for index in range(1, len(stages)) if stages[index].name != stages[index - 1].name
    ]
    lines = [
        format_table(head, rows, rules=rules, left=1),
        '',
        'Omega(D) < Omega(0) for every D between 0 and d if d is at least',
    ]
    for kernels in dict.fromkeys(stage.kernels for stage in stages):
        lines.append(
            f'  {float(smallest_width(kernels)):.2f} with {_kernels(kernels)} and a single head, '
            f'{sum(k**2 for k in kernels) / len(kernels):.2f} with however many heads.'
        )
    for stage in stages:
        if not stage.holds_for_all:
            lines.append(
                f'With {_kernels(stage.kernels)} and n = {stage.heads} it fails at d = {stage.d} '
                f'for {max(stage.limit, 0)} <= D < {stage.d}.'
            )
    lines.append(
        'As released, stages 1 and 2 have no attention; n = 8 and 16 are for early_conv=False.'
    )
    return '\n'.join(lines)


def _kernels(kernels: Sequence[int]) -> str:
    return ' and '.join(f'{kernel}x{kernel}' for kernel in kernels)


def format_table(
    head: Sequence[str], rows: Sequence[Sequence[Any]], rules: Sequence[int] = (), left: int = 1
) -> str:
    """Lay out a table of plain text.

    Args:
        head: Titles of the columns.
        rows: Cells; integers get thousands separators.
        rules: Indices of the rows that a line is drawn above.
        left: How many of the first columns are set flush left; the others are flush right.
    """
    cells = [list(head)] + [
        [f'{cell:,}' if isinstance(cell, int) else str(cell) for cell in row] for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        '  '.join(
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    rule = '-' * (sum(widths) + 2 * (len(widths) - 1))
    for index in sorted({0, *rules}, reverse=True):
        lines.insert(index + 1, rule)
    return '\n'.join(lines)


def _yes(holds: bool) -> str:
    return 'yes' if holds else 'no'


# ---------------------------------------------------------------- CSV


def complexity_rows(complexity: Complexity) -> Rows:
    """A row for each part of each stage, and one for all of them."""
    height, width = complexity.shape
    common = dict(model=complexity.name, height=height, width=width)
    rows = [
        {**common, 'stage': one.stage, 'part': one.part, 'params': one.params, 'macs': one.macs}
        for one in complexity.shares
    ]
    total = dict(stage='all', part='all', params=complexity.params, macs=complexity.macs)
    return [*rows, {**common, **total}]


def paper_rows(comparisons: Sequence[Comparison]) -> Rows:
    """A row for each figure of the paper; ``counted`` is exact, ``ours`` in the paper's unit."""
    return [
        dict(
            table=one.row.table,
            model=f'CARE-{one.row.arch.upper()}',
            row=one.row.name,
            unit=one.unit,
            paper=one.printed,
            ours=str(one.ours),
            difference=str(one.difference),
            explained_by_rounding=_yes(one.explained_by_rounding),
            counted=one.counted,
        )
        for one in comparisons
    ]


def mixer_rows(name: str, terms: MixerTerms, counted: int) -> Rows:
    """A row for each term, one for their sums, and one for what was counted."""
    common = dict(
        model=name,
        stage=terms.stage,
        height=terms.height,
        width=terms.width,
        d1=terms.global_channels,
        heads=terms.heads,
    )
    rows = [
        {**common, 'term': one.name, 'omega': one.omega, 'network': one.network}
        for one in terms.terms
    ]
    rows.append({**common, 'term': 'all', 'omega': terms.omega, 'network': terms.network})
    return [*rows, {**common, 'term': 'counted', 'omega': '', 'network': counted}]


def proposition_rows(stages: Sequence[StageOfNetwork]) -> Rows:
    """A row for each stage's width with each choice of kernels and heads; exact limits."""
    return [
        dict(
            stage=one.name,
            d=one.d,
            delta=one.delta,
            kernels='+'.join(map(str, one.kernels)),
            heads=one.heads,
            delta_limit=str(one.limit),
            holds_for_all=_yes(one.holds_for_all),
            holds_here=_yes(one.holds_here),
        )
        for one in stages
    ]


def write_csv(rows: Rows, filename: Path) -> None:
    """Write rows of equal keys as CSV."""
    with (
        moved_into_place(filename) as temporary,
        temporary.open('w', newline='', encoding='utf-8') as file,
    ):
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator='\n')
        writer.writeheader()
        writer.writerows(rows)
