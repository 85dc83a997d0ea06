"""Export models to files that run without PyTorch; for a backbone, no toolbox is needed."""

from mmcare.compatibility import check_export

check_export()

from mmcare.export.export import export_model  # noqa: E402 (needs what was just checked)
from mmcare.export.loading import load_model  # noqa: E402
from mmcare.export.opening import open_exported  # noqa: E402

__all__ = ['export_model', 'load_model', 'open_exported']
