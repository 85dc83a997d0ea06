"""Several processes on the CPU: what mmengine's start-up takes from CUDA, without it."""

import datetime
from typing import Any

import torch
from mmengine.dist import is_distributed
from mmengine.model import MMDistributedDataParallel
from mmengine.registry import MODEL_WRAPPERS as MMENGINE_MODEL_WRAPPERS
from torch import nn

from mmcare.registry import MODEL_WRAPPERS

BASE_CONFIG = 'configs/_base_/cpu_dist.py'


@MODEL_WRAPPERS.register_module()
@MMENGINE_MODEL_WRAPPERS.register_module()
class CPUDistributedDataParallel(MMDistributedDataParallel):
    """mmengine's distributed wrapper for a model on the CPU.

    As ``model_wrapper_cfg=dict(type='mmcare.CPUDistributedDataParallel')`` it tells
    ``mmcare.CheckingRunner``, too, to let the processes meet over gloo.

    Args:
        module: The model, on the CPU.
        device_ids: What mmengine's runner passes, numbers of GPUs. Not used.
        broadcast_buffers: Whether every training step starts with the buffers of rank 0; not by
            default, as in mmengine.
        **kwargs: Further arguments of :class:`MMDistributedDataParallel`, such as
            ``find_unused_parameters``.

    Raises:
        ValueError: If the model is not on the CPU.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: list[int] | None = None,
        broadcast_buffers: bool = False,
        **kwargs: Any,
    ) -> None:
        devices = {str(parameter.device) for parameter in module.parameters()} - {'cpu'}
        if devices:
            raise ValueError(
                f'CPUDistributedDataParallel got a model on {", ".join(sorted(devices))}; leave '
                'model_wrapper_cfg out to train on GPUs, or hide them: CUDA_VISIBLE_DEVICES=-1'
            )
        super().__init__(module=module, broadcast_buffers=broadcast_buffers, **kwargs)


def init_cpu_processes(launcher: str, wrapper_cfg: dict | None, dist_cfg: dict | None) -> None:
    """Let the processes of a run on the CPU meet over gloo, unless they have met already.

    mmengine's ``init_dist`` selects a CUDA device first, whatever the backend.

    Args:
        launcher: Of the runner.
        wrapper_cfg: ``model_wrapper_cfg`` of the config.
        dist_cfg: ``env_cfg.dist_cfg`` of the config; its ``timeout`` (seconds) is used.

    Raises:
        ValueError: If the config does not ask for processes on the CPU, or the launcher is not
            ``'pytorch'``.
    """
    if is_distributed():
        return
    name = CPUDistributedDataParallel.__name__
    if (wrapper_cfg or {}).get('type') not in (CPUDistributedDataParallel, name, f'mmcare.{name}'):
        raise ValueError(
            f'launcher={launcher!r} starts one process for each GPU, and PyTorch sees no GPU here; '
            f'to train with several processes on the CPU, add {BASE_CONFIG} to _base_ or '
            f'model_wrapper_cfg.type=mmcare.{name} to --cfg-options'
        )
    if launcher != 'pytorch':
        raise ValueError(
            f'on the CPU processes are started with --launcher pytorch, not {launcher!r}'
        )
    timeout = (dist_cfg or {}).get('timeout')
    torch.distributed.init_process_group(
        'gloo', timeout=None if timeout is None else datetime.timedelta(seconds=timeout)
    )
