"""The backbone, and the paper's ablations of it."""

from mmcare.models.backbones import CARE, CAREAblation

__all__ = ['CARE', 'CAREAblation']
