from mmcare.models.layers.interaction import ExpandingInteraction, Interaction
from mmcare.models.layers.linear_attention import FEATURE_MAPS, LinearAttention
from mmcare.models.layers.local_learner import LocalLearner
from mmcare.models.layers.mixer import DecoupledMixer
from mmcare.models.layers.norm import build_norm
from mmcare.models.layers.recompute import recompute
from mmcare.models.layers.strip_conv import StripConv

__all__ = [
    'FEATURE_MAPS',
    'DecoupledMixer',
    'ExpandingInteraction',
    'Interaction',
    'LinearAttention',
    'LocalLearner',
    'StripConv',
    'build_norm',
    'recompute',
]
