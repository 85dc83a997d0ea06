"""Omega, the paper's complexity model of a token mixer, and how the published networks compare.

Section 3.3 and supplement 10: Omega is the number of multiply-adds that a mixer spends on h x w
positions with d channels. Local: two passes of a depth-wise k x k convolution. Global: four
projections (queries, keys, values, output) and two products (keys with values, queries with the
result), these within n heads.

A decoupled mixer does the global part on d1 channels and the local part on the other d2. With
D = d2 - d1 (``delta``), d1 = (d - D) / 2 and d2 = (d + D) / 2. Several kernel sizes share the local
channels evenly, so that k^2 becomes the mean of their squares. Integers and fractions give exact
results.
"""

from collections.abc import Sequence
from fractions import Fraction

import pandas as pd
import torch

from mmcare.analysis.counting import count_macs
from mmcare.models import CARE
from mmcare.models.arguments import check

Number = int | float | Fraction
KERNELS = (3, 7)  # of the network's local learner


def omega_decoupled(
    h: Number, w: Number, d1: Number, d2: Number, kernels: Sequence[Number], heads: int = 1
) -> Number:
    """Compute Eq. 8 and, with several heads, Eq. 23. With d1 = d2 = d it is the stacked Eq. 4.

    Omega = 2 k^2 h w d2 + 4 h w d1^2 + 2 h w d1^2 / n
    """
    return h * w * (2 * _mean_square(kernels) * d2 + (4 + Fraction(2, heads)) * d1**2)


def omega(
    h: Number, w: Number, d: Number, delta: Number, kernels: Sequence[Number], heads: int = 1
) -> Number:
    """Compute Eq. 9 (one kernel), 17 (two), and with several heads Eq. 24 and 27.

    Omega(D) = k^2 h w (d + D) + (1 + 1/(2n)) h w (d - D)^2, for D from -d (all channels global) to
    d (all local); 0 is the symmetric decoupling.
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


def compare_mixer(arch: str, stage: int, shape: Sequence[int] = (224, 224)) -> pd.DataFrame:
    """Compare Omega's terms with the multiply-adds counted for a block's token mixer.

    With d2 = 2 d1 and kernels k1 and k2::

        Omega - h w (k1^2 + k2^2) d1 - 2 h w d1^2 + h w d1 = multiply-adds counted

    since the network has one local pass and two projections fewer, and a normaliser more.

    Args:
        arch: Name of the network.
        stage: 3 or 4. The stages before use strip convolutions, which Omega does not model.
        shape: Height and width of the image.

    Returns:
        Columns ``omega``, ``counted``, ``the network has``; local, projections, products as rows.
    """
    check('stage', stage, '3 or 4, which have attention', stage in (3, 4))
    backbone = CARE(arch, out_indices=(stage - 1,))
    mixer = backbone.get_submodule(f'stages.{stage - 1}.blocks.0.mixer')
    h, w = (-(-side // 32) * 8 // 2 ** (stage - 1) for side in shape)
    d1 = backbone.arch['widths'][stage - 1] // 3
    heads = d1 // backbone.arch['head_channels'][stage - 1]
    macs = count_macs(mixer, *[torch.zeros(1, d1, h, w)] * 3)
    projections = macs['global_learner.query_key']
    products = macs['global_learner'] - projections

    local_omega, global_omega = 2 * h * w * sum(k**2 for k in KERNELS) * d1, 2 * h * w * d1**2
    rows = [
        ('local', local_omega, macs['local_learner'], 'one pass instead of two'),
        ('projections', 2 * global_omega, projections, 'q and k, not v and output'),
        ('products', global_omega // heads, products, 'also a normaliser'),
    ]
    columns = ['term', 'omega', 'counted', 'the network has']
    return pd.DataFrame(rows, columns=columns).set_index('term')


def where_proposition_holds() -> pd.DataFrame:
    """Ask at every width of the published networks where Omega(D) < Omega(0) holds.

    Returns:
        A row for each width, choice of kernels and number of heads (one, and the network's, which
        stages 1 and 2 have with ``early_conv=False`` only): the exact limit ``D below``, and
        whether the proposition holds for all 0 < D < d and at the network's own D.
    """
    widths = {
        (d, d // 3 // head_channels)
        for arch in CARE.arch_zoo.values()
        for d, head_channels in zip(arch['widths'], arch['head_channels'], strict=True)
    }
    rows = [
        (d, d // 3, ' and '.join(f'{k}x{k}' for k in kernels), n, delta_limit(d, kernels, n))
        for d, heads in sorted(widths)
        for kernels in (KERNELS, (7,))
        for n in (1, heads)
    ]
    table = pd.DataFrame(rows, columns=['d', 'D', 'kernels', 'heads', 'D below'])
    table['for all D'] = table['D below'] >= table['d']
    table['at own D'] = table['D'] < table['D below']
    return table
