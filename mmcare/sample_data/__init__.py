"""Seeded synthetic data sets in the folder layouts of COCO 2017, ADE20K and ImageNet.

Every shipped config trains, tests and resumes on them, without a download. An image depends only on
the seed, its split and its number, so a larger data set begins with the images of a smaller one.
"""

from .writers import make_ade20k, make_coco, make_imagenet

__all__ = ['make_ade20k', 'make_coco', 'make_imagenet']
