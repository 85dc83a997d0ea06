"""Read, write and name weights: published files, ours, and those of MM toolboxes."""
