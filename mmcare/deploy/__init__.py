"""Folding of checkpoints, and export. Needs mmengine and mmcv-lite only, no compiled ops."""

from mmcare.deploy.export import export_backbone
from mmcare.deploy.reparameterize import fold_networks, reparameterize_checkpoint
from mmcare.deploy.source import load_source

__all__ = ['export_backbone', 'fold_networks', 'load_source', 'reparameterize_checkpoint']
