"""Seeded synthetic data sets in the folder layouts of COCO 2017 and of ADE20K.

They let every shipped configuration be trained, tested and resumed without a download.
"""

from .ade20k import make_ade20k
from .coco import make_coco

__all__ = ['make_ade20k', 'make_coco']
