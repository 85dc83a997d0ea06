"""Registries of mmcare, children of MMEngine's: what a config calls ``mmcare.X``.

Only ``CARE`` and ``CAREAblation`` are also in MMEngine's root registry, without a prefix.
"""

from mmengine.registry import HOOKS as MMENGINE_HOOKS
from mmengine.registry import MODELS as MMENGINE_MODELS
from mmengine.registry import TRANSFORMS as MMENGINE_TRANSFORMS
from mmengine.registry import Registry

MODELS = Registry('model', parent=MMENGINE_MODELS, scope='mmcare', locations=['mmcare.models'])
HOOKS = Registry('hook', parent=MMENGINE_HOOKS, scope='mmcare', locations=['mmcare.engine'])
TRANSFORMS = Registry(
    'transform', parent=MMENGINE_TRANSFORMS, scope='mmcare', locations=['mmcare.export.evaluate']
)
