from mmcare.datasets.check_labels import CheckLabels

__all__ = ['CheckLabels']
