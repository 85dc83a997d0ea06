"""CARE backbones for OpenMMLab; importing the package registers everything it has."""

from mmcare.compatibility import check_versions
from mmcare.version import __version__

check_versions()

from mmcare import engine, models  # noqa: E402 (they need what was just checked)
from mmcare.models import CARE  # noqa: E402

__all__ = ['CARE', '__version__', 'engine', 'models']
