"""Compare the paper's complexity model with the published networks."""

from collections.abc import Sequence

import pandas as pd
import torch

from mmcare.analysis.counting import count_macs
from mmcare.analysis.equations import delta_limit
from mmcare.models import CARE

KERNELS = (3, 7)  # of the network's local learner


def compare_mixer(arch: str, stage: int, shape: Sequence[int] = (224, 224)) -> pd.DataFrame:
    """Compare Omega's terms with the multiply-adds counted for a block's token mixer.

    With d2 = 2 d1, kernels k1 and k2, h x w positions and n heads::

        Omega - h w (k1^2 + k2^2) d1 - 2 h w d1^2 + h w d1 = multiply-adds counted

    since the network has one local pass and two projections fewer, and a normaliser more.

    Args:
        arch: Name of the network.
        stage: 3 or 4. The stages before use strip convolutions, which Omega does not model.
        shape: Height and width of the image.

    Returns:
        Columns ``omega``, ``counted``, ``the network has``; local, projections, products as rows.

    Raises:
        ValueError: If the stage has no attention.
    """
    if stage not in (3, 4):
        raise ValueError(f'stage must be 3 or 4, which have attention, got {stage!r}')
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
    return table.assign(
        **{'for all D': table['D below'] >= table['d'], 'at own D': table['D'] < table['D below']}
    )
