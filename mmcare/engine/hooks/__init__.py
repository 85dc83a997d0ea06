"""Hooks, registered as ``mmcare.X``."""
