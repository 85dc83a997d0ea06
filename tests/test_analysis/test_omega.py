"""The complexity model: each equation by hand, identities by symbols, the proposition's limit."""

import doctest
from fractions import Fraction

import pytest
import sympy

from mmcare.analysis import equations
from mmcare.analysis.equations import (
    delta_limit,
    omega,
    omega_decoupled,
    omega_difference,
    omega_stacked,
    proposition_holds,
    smallest_width,
)
from mmcare.analysis.proposition import network_stages
from mmcare.models import CARE

HW = dict(h=2, w=3)


@pytest.mark.parametrize(
    ('equation', 'value', 'by_hand'),
    [
        # 2 * 9 * 6 * 5, 4 * 6 * 25 and 2 * 6 * 25
        (4, omega_stacked(**HW, d=5, k=3), 540 + 600 + 300),
        # 2 * 9 * 6 * 4, 4 * 6 * 4 and 2 * 6 * 4
        (8, omega_decoupled(**HW, d1=2, d2=4, kernels=(3,)), 432 + 96 + 48),
        # 9 * 6 * 8 and 3/2 * 6 * 16
        (9, omega(**HW, d=6, delta=2, kernels=(3,)), 432 + 144),
        # 3/2 * 6 * 2 and 2/3 * 9 + 2 + 0 - 12
        (10, omega_difference(**HW, d=6, delta1=2, delta2=0, kernels=(3,)), 18 * -4),
        # 1/2 * 6 * (9 + 49) * 8 and 3/2 * 6 * 16
        (17, omega(**HW, d=6, delta=2, kernels=(3, 7)), 1392 + 144),
        # 3/2 * 6 * 2 and 9/3 + 49/3 + 3 + 1 - 12
        (
            19,
            omega_difference(**HW, d=6, delta1=3, delta2=1, kernels=(3, 7)),
            18 * Fraction(34, 3),
        ),
        # 3/2 * 6 * 2 and 9/3 + 49/3 + 2 - 12
        (
            20,
            omega_difference(**HW, d=6, delta1=2, delta2=0, kernels=(3, 7)),
            18 * Fraction(28, 3),
        ),
        # 2 * 9 * 6 * 8, 4 * 6 * 16 and 2 * 6 * 16 / 2
        (23, omega_decoupled(**HW, d1=4, d2=8, kernels=(3,), heads=2), 864 + 384 + 96),
        # 9 * 6 * 16 and 5/4 * 6 * 64
        (24, omega(**HW, d=12, delta=4, kernels=(3,), heads=2), 864 + 480),
        # 5/4 * 6 * 2 and 4/5 * 9 + 4 + 2 - 24
        (26, omega_difference(**HW, d=12, delta1=4, delta2=2, kernels=(3,), heads=2), -162),
        # 1/2 * 6 * (9 + 49) * 16 and 5/4 * 6 * 64
        (27, omega(**HW, d=12, delta=4, kernels=(3, 7), heads=2), 2784 + 480),
        # 5/4 * 6 * 2 and 2 * (9 + 49) / 5 + 4 + 2 - 24
        (29, omega_difference(**HW, d=12, delta1=4, delta2=2, kernels=(3, 7), heads=2), 78),
        # 5/4 * 6 * 4 and 2 * (9 + 49) / 5 + 4 - 24
        (30, omega_difference(**HW, d=12, delta1=4, delta2=0, kernels=(3, 7), heads=2), 96),
    ],
)
def test_equations_by_hand(equation, value, by_hand):
    assert value == by_hand, f'Eq. {equation}'
    assert isinstance(value, int), 'exact numbers stay exact'


def test_equation_10_by_symbols():
    h, w, d, k, first, second = sympy.symbols('h w d k Delta_1 Delta_2', positive=True)
    printed = (
        sympy.Rational(3, 2)
        * h
        * w
        * (first - second)
        * (sympy.Rational(2, 3) * k**2 + first + second - 2 * d)
    )
    by_definition = omega(h, w, d, first, (k,)) - omega(h, w, d, second, (k,))
    assert sympy.expand(by_definition - printed) == 0
    assert sympy.expand(omega_difference(h, w, d, first, second, (k,)) - printed) == 0


def test_equation_29_by_symbols():
    h, w, d, k1, k2, n, first, second = sympy.symbols('h w d k_1 k_2 n D_1 D_2', positive=True)
    printed = (
        (2 * n + 1)
        / (2 * n)
        * h
        * w
        * (first - second)
        * (n * (k1**2 + k2**2) / (2 * n + 1) + first + second - 2 * d)
    )
    arguments = dict(kernels=(k1, k2), heads=n)
    by_definition = omega(h, w, d, first, **arguments) - omega(h, w, d, second, **arguments)
    assert sympy.simplify(by_definition - printed) == 0
    factored = omega_difference(h, w, d, first, second, **arguments)
    assert sympy.simplify(factored - printed) == 0


