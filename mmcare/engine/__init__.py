"""Hooks and a runner that work in any project on MMEngine."""

from mmcare.engine.cpu_distributed import CPUDistributedDataParallel
from mmcare.engine.hooks import (
    AtomicCheckpointHook,
    BFloat16OpsHook,
    BroadcastBuffersHook,
    DataCheckHook,
    ExactResumeHook,
    FoldBeforeTestHook,
)
from mmcare.engine.runner import CheckingRunner

__all__ = [
    'AtomicCheckpointHook',
    'BFloat16OpsHook',
    'BroadcastBuffersHook',
    'CPUDistributedDataParallel',
    'CheckingRunner',
    'DataCheckHook',
    'ExactResumeHook',
    'FoldBeforeTestHook',
]
