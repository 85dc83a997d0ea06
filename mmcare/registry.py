"""Registries of mmcare, children of MMEngine's: what a config calls ``mmcare.X``.

Only ``CARE`` and ``CAREAblation`` are also in MMEngine's root registry, without a prefix.
"""

from __future__ import annotations

from mmengine import registry as root

MODELS = root.Registry('model', parent=root.MODELS, scope='mmcare', locations=['mmcare.models'])
HOOKS = root.Registry('hook', parent=root.HOOKS, scope='mmcare', locations=['mmcare.engine'])
TRANSFORMS = root.Registry(
    'transform', parent=root.TRANSFORMS, scope='mmcare', locations=['mmcare.export.preprocessing']
)


def type_name(type_: str | type) -> str:
    """Return the name of a config's type: a class, or a name, perhaps dotted or scoped."""
    return getattr(type_, '__name__', type_).rpartition('.')[2]
