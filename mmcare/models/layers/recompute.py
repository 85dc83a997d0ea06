"""Activation checkpointing that leaves the running statistics as they would be without it."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint


@contextmanager
def _running_statistics_kept(module: nn.Module) -> Iterator[None]:
    """Let the batch norms that train count on copies of their running statistics."""
    norms = [m for m in module.modules() if isinstance(m, _BatchNorm) and m.training]
    kept = [dict(norm._buffers) for norm in norms]
    for norm in norms:
        norm._buffers.update(
            {name: buffer.clone() for name, buffer in norm._buffers.items() if buffer is not None}
        )
    try:
        yield
    finally:
        for norm, buffers in zip(norms, kept, strict=True):
            norm._buffers.update(buffers)


def recompute(module: nn.Module, x: Tensor) -> Tensor:
    """Run ``module(x)``, keep only ``x``, and run it again in the backward pass.

    Plain checkpointing runs every batch norm twice and so moves its running mean and variance
    twice per step; the second run here leaves them alone. Generator states are replayed, so drop
    path takes the same decisions.

    ``torch.compile`` leaves this part of the network out: it cannot trace the second run's context.
    """
    # Not as a decorator, which would import the whole compiler together with this package.
    return torch.compiler.disable(_recompute)(module, x)


def _recompute(module: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(
        module,
        x,
        use_reentrant=False,
        context_fn=lambda: (nullcontext(), _running_statistics_kept(module)),
    )
