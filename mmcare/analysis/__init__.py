"""Cost of the networks, as mmengine.analysis counts it, and in the paper."""

from mmcare.analysis.counting import build_network, compare_with_paper, count_complexity

__all__ = ['build_network', 'compare_with_paper', 'count_complexity']
