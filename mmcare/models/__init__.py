"""The backbone."""

from mmcare.models.backbones import CARE

__all__ = ['CARE']
