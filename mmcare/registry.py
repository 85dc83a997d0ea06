"""Registries of mmcare, children of MMEngine's: what a config calls ``mmcare.X``.

Only ``CARE`` and ``CAREAblation`` are also in MMEngine's root registry, without a prefix.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmengine import registry as root

MODELS = root.Registry('model', parent=root.MODELS, scope='mmcare', locations=['mmcare.models'])
HOOKS = root.Registry('hook', parent=root.HOOKS, scope='mmcare', locations=['mmcare.engine'])
OPTIM_WRAPPER_CONSTRUCTORS = root.Registry(
    'optimizer wrapper constructor',
    parent=root.OPTIM_WRAPPER_CONSTRUCTORS,
    scope='mmcare',
    locations=['mmcare.engine'],
)
TRANSFORMS = root.Registry(
    'transform', parent=root.TRANSFORMS, scope='mmcare', locations=['mmcare.export.pipelines']
)


def type_name(type_: str | type) -> str:
    """Return the bare name of a config's type: a class, or a name with or without a prefix."""
    return str(getattr(type_, '__name__', type_)).rpartition('.')[2]


def built_type(registry: root.Registry, config: Mapping[str, Any]) -> Any:
    """Return the class or function that MMEngine would call to build a config."""
    type_ = config.get('type')
    if isinstance(type_, str):
        with registry.switch_scope_and_registry(config.get('_scope_')) as scoped:
            return scoped.get(type_)
    return type_
