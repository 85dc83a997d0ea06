"""The paper's complexity model, and the cost of the networks as mmengine.analysis counts it."""

from mmcare.analysis.counting import build_network, count_complexity
from mmcare.analysis.equations import delta_limit, omega, omega_decoupled
from mmcare.analysis.mixer import compare_mixer, where_proposition_holds
from mmcare.analysis.paper import compare_with_paper

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
