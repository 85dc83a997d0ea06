"""Registries of mmcare, children of mmengine's.

What mmcare registers is in mmengine's root registry too: ``type='CARE'`` and ``type='mmcare.CARE'``
both build from any MM codebase after ``custom_imports=dict(imports=['mmcare'])``.
"""

from mmengine.registry import HOOKS as MMENGINE_HOOKS
from mmengine.registry import MODEL_WRAPPERS as MMENGINE_MODEL_WRAPPERS
from mmengine.registry import MODELS as MMENGINE_MODELS
from mmengine.registry import RUNNERS as MMENGINE_RUNNERS
from mmengine.registry import Registry, build_runner_from_cfg

MODELS = Registry('model', parent=MMENGINE_MODELS, scope='mmcare', locations=['mmcare.models'])
MODEL_WRAPPERS = Registry(
    'model_wrapper',
    parent=MMENGINE_MODEL_WRAPPERS,
    scope='mmcare',
    locations=['mmcare.engine'],
)
HOOKS = Registry('hook', parent=MMENGINE_HOOKS, scope='mmcare', locations=['mmcare.engine'])
RUNNERS = Registry(
    'runner',
    build_func=build_runner_from_cfg,
    parent=MMENGINE_RUNNERS,
    scope='mmcare',
    locations=['mmcare.engine'],
)
