"""The backbone, and the paper's ablations of it."""

from mmcare.models import deployment  # noqa: F401 (registers what a CARE answers to exporters)
from mmcare.models.backbones import CARE, CAREAblation

__all__ = ['CARE', 'CAREAblation']
