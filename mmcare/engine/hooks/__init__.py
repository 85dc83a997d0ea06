from mmcare.engine.hooks.atomic_checkpoint_hook import AtomicCheckpointHook
from mmcare.engine.hooks.bfloat16_ops_hook import BFloat16OpsHook
from mmcare.engine.hooks.broadcast_buffers_hook import BroadcastBuffersHook
from mmcare.engine.hooks.data_check_hook import DataCheckHook
from mmcare.engine.hooks.exact_resume_hook import ExactResumeHook
from mmcare.engine.hooks.fold_before_test_hook import FoldBeforeTestHook

__all__ = [
    'AtomicCheckpointHook',
    'BFloat16OpsHook',
    'BroadcastBuffersHook',
    'DataCheckHook',
    'ExactResumeHook',
    'FoldBeforeTestHook',
]
