"""The paper's complexity model, and the cost of the networks as mmengine.analysis counts it."""

from mmcare.analysis.counting import build_network, compare_with_paper, count_complexity
from mmcare.analysis.equations import (
    compare_mixer,
    delta_limit,
    omega,
    omega_decoupled,
    where_proposition_holds,
)

__all__ = [
    'build_network',
    'compare_mixer',
    'compare_with_paper',
    'count_complexity',
    'delta_limit',
    'omega',
    'omega_decoupled',
    'where_proposition_holds',
]
