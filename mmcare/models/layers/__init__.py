"""What the backbone is built of, and what becomes of it when it is folded."""

from mmcare.models.layers.folding import (
    Foldable,
    FoldedBlock,
    FoldedLinearAttention,
    fold_conv_norm,
    fold_norm_conv,
    merge_local_kernels,
)
from mmcare.models.layers.interaction import ExpandingInteraction, Interaction
from mmcare.models.layers.linear_attention import FEATURE_MAPS, LinearAttention
from mmcare.models.layers.local_learner import LocalLearner, SingleScaleLearner
from mmcare.models.layers.mixer import DecoupledMixer, GlobalMixer, StackedMixer
from mmcare.models.layers.norm import build_norm
from mmcare.models.layers.recompute import recompute
from mmcare.models.layers.strip_conv import StripConv

__all__ = [
    'FEATURE_MAPS',
    'DecoupledMixer',
    'ExpandingInteraction',
    'Foldable',
    'FoldedBlock',
    'FoldedLinearAttention',
    'GlobalMixer',
    'Interaction',
    'LinearAttention',
    'LocalLearner',
    'SingleScaleLearner',
    'StackedMixer',
    'StripConv',
    'build_norm',
    'fold_conv_norm',
    'fold_norm_conv',
    'merge_local_kernels',
    'recompute',
]
