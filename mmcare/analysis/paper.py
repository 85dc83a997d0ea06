"""The cost of every ablation of the paper, counted, beside the figures of its Tables 3 to 5.

The paper's figures are its own measurements, as printed; none of them is ours. All are for images
of 224 x 224, both heads included.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

from mmcare.analysis.counting import Complexity, build_network, count_complexity

PAPER_SHAPE = (224, 224)


@dataclass(frozen=True)
class PaperRow:
    """A row of a table of the paper.

    Attributes:
        table: Number of the table.
        arch: Arch of :class:`mmcare.models.CARE`.
        name: What the row is called.
        gmacs, params_m: GMACs and millions of parameters, with the digits that the paper prints.
        arguments: Arguments of the backbone that make the row's network.
    """

    table: int
    arch: str
    name: str
    gmacs: str
    params_m: str
    arguments: dict[str, Any] = field(default_factory=dict)


PAPER_ROWS = (
    PaperRow(3, 's2', 'w/ Sym', '2.0', '19.7', dict(decoupling='symmetric')),
    PaperRow(3, 's2', 'w/ Sta', '2.1', '20.9', dict(decoupling='stacked')),
    PaperRow(3, 's2', 'w/o Local', '2.0', '20.7', dict(decoupling='global_only')),
    PaperRow(3, 's2', 'w/ Asym (full)', '1.9', '19.5'),
    PaperRow(4, 's0', 'without Inter1', '0.5', '5.5', dict(inter1=False)),
    PaperRow(4, 's0', 'without Inter2', '0.3', '2.7', dict(inter2=False)),
    PaperRow(4, 's0', 'without memory', '0.5', '5.4', dict(memory=False)),
    PaperRow(4, 's0', 'full', '0.7', '7.3'),
    PaperRow(5, 's0', 'full', '0.72', '7.34'),
    PaperRow(5, 's0', 'no early conv', '0.72', '7.34', dict(early_conv=False)),
    PaperRow(5, 's0', 'no multi-scale', '0.71', '7.32', dict(multi_scale=False)),
    PaperRow(5, 's1', 'full', '1.03', '9.60'),
    PaperRow(5, 's1', 'no early conv', '1.03', '9.60', dict(early_conv=False)),
    PaperRow(5, 's1', 'no multi-scale', '1.02', '9.57', dict(multi_scale=False)),
    PaperRow(5, 's2', 'full', '1.93', '19.48'),
    PaperRow(5, 's2', 'no early conv', '1.93', '19.48', dict(early_conv=False)),
    PaperRow(5, 's2', 'no multi-scale', '1.92', '19.43', dict(multi_scale=False)),
)


@dataclass(frozen=True)
class Comparison:
    """A figure of the paper and ours.

    Attributes:
        row: The paper's row.
        unit: ``'GMACs'`` or ``'M parameters'``.
        printed: The paper's figure, with its digits.
        counted: Ours, exact: multiply-adds or parameters.
    """

    row: PaperRow
    unit: str
    printed: str
    counted: int

    @property
    def ours(self) -> Decimal:
        """What we counted, in the unit of the paper."""
        return Decimal(self.counted).scaleb(-9 if self.unit == 'GMACs' else -6)

    @property
    def difference(self) -> Decimal:
        """Ours less the paper's."""
        return self.ours - Decimal(self.printed)

    @property
    def explained_by_rounding(self) -> bool:
        """Whether ours, rounded to the digits that the paper prints, can be the paper's."""
        return abs(self.difference) <= Decimal(1).scaleb(-self._printed_decimals) / 2

    def in_words(self) -> str:
        """Say what differs by more than rounding."""
        decimals = self._printed_decimals
        once = _rounded(self.ours, decimals)
        words = (
            f'Table {self.row.table}, CARE-{self.row.arch.upper()}, {self.row.name}: we count '
            f'{self.ours:.4f} {self.unit}, which rounds to {once}; the paper prints {self.printed}.'
        )
        longer = _rounded(self.ours, decimals + 1)
        if _rounded(longer, decimals) == Decimal(self.printed):
            words += (
                f' (Rounded twice, by way of {longer}, ours would be {self.printed} too; whether '
                'the paper did so is not known.)'
            )
        return words

    @property
    def _printed_decimals(self) -> int:
        """Digits behind the point of the paper's figure."""
        return len(self.printed.partition('.')[2])


def _rounded(value: Decimal, decimals: int) -> Decimal:
    return value.quantize(Decimal(1).scaleb(-decimals), rounding=ROUND_HALF_UP)


def compare_with_paper(rows: Sequence[PaperRow] | None = None) -> list[Comparison]:
    """Count every row's network, and put the paper's figures beside the results.

    Args:
        rows: By default all of :data:`PAPER_ROWS`.

    Returns:
        Two comparisons for each row: multiply-adds, then parameters.
    """
    counted: dict[tuple, Complexity] = {}
    comparisons = []
    for row in PAPER_ROWS if rows is None else rows:
        key = (row.arch, *row.arguments.items())
        if key not in counted:
            network = build_network(row.arch, **row.arguments)
            counted[key] = count_complexity(network, PAPER_SHAPE)
        comparisons += [
            Comparison(row, 'GMACs', row.gmacs, counted[key].macs),
            Comparison(row, 'M parameters', row.params_m, counted[key].params),
        ]
    return comparisons
