"""Export of a folded network; needs no toolbox for a backbone alone."""

from mmcare.compatibility import check_export

check_export()

from mmcare.export.export import export_model  # noqa: E402 (they need what was just checked)
from mmcare.export.source import load_source  # noqa: E402

__all__ = ['export_model', 'load_source']
