"""Costs of networks: counted by mmengine.analysis, compared with the paper, and timed."""

from mmcare.analysis.counting import build_network, compare_with_paper, count_complexity

__all__ = ['build_network', 'compare_with_paper', 'count_complexity']
