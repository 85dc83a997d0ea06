"""How many processes train, and on how many images; what another number changes in a resume."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any

from mmengine.dist import get_world_size
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop

LENGTH = 'epoch_length'  # in the meta of checkpoints


def world(runner: Any) -> dict[str, int]:
    """Return what decides which images are in a step, and how they are augmented."""
    loader = runner.train_dataloader
    batch_size = loader.batch_size or getattr(loader.batch_sampler, 'batch_size', None)
    return dict(
        processes=get_world_size(),
        batch_size=batch_size or 1,
        accumulative_counts=getattr(runner.optim_wrapper, '_accumulative_counts', 1),
        num_workers=int(loader.num_workers),
    )


def describe_change(saved: Mapping[str, Any], runner: Any, meta: Mapping[str, Any]) -> str:
    """Say what changes in a run that resumes from a checkpoint of another :func:`world`.

    Args:
        saved: The world of the checkpoint.
        runner: The run.
        meta: The checkpoint's, with ``iter``.
    """
    now = world(runner)
    old = {**now, **saved}
    changed = [f'{key}={old[key]} (now {value})' for key, value in now.items() if old[key] != value]
    if not changed:
        return ''
    text = f'The checkpoint is of {", ".join(changed)}: augmentations draw other numbers.'
    before, after = (part['processes'] * part['batch_size'] for part in (old, now))
    steps = before * old['accumulative_counts'], after * now['accumulative_counts']
    if steps[0] != steps[1]:
        text += f' A step of the optimizer has {steps[1]} images in place of {steps[0]}, and the '
        text += "checkpoint's learning rate stays; by the rule of docs/multi_gpu.md it would be "
        text += f'{sqrt(steps[1] / steps[0]):.3g} times as large. batch_size and '
        text += 'accumulative_counts can keep the number of images.'
    loop, done = runner.train_loop, meta['iter']
    if before != after and isinstance(loop, IterBasedTrainLoop):
        left, difference = loop.max_iters - done, abs(after - before) * done
        text += f' {left} iterations are left, on {left * after} images in place of '
        text += f'{left * before}. The run was at image {done * before} of the sampler, and goes '
        text += f'on at image {done * after}: {difference} images are '
        text += 'skipped.' if after > before else 'trained on again.'
    return text


def describe_epochs(runner: Any, meta: Mapping[str, Any]) -> str:
    """Say how many iterations an epoch has, if it had another number in the checkpoint."""
    loop = runner.train_loop
    if not isinstance(loop, EpochBasedTrainLoop):
        return ''
    length, left = len(loop.dataloader), loop.max_epochs - meta['epoch']
    before = meta.get(LENGTH, length)
    if before == length:
        return ''
    return f'An epoch has {length} iterations, and had {before}: {left * length} are left.'
