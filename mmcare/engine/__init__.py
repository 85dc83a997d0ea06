"""Hooks and an optimizer constructor for any project on mmengine.

``mmcare.engine.safe_loading`` is an opt-in safe loader.
"""

from mmcare.engine.hooks.atomic_checkpoint_hook import AtomicCheckpointHook
from mmcare.engine.hooks.bfloat16_ops_hook import BFloat16OpsHook
from mmcare.engine.hooks.channels_last_hook import ChannelsLastHook
from mmcare.engine.hooks.compile_hook import CompileHook
from mmcare.engine.hooks.data_check_hook import DataCheckHook
from mmcare.engine.hooks.exact_resume_hook import ExactResumeHook
from mmcare.engine.hooks.optimizer_check_hook import OptimizerCheckHook
from mmcare.engine.hooks.plot_hook import PlotHook
from mmcare.engine.hooks.run_record_hook import RunRecordHook
from mmcare.engine.hooks.run_summary_hook import RunSummaryHook
from mmcare.engine.hooks.safe_loading_hook import SafeLoadingHook
from mmcare.engine.optim import MergedGroupsConstructor

__all__ = [
    'AtomicCheckpointHook',
    'BFloat16OpsHook',
    'ChannelsLastHook',
    'CompileHook',
    'DataCheckHook',
    'ExactResumeHook',
    'MergedGroupsConstructor',
    'OptimizerCheckHook',
    'PlotHook',
    'RunRecordHook',
    'RunSummaryHook',
    'SafeLoadingHook',
]
