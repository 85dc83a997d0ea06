from mmcare.engine.hooks import DataCheckHook, ExactResumeHook
from mmcare.engine.runner import CheckingRunner

__all__ = ['CheckingRunner', 'DataCheckHook', 'ExactResumeHook']
