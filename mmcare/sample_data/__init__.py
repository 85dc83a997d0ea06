"""Seeded synthetic data sets in the folder layouts of COCO 2017, ADE20K and ImageNet.

They let every shipped config be trained, tested and resumed without a download. An image depends
on the seed, its split and its number only, so a larger data set begins with the images of a smaller
one.
"""

from .writers import make_ade20k, make_coco, make_imagenet

__all__ = ['make_ade20k', 'make_coco', 'make_imagenet']
