"""Classification with mmpretrain: the heads of the published networks, and distillation.

The only part of mmcare that needs mmpretrain, and so imported by itself: configs have
``custom_imports=dict(imports=['mmcare.classification'])``, which imports mmcare, too.
"""

from mmcare.compatibility import check_versions

check_versions(['mmpretrain'])

from mmcare.classification.distillation import DistillationClassifier  # noqa: E402
from mmcare.classification.head import CAREClsHead  # noqa: E402

__all__ = ['CAREClsHead', 'DistillationClassifier']
