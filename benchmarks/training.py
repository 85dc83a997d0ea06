"""Measure time and memory of a training step of backbones, with options that save either.

A step is a forward and a backward pass, without neck, head and optimizer. With --inference, it is a
forward pass in evaluation mode; norms are not fused. Options are measured in interleaved rounds.
Memory on a CPU is the bytes of all tensors that the forward pass saves for the backward pass,
without parameters. On a GPU it is the peak of the allocator during a step, minus what was allocated
before.

With --device cuda, the column "GPU" is the share of a step's time in which the GPU computes: the
sum of its kernels' times, by PyTorch's profiler, divided by the time of a step without profiler. If
it is far below 1, the GPU waits for the host's CPU.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from recording import describe_machine, save
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from mmcare.analysis.timing import measure_in_turn
from mmcare.compatibility import require
from mmcare.files import check_writable
from mmcare.models import CARE

ARGUMENTS: dict[str, dict[str, Any]] = {  # of a CARE
    'activations': dict(with_cp='activations'),
    'with_cp': dict(with_cp=True),
}
PARTS = ('plain', *ARGUMENTS, 'channels_last', 'compiled')  # of an option, joined by +
OPTIONS = ['plain', *ARGUMENTS, 'channels_last']
ARCHS = tuple(CARE.arch_zoo)
PRECISIONS = {'float32': None, 'float16': torch.float16, 'bfloat16': torch.bfloat16}


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    help_archs = f'from {list(ARCHS)} (default: all), or timm models, with the options they have'
    add('archs', nargs='*', metavar='ARCH', default=ARCHS, help=help_archs)
    help_shape = 'height and width of the images; repeatable; default: 512 512'
    add('--shape', type=int, nargs=2, action='append', metavar=('H', 'W'), help=help_shape)
    help_options = f'each made of {PARTS}, joined by +; default: {" ".join(OPTIONS)}'
    add('--options', nargs='+', default=OPTIONS, help=help_options)
    add('--precision', choices=PRECISIONS, default='float32', help='by autocast')
    add('--inference', action='store_true', help='without the backward pass')
    add('--device', choices=['cpu', 'cuda'], default='cpu')
    add('--batch', type=int, default=2, help='number of images; default: %(default)s')
    add('--threads', type=int, default=1, help='threads on a CPU; default: %(default)s')
    add('--rounds', type=int, default=5, help='default: %(default)s')
    add('--out-dir', type=Path, default=Path('work_dirs/training'), metavar='DIR')
    arguments = parser.parse_args()
    for option in arguments.options:
        if not set(option.split('+')) <= set(PARTS):
            parser.error(f'--options: {option!r} is not made of {PARTS}')
    return arguments


def build(arch: str, option: str, shape: Sequence[int]) -> nn.Module | None:
    """Build a network for a size, in training mode; None if it does not have the option."""
    parts = option.split('+')
    chosen = {key: value for part in parts for key, value in ARGUMENTS.get(part, {}).items()}
    torch.manual_seed(0)
    if arch in ARCHS:
        network: nn.Module = CARE(arch, drop_path_rate=0.1, **chosen)
    elif chosen:
        return None
    else:
        timm = require('timm', 'the training benchmark', 'bench')
        sized = dict(img_size=tuple(shape)) if arch.startswith('swin') else {}
        network = timm.create_model(arch, features_only=True, **sized)
    if 'channels_last' in parts:
        network.to(memory_format=torch.channels_last)
    if 'compiled' in parts:
        network.compile()
    return network.train()


def bytes_kept(network: nn.Module, images: Tensor, precision: str) -> int:
    """Count the bytes that a forward pass keeps for its backward pass."""
    # Keep all storages alive while counting, so that no two of them have the same address.
    storages: dict[int, torch.UntypedStorage] = {}

    def note(tensor: Tensor) -> Tensor:
        storages.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        forward(network, images, precision)
    for parameter in network.parameters():
        storages.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(storage.nbytes() for storage in storages.values())


def bytes_allocated(step: Callable[[], object]) -> int:
    """Measure the peak of a GPU's memory in a step, over what was allocated before, in bytes."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated() - before


