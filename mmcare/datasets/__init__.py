"""Checks of data sets, by file, before a run trips over them."""

from mmcare.datasets.check_coco import check_coco_file
from mmcare.datasets.check_labels import CheckLabels
from mmcare.datasets.check_png import check_png

__all__ = ['CheckLabels', 'check_coco_file', 'check_png']
