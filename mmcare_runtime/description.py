"""The name that :mod:`mmcare_runtime.schema` had in mmcare 1.0."""

from mmcare_runtime.schema import (
    LARGEST_BATCH,
    LARGEST_SIDE,
    PARTS,
    check,
    fits,
    match,
    nchw,
    parse,
)

__all__ = ['LARGEST_BATCH', 'LARGEST_SIDE', 'PARTS', 'check', 'fits', 'match', 'nchw', 'parse']