def busy(step: Callable[[], object], device: str) -> float:
    """Sum the times of a step's kernels, or on a CPU of its operators, in milliseconds."""
    on_gpu = device == 'cuda'
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]
    with profile(activities=activities) as profiler:
        step()
        if on_gpu:
            torch.cuda.synchronize()
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    events = [event for event in profiler.key_averages() if event.device_type == kind]
    times = (e.self_device_time_total if on_gpu else e.self_cpu_time_total for e in events)
    return sum(times) / 1e3


def forward(network: nn.Module, images: Tensor, precision: str) -> Tensor:
    """Run a backbone; the mean of its maps is the loss."""
    dtype = PRECISIONS[precision]
    with torch.autocast(images.device.type, dtype, enabled=dtype is not None):
        maps = network(images)
    return torch.stack([output.float().mean() for output in maps]).sum()


def step(network: nn.Module, images: Tensor, precision: str) -> None:
    """Run a forward and a backward pass; gradients add up."""
    forward(network, images, precision).backward()


def infer(network: nn.Module, images: Tensor, precision: str) -> None:
    """Run a forward pass, without gradients."""
    with torch.no_grad():
        forward(network, images, precision)


def measure(arch: str, shape: tuple[int, int], arguments: argparse.Namespace) -> pd.DataFrame:
    """Measure one network at one size with all options, a row for each.

    Memory and times are those of the batch, divided by its number of images.
    """
    images = torch.randn(arguments.batch, 3, *shape, device=arguments.device)
    steps, memory = {}, {}
    for option in arguments.options:
        if (network := build(arch, option, shape)) is None:
            continue
        network.to(arguments.device).train(not arguments.inference)
        run = infer if arguments.inference else step
        steps[option] = partial(run, network, images, arguments.precision)
        steps[option]()  # so that gradients exist already when memory is measured
        if arguments.device == 'cuda':
            memory[option] = bytes_allocated(steps[option])
        else:
            memory[option] = bytes_kept(network, images, arguments.precision)
    times = measure_in_turn(steps, arguments.rounds, arguments.threads) / arguments.batch
    table = times.quantile([0.5, 0.25, 0.75]).T.set_axis(['ms', 'from', 'to'], axis='columns')
    if arguments.device == 'cuda':
        kernels = pd.Series({option: busy(run, 'cuda') for option, run in steps.items()})
        table['GPU'] = kernels / arguments.batch / table['ms']
    table['time'] = times.div(times.iloc[:, 0], axis='index').median()
    table['MiB'] = pd.Series(memory) / arguments.batch / 2**20
    table['memory'] = table['MiB'] / table['MiB'].iloc[0]
    table.insert(0, 'image', f'{shape[0]}x{shape[1]}')
    table.insert(0, 'option', table.index)
    table.insert(0, 'arch', arch)
    return table


def main() -> None:
    """Measure every case, print the table and write it."""
    arguments = parse_args()
    check_writable(arguments.out_dir)
    tables = []
    for shape in arguments.shape or [(512, 512)]:
        for arch in arguments.archs:
            tables.append(measure(arch, tuple(shape), arguments))
            table = pd.concat(tables)
            save(arguments.out_dir / 'training.csv', table)
    text = (
        f'{table.to_markdown(index=False, floatfmt=".2f")}\n\n'
        'ms (median and quartiles) and MiB are for one image, time and memory are shares of the '
        f'first option. {"Inference" if arguments.inference else "Training"}, batch '
        f'{arguments.batch}, {arguments.precision}, {arguments.device}, '
        f'threads: {arguments.threads}; {", ".join(describe_machine())}.\n'
    )
    save(arguments.out_dir / 'training.md', text)
    print(text)


if __name__ == '__main__':
    main()
