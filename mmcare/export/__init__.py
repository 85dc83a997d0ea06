"""Export of a folded network; needs no toolbox for a backbone alone."""

from mmcare.export.export import export_backbone
from mmcare.export.load import load_source

__all__ = ['export_backbone', 'load_source']
