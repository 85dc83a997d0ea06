"""CARE backbones for OpenMMLab.

Importing the package registers its models and hooks, and changes nothing else.
"""

import mmcare.compatibility  # noqa: F401 (first, as it checks versions)
from mmcare import engine, models
from mmcare.models import CARE, CAREAblation
from mmcare.version import __version__

__all__ = ['CARE', 'CAREAblation', '__version__', 'engine', 'models']