def test_equation_9_and_27_are_8_and_23_rewritten():
    h, w, d, k1, k2, n, delta = sympy.symbols('h w d k_1 k_2 n Delta', positive=True)
    for kernels, heads in (((k1,), 1), ((k1, k2), n)):
        by_widths = omega_decoupled(h, w, (d - delta) / 2, (d + delta) / 2, kernels, heads)
        assert sympy.simplify(by_widths - omega(h, w, d, delta, kernels, heads)) == 0


def test_limit_against_the_definition():
    """The closed form against omega itself, over widths, kernels, heads and D to just below d."""
    found = set()
    for d in range(3, 60, 3):
        deltas = [*range(1, d), d - Fraction(1, 10**6)]
        for kernels in ((3,), (7,), (3, 7)):
            for heads in (1, 2, 8):
                limit = delta_limit(d, kernels, heads)
                holds = [proposition_holds(d, delta, kernels, heads) for delta in deltas]
                assert holds == [delta < limit for delta in deltas]
                assert all(holds) is (d >= smallest_width(kernels, heads))
                found.add((any(holds), all(holds)))
    assert found == {(False, False), (True, False), (True, True)}


def test_where_the_proposition_fails():
    assert delta_limit(24, (7,)) == Fraction(46, 3)
    at_the_limit = omega_difference(1, 1, 24, Fraction(46, 3), 0, (7,))
    assert at_the_limit == 0
    assert proposition_holds(24, 15, (7,))
    assert not proposition_holds(24, Fraction(46, 3), (7,))
    assert not proposition_holds(24, 16, (7,))
    assert smallest_width((7,)) == Fraction(98, 3)
    # What the paper prints in Eq. 22: 20 is enough, and 58/3 is exact.
    assert smallest_width((3, 7)) == Fraction(58, 3) < 20


def test_the_networks_own_stages():
    stages = network_stages()
    assert {stage.d for stage in stages} == {
        width for arch in CARE.arch_zoo.values() for width in arch['widths']
    }
    assert {stage.d for stage in stages if stage.attends} == {96, 144, 192, 288}
    assert {(stage.d, stage.heads) for stage in stages if stage.attends and stage.heads > 1} == {
        (96, 2),
        (144, 3),
        (192, 2),
        (288, 3),
    }
    assert all(stage.holds_for_all for stage in stages if stage.d > 24)
    failing = {(stage.kernels, stage.heads) for stage in stages if not stage.holds_for_all}
    assert failing == {((7,), 1), ((7,), 8), ((3, 7), 8)}
    assert [stage.heads for stage in stages if not stage.holds_here] == [8]


def test_floats_are_taken():
    assert omega(2.0, 3.0, 6.0, 2.0, (3.0,)) == pytest.approx(576)


@pytest.mark.parametrize(
    ('call', 'error', 'words'),
    [
        (lambda: omega_stacked(0, 3, 5, 3), ValueError, 'h must be finite and at least 1, got 0'),
        (lambda: omega_stacked(2, 3, -5, 3), ValueError, 'd must be .* at least 0, got -5'),
        (lambda: omega_stacked(2, 3, 5, 0), ValueError, 'k must be'),
        (lambda: omega_stacked(2, 3, float('nan'), 3), ValueError, 'd must be finite'),
        (lambda: omega_stacked(2, 3, float('inf'), 3), ValueError, 'd must be finite'),
        (lambda: omega_stacked('2', 3, 5, 3), TypeError, "h must be a number, got '2'"),
        (lambda: omega_decoupled(2, 3, -1, 4, (3,)), ValueError, 'd1 must be'),
        (lambda: omega_decoupled(2, 3, 2, 4, ()), TypeError, 'at least one kernel size'),
        (lambda: omega_decoupled(2, 3, 2, 4, 3), TypeError, 'sequence'),
        (lambda: omega_decoupled(2, 3, 2, 4, (3, 0)), ValueError, 'kernels must be'),
        (lambda: omega(2, 3, 6, 7, (3,)), ValueError, 'delta must lie between -d and d = 6, got 7'),
        (lambda: omega(2, 3, 6, True, (3,)), TypeError, 'delta must be a number'),
        (lambda: omega(2, 3, 6, 2, (3,), heads=0), ValueError, 'heads must be at least 1'),
        (lambda: omega(2, 3, 6, 2, (3,), heads=1.5), TypeError, 'heads must be an integer'),
        (lambda: omega_difference(2, 3, 6, 2, -7, (3,)), ValueError, 'delta2 must lie'),
        (lambda: proposition_holds(24, 0, (7,)), ValueError, 'above 0 and below d = 24'),
        (lambda: proposition_holds(24, 24, (7,)), ValueError, 'above 0 and below d = 24'),
        (lambda: delta_limit(-1, (7,)), ValueError, 'd must be'),
    ],
)
def test_bad_arguments(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_examples_of_the_docstrings():
    assert doctest.testmod(equations).attempted >= 2
    assert doctest.testmod(equations).failed == 0
