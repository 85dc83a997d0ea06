"""Omega, the paper's complexity model of a token mixer: Section 3.3 and supplement 10.

Omega is the number of multiply-adds that a mixer spends on h x w positions with d channels. Local:
two passes of a depth-wise k x k convolution. Global: four projections (queries, keys, values,
output) and two products (keys with values, queries with the result), these within n heads.

A decoupled mixer does the global part on d1 channels and the local part on the other d2. With
D = d2 - d1 (Delta in the paper), d1 = (d - D) / 2 and d2 = (d + D) / 2. Several kernel sizes share
the local channels evenly, so that k^2 becomes the mean of their squares.

:func:`mmcare.analysis.compare_mixer` compares this model with the network. Integers and fractions
give exact results.
"""

from collections.abc import Sequence
from fractions import Fraction

Number = int | float | Fraction


def omega_decoupled(
    h: Number, w: Number, d1: Number, d2: Number, kernels: Sequence[Number], heads: int = 1
) -> Number:
    """Compute Eq. 8 and, with several heads, Eq. 23. With d1 = d2 = d it is the stacked Eq. 4.

    Omega = 2 k^2 h w d2 + 4 h w d1^2 + 2 h w d1^2 / n

    Args:
        h, w: Height and width of the map.
        d1, d2: Global and local channels.
        kernels: Kernel sizes of the local learner, such as ``(3, 7)``.
        heads: Number of attention heads, n.

    Returns:
        Multiply-adds.
    """
    return h * w * (2 * _mean_square(kernels) * d2 + (4 + Fraction(2, heads)) * d1**2)


def omega(
    h: Number, w: Number, d: Number, delta: Number, kernels: Sequence[Number], heads: int = 1
) -> Number:
    """Compute Eq. 9 (one kernel), 17 (two), and with several heads Eq. 24 and 27.

    Omega(D) = k^2 h w (d + D) + (1 + 1/(2n)) h w (d - D)^2

    Args:
        h, w: Height and width of the map.
        d: Channels of the map.
        delta: D, from -d (all channels global) to d (all local); 0 is the symmetric decoupling.
        kernels: Kernel sizes of the local learner.
        heads: Number of attention heads, n.

    Returns:
        Multiply-adds.
    """
    half = Fraction(1, 2)
    return omega_decoupled(h, w, half * (d - delta), half * (d + delta), kernels, heads)


def delta_limit(d: Number, kernels: Sequence[Number], heads: int = 1) -> Number:
    """Compute the D below which Proposition 3, Omega(D) < Omega(0), holds.

    Eq. 10 (19, 26 and 29 with two kernels or several heads) factors the difference::

        Omega(D) - Omega(0) = c h w D (k^2 / c + D - 2 d),   c = 1 + 1/(2n)

    so that for 0 < D < d the proposition holds exactly if D < 2 d - k^2 / c.

    Example:
        >>> delta_limit(24, kernels=(7,))
        Fraction(46, 3)
    """
    return 2 * d - _mean_square(kernels) / (1 + Fraction(1, 2 * heads))


def _mean_square(kernels: Sequence[Number]) -> Number:
    """Compute k^2 of Eq. 9, or (k1^2 + k2^2) / 2 of Eq. 17."""
    return sum(kernel**2 for kernel in kernels) * Fraction(1, len(kernels))
