from mmcare.engine.hooks.data_check_hook import DataCheckHook
from mmcare.engine.hooks.exact_resume_hook import ExactResumeHook

__all__ = ['DataCheckHook', 'ExactResumeHook']
