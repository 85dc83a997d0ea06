"""Weights: the published files, ours and those of MM toolboxes, read safely and loaded whole."""
