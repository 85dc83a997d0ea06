"""Export of a folded network; needs no toolbox for a backbone alone."""

from mmcare.compatibility import check_export

check_export()

from mmcare.export.export import export_backbone  # noqa: E402 (they need what was just checked)
from mmcare.export.load import load_source  # noqa: E402

__all__ = ['export_backbone', 'load_source']
