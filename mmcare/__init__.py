"""CARE backbones for OpenMMLab.

Importing the package registers its models and hooks, and changes nothing else.
"""

from mmcare.compatibility import check_versions
from mmcare.version import __version__

check_versions('torch', 'mmengine', 'mmcv')

from mmcare import engine, models  # noqa: E402 (they need what was just checked)
from mmcare.models import CARE, CAREAblation  # noqa: E402

__all__ = ['CARE', 'CAREAblation', '__version__', 'engine', 'models']
