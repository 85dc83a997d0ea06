"""Registries of mmcare, children of MMEngine's: what a config calls ``mmcare.X``.

Only ``CARE`` and ``CAREAblation`` are also in MMEngine's root registry, without a prefix.
"""

from mmengine import registry as root

MODELS = root.Registry('model', parent=root.MODELS, scope='mmcare', locations=['mmcare.models'])
HOOKS = root.Registry('hook', parent=root.HOOKS, scope='mmcare', locations=['mmcare.engine'])
TRANSFORMS = root.Registry(
    'transform', parent=root.TRANSFORMS, scope='mmcare', locations=['mmcare.export.preprocessing']
)
