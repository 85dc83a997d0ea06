"""Classification with mmpretrain: the heads of the published networks, and distillation.

This is the only part of mmcare that needs mmpretrain. Configs import it with
``custom_imports=dict(imports=['mmcare.classification'])``.
"""

from mmcare.compatibility import check_versions

check_versions('mmpretrain')

from mmcare.classification.distillation import DistillationClassifier  # noqa: E402
from mmcare.classification.head import CAREClsHead  # noqa: E402

__all__ = ['CAREClsHead', 'DistillationClassifier']
