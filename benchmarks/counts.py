"""Count the kernels and bytes of a training step of backbones, without a device to run it on.

A step is a forward and a backward pass. Each PyTorch operator that computes something counts as
one kernel (views do not count), which moves the operator's inputs and outputs once. An eager GPU
launches about as many kernels; some operators launch several. The operators run on FakeTensors,
which have shapes but no values. The FakeTensors are on the CPU, since autograd needs a real CUDA
device; on the CPU, autocast casts the same layers.
"""

import argparse
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from recording import describe_machine, save
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training import ARCHS, PRECISIONS, build, step

from mmcare.files import check_writable

PEERS = 'repvit_m1_1', 'mobilenetv4_conv_medium', 'resnet50', 'swin_tiny_patch4_window7_224'
# These operators launch no kernel.
FREE = 'detach', 'empty', 'empty_like', 'new_empty', '_unsafe_view', 'promote_types'


class Counter(TorchDispatchMode):
    """Count operators that compute, and the bytes of their inputs and outputs."""

    kernels = moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one operator."""
        out = func(*args, **kwargs or {})
        namespace, name = func.name().split('.')[0].split('::')
        if namespace == 'aten' and not func.is_view and name not in FREE:
            tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
            self.kernels += 1
            self.moved += sum(x.numel() * x.element_size() for x in tensors)
        return out


def count(network: nn.Module, images: Tensor, precision: str) -> tuple[int, float]:
    """Count the kernels of a step, and the GB that they move."""
    with FakeTensorMode() as mode:
        named = chain(network.named_parameters(), network.named_buffers())
        state = {name: mode.from_tensor(tensor) for name, tensor in named}
        fake = partial(functional_call, network, state)
        with Counter() as counter:
            step(fake, mode.from_tensor(images), precision)
    return counter.kernels, counter.moved / 1e9


def main() -> None:
    """Count every network in every precision, print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add('archs', nargs='*', metavar='ARCH', default=[*ARCHS, *PEERS], help='see training.py')
    add('--shape', type=int, nargs=2, default=(512, 512), metavar=('H', 'W'))
    add('--batch', type=int, default=16, help='number of images; default: %(default)s')
    add('--precision', nargs='+', choices=PRECISIONS, default=['float32', 'bfloat16'])
    add('--out-dir', type=Path, default=Path('work_dirs/counts'), metavar='DIR')
    arguments = parser.parse_args()
    check_writable(arguments.out_dir)
    rows, images = [], torch.zeros(arguments.batch, 3, *arguments.shape)
    for arch in arguments.archs:
        network = build(arch, 'plain', arguments.shape)
        for precision in arguments.precision:
            rows.append((arch, precision, *count(network, images, precision)))
    table = pd.DataFrame(rows, columns=['arch', 'precision', 'kernels', 'GB'])
    save(arguments.out_dir / 'counts.csv', table)
    text = f'{table.to_markdown(index=False, floatfmt=".1f")}\n\n{", ".join(describe_machine())}\n'
    save(arguments.out_dir / 'counts.md', text)
    print(text)


if __name__ == '__main__':
    main()
