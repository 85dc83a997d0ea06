"""Export of networks to files that run without PyTorch; a backbone needs no toolbox."""

from mmcare.compatibility import check_export

check_export()

from mmcare.export.backends import open_exported  # noqa: E402 (needs what was just checked)
from mmcare.export.export import export_model  # noqa: E402
from mmcare.export.source import load_source  # noqa: E402

__all__ = ['export_model', 'load_source', 'open_exported']
