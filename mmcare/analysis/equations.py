"""Omega, the paper's complexity model of a token mixer: Section 3.3 and supplement 10.

Omega is the number of multiply-adds that a mixer spends on local inductive bias and long-range
dependencies, on a map of h x w positions with d channels:

- local: two passes of a depth-wise k x k convolution;
- global: four projections (q, k, v and output) and two products (keys with values, queries with
  their result), the products within n heads.

A decoupled mixer does the global part on d1 channels and the local part on the other d2. With the
difference D = d2 - d1 (Delta in the paper), d1 = (d - D) / 2 and d2 = (d + D) / 2. Local features
may be shared out evenly among several kernel sizes: k^2 then stands for the mean of their squares.

This is a model. The released network has one local pass, no projection of the values and of the
output, and a normaliser: :mod:`mmcare.analysis.mixer` puts the two side by side.

Exact numbers give exact results: integers and fractions never become floats. Symbols (of SymPy)
pass through; their ranges are not checked.
"""

from collections.abc import Sequence
from fractions import Fraction
from numbers import Integral, Real
from typing import Any

Number = Any  # int, float, Fraction or a symbol


def omega_stacked(h: Number, w: Number, d: Number, k: Number) -> Number:
    """Eq. 4: local, global and local learner one after the other, on all channels.

    Omega = 2 k^2 h w d + 4 h w d^2 + 2 h w d^2

    Args:
        h, w: Height and width of the map.
        d: Channels of the map.
        k: Kernel size of the local learners.

    Returns:
        Multiply-adds.

    Raises:
        TypeError: If an argument is not a number.
        ValueError: If an argument is not finite or below its least value.
    """
    _check(h=(h, 1), w=(w, 1), d=(d, 0), k=(k, 1))
    return _simplest(2 * k**2 * h * w * d + 4 * h * w * d**2 + 2 * h * w * d**2)


def omega_decoupled(
    h: Number, w: Number, d1: Number, d2: Number, kernels: Sequence[Number], heads: Number = 1
) -> Number:
    """Eq. 8 and, with several heads, Eq. 23: global learner on d1 channels, local on d2.

    Omega = 2 k^2 h w d2 + 4 h w d1^2 + 2 h w d1^2 / n

    Eq. 8 writes d2 as lambda_2 d and d1^2 as lambda_1 d^2.

    Args:
        h, w: Height and width of the map.
        d1: Global channels.
        d2: Local channels.
        kernels: Kernel sizes of the local learner, such as ``(3, 7)``.
        heads: Number of attention heads, n.

    Returns:
        Multiply-adds.

    Raises:
        TypeError: If an argument is not a number, or ``heads`` not an integer.
        ValueError: If an argument is not finite or below its least value.
    """
    _check(h=(h, 1), w=(w, 1), d1=(d1, 0), d2=(d2, 0))
    _check_heads(heads)
    local = 2 * _mean_square(kernels) * h * w * d2
    return _simplest(local + 2 * _global_factor(heads) * 2 * h * w * d1**2)


def omega(
    h: Number,
    w: Number,
    d: Number,
    delta: Number,
    kernels: Sequence[Number],
    heads: Number = 1,
) -> Number:
    """Eq. 9, 17, 24 and 27: a decoupled mixer as a function of D = d2 - d1.

    Omega(D) = k^2 h w (d + D) + (1 + 1/(2n)) h w (d - D)^2

    One kernel: Eq. 9 (n = 1) and 24. Two kernels, (k1^2 + k2^2) / 2 for k^2: Eq. 17 (n = 1) and 27.

    Args:
        h, w: Height and width of the map.
        d: Channels of the map.
        delta: D, from -d (all channels global) to d (all local); 0 is the symmetric decoupling.
        kernels: Kernel sizes of the local learner.
        heads: Number of attention heads, n.

    Returns:
        Multiply-adds.

    Raises:
        TypeError: If an argument is not a number, or ``heads`` not an integer.
        ValueError: If an argument is outside of its range.
    """
    _check(h=(h, 1), w=(w, 1), d=(d, 0))
    _check_delta('delta', delta, d)
    _check_heads(heads)
    local = _mean_square(kernels) * h * w * (d + delta)
    return _simplest(local + _global_factor(heads) * h * w * (d - delta) ** 2)


def omega_difference(
    h: Number,
    w: Number,
    d: Number,
    delta1: Number,
    delta2: Number,
    kernels: Sequence[Number],
    heads: Number = 1,
) -> Number:
    """Eq. 10, 19, 26 and 29: Omega(D1) - Omega(D2), factored as in the paper.

    Omega(D1) - Omega(D2) = c h w (D1 - D2) (k^2 / c + D1 + D2 - 2 d),  c = 1 + 1/(2n)

    One kernel: Eq. 10 (n = 1, c = 3/2) and 26. Two kernels: Eq. 19 (n = 1) and 29. With D2 = 0
    these are Eq. 20 (n = 1) and 30.

    Args:
        h, w: Height and width of the map.
        d: Channels of the map.
        delta1, delta2: D1 and D2, each from -d to d.
        kernels: Kernel sizes of the local learner.
        heads: Number of attention heads, n.

    Returns:
        Multiply-adds; negative where D1 is the cheaper.

    Raises:
        TypeError: If an argument is not a number, or ``heads`` not an integer.
        ValueError: If an argument is outside of its range.
    """
    _check(h=(h, 1), w=(w, 1), d=(d, 0))
    _check_delta('delta1', delta1, d)
    _check_delta('delta2', delta2, d)
    _check_heads(heads)
    factor = _global_factor(heads) * h * w * (delta1 - delta2)
    return _simplest(factor * (smallest_width(kernels, heads) + delta1 + delta2 - 2 * d))


