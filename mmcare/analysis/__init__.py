"""What CARE costs: the paper's complexity model, and the network's parameters and multiply-adds.

``equations`` has those of the model, ``mixer`` compares it with the network, ``proposition`` says
where the paper's proposition holds, ``counting`` counts with mmengine.analysis, and ``paper`` puts
the paper's figures beside the counts. ``report`` and ``plots`` write all of it down.
"""

from mmcare.analysis.counting import (
    Complexity,
    build_from_config,
    build_model,
    build_network,
    count_complexity,
)
from mmcare.analysis.equations import (
    delta_limit,
    omega,
    omega_decoupled,
    omega_difference,
    omega_stacked,
    proposition_holds,
    smallest_width,
)
from mmcare.analysis.mixer import count_mixer, mixer_terms
from mmcare.analysis.paper import compare_with_paper
from mmcare.analysis.proposition import network_stages

__all__ = [
    'Complexity',
    'build_from_config',
    'build_model',
    'build_network',
    'compare_with_paper',
    'count_complexity',
    'count_mixer',
    'delta_limit',
    'mixer_terms',
    'network_stages',
    'omega',
    'omega_decoupled',
    'omega_difference',
    'omega_stacked',
    'proposition_holds',
    'smallest_width',
]
