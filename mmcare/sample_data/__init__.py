"""Seeded synthetic data sets in the folder layouts of COCO 2017, ADE20K and ImageNet.

They let every shipped configuration be trained, tested and resumed without a download.
"""

from .ade20k import make_ade20k
from .coco import make_coco
from .imagenet import make_imagenet

__all__ = ['make_ade20k', 'make_coco', 'make_imagenet']