def smallest_width(kernels: Sequence[Number], heads: Number = 1) -> Number:
    """The width from which on Proposition 3 holds for every D: k^2 / (1 + 1/(2n)).

    Proposition 3 says that Omega(D) < Omega(0). By the factors of Eq. 10 (19, 26, 29) that is so
    for all 0 < D < d exactly if d is at least this. It is 2 k^2 / 3 with a single head, and
    approaches k^2 with many.

    Args:
        kernels: Kernel sizes of the local learner.
        heads: Number of attention heads, n.

    Returns:
        Channels; a fraction where it is one.

    Raises:
        TypeError: If an argument is not a number, or ``heads`` not an integer.
        ValueError: If an argument is below 1.
    """
    _check_heads(heads)
    return _simplest(_mean_square(kernels) / _global_factor(heads))


def delta_limit(d: Number, kernels: Sequence[Number], heads: Number = 1) -> Number:
    """The D below which Proposition 3 holds: 2 d - k^2 / (1 + 1/(2n)).

    For 0 < D < d, Omega(D) < Omega(0) exactly if D is below this. At or above d: the proposition
    holds for every D. At or below 0: for none. The parabola Omega(D) has its minimum at half of it.

    Args:
        d: Channels of the map.
        kernels: Kernel sizes of the local learner.
        heads: Number of attention heads, n.

    Returns:
        Channels; a fraction where it is one.

    Raises:
        TypeError: If an argument is not a number, or ``heads`` not an integer.
        ValueError: If an argument is below its least value.

    Example:
        >>> delta_limit(24, kernels=(7,))
        Fraction(46, 3)
        >>> delta_limit(24, kernels=(3, 7))
        Fraction(86, 3)
    """
    _check(d=(d, 0))
    return _simplest(2 * d - smallest_width(kernels, heads))


def proposition_holds(
    d: Number, delta: Number, kernels: Sequence[Number], heads: Number = 1
) -> bool:
    """Whether Omega(D) < Omega(0), by the sign of the difference and not by the limit.

    Args:
        d: Channels of the map.
        delta: D, above 0 and below d.
        kernels: Kernel sizes of the local learner.
        heads: Number of attention heads, n.

    Raises:
        TypeError: If an argument is not a number, or ``heads`` not an integer.
        ValueError: If an argument is outside of its range.
    """
    _check(d=(d, 0), delta=(delta, 0))
    if not 0 < delta < d:
        raise ValueError(
            f'delta must lie above 0 and below d = {d}, where both learners have channels; '
            f'got {delta!r}'
        )
    return bool(omega(1, 1, d, delta, kernels, heads) < omega(1, 1, d, 0, kernels, heads))


def _mean_square(kernels: Sequence[Number]) -> Number:
    """k^2 of Eq. 9, or (k1^2 + k2^2) / 2 of Eq. 17."""
    if isinstance(kernels, str) or not isinstance(kernels, Sequence) or not kernels:
        raise TypeError(
            f'kernels must be a sequence of at least one kernel size, such as (3, 7); '
            f'got {kernels!r}'
        )
    for kernel in kernels:
        _check(kernels=(kernel, 1))
    return sum(kernel**2 for kernel in kernels) * Fraction(1, len(kernels))


def _global_factor(heads: Number) -> Number:
    """1 + 1/(2n): 3/2 of Eq. 9 with a single head."""
    return 1 + Fraction(1, 2) / heads


def _check(**arguments: tuple[Number, int]) -> None:
    """Check numbers given as ``name=(value, least value)``."""
    for name, (value, least) in arguments.items():
        if _is_symbol(value):
            continue
        if not _is_number(value):
            raise TypeError(f'{name} must be a number, got {value!r}')
        if not least <= value < float('inf'):
            raise ValueError(f'{name} must be finite and at least {least}, got {value!r}')


def _check_delta(name: str, delta: Number, d: Number) -> None:
    if _is_symbol(delta) or _is_symbol(d):
        return
    if not _is_number(delta):
        raise TypeError(f'{name} must be a number, got {delta!r}')
    if not -d <= delta <= d:
        raise ValueError(f'{name} must lie between -d and d = {d}, got {delta!r}')


def _check_heads(heads: Number) -> None:
    if _is_symbol(heads):
        return
    if not isinstance(heads, Integral) or isinstance(heads, bool):
        raise TypeError(f'heads must be an integer, got {heads!r}')
    if heads < 1:
        raise ValueError(f'heads must be at least 1, got {heads!r}')


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_symbol(value: Any) -> bool:
    """Whether this is a symbol or an expression of SymPy, which is no requirement."""
    return not isinstance(value, Real) and hasattr(value, 'free_symbols')


def _simplest(value: Number) -> Number:
    """A fraction that is whole, as an integer."""
    return int(value) if isinstance(value, Fraction) and value.denominator == 1 else value
