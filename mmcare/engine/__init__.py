from mmcare.engine.hooks import (
    BFloat16OpsHook,
    DataCheckHook,
    ExactResumeHook,
    FoldBeforeTestHook,
)
from mmcare.engine.runner import CheckingRunner

__all__ = [
    'BFloat16OpsHook',
    'CheckingRunner',
    'DataCheckHook',
    'ExactResumeHook',
    'FoldBeforeTestHook',
]
