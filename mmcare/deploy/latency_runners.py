"""One run of a network, ready to be timed: in ONNX Runtime, and in PyTorch on CPU or GPU."""

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mmcare.deploy.latency_models import EXTRA, PURPOSE
from mmcare.deploy.requirements import require
from mmcare.deploy.to_onnx import MODULES, OPSET, TOLERANCE

Run = Callable[[], object]
Timer = Callable[[Run], float]


class LatencyError(RuntimeError):
    """A network that cannot be measured as it was asked for."""


def check_onnxruntime() -> None:
    """Raise an ImportError that says what installs it, unless everything for ONNX is there."""
    for module in MODULES:
        require(module, PURPOSE, EXTRA)


def check_cuda() -> None:
    """Raise a ValueError unless PyTorch sees a GPU."""
    if not torch.cuda.is_available():
        raise ValueError('PyTorch sees no GPU of NVIDIA here: measure with --device cpu')


def torch_run(
    network: nn.Module,
    image: Tensor,
    device: str = 'cpu',
    half: bool = False,
    channels_last: bool = False,
) -> Run:
    """Prepare a run in PyTorch.

    Args:
        network: Moved and converted in place.
        image: Images (B, C, H, W).
        device: ``'cpu'`` or ``'cuda'``.
        half: Weights and images in float16.
        channels_last: Weights and images with the channels last in memory.
    """
    form: dict[str, Any] = dict(
        device=device,
        dtype=torch.float16 if half else torch.float32,
        memory_format=torch.channels_last if channels_last else torch.contiguous_format,
    )
    network, image = network.to(**form), image.to(**form)

    def run() -> object:
        with torch.inference_mode():
            return network(image)

    return run


def onnx_run(network: nn.Module, image: Tensor, threads: int = 1) -> Run:
    """Prepare a run in ONNX Runtime, on the CPU, once it has agreed with PyTorch.

    Args:
        network: Maps images to a tuple of maps.
        image: Images (B, C, H, W); the graph is made for their size.
        threads: How many ONNX Runtime computes with.

    Raises:
        LatencyError: If the outputs differ by more than the tolerance of the export.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    with TemporaryDirectory() as directory, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter('ignore')  # of PyTorch's own code, for each network
        path = Path(directory, 'network.onnx')
        program = torch.onnx.export(
            network,
            (image,),
            input_names=['image'],
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
        )
        assert program is not None
        program.save(path, external_data=False)
        session = onnxruntime.InferenceSession(
            str(path), options, providers=['CPUExecutionProvider']
        )
        expected = network(image)
    feed = {'image': image.numpy()}
    for index, (ours, theirs) in enumerate(zip(expected, session.run(None, feed), strict=True)):
        deviation = np.abs(ours.numpy() - theirs).max() / ours.abs().max().item()
        if not deviation <= TOLERANCE:
            raise LatencyError(
                f'map {index + 1} in ONNX Runtime differs from that in PyTorch by {deviation:.1e} '
                'of its largest magnitude'
            )
    return lambda: session.run(None, feed)


def cpu_timer(run: Run) -> float:
    """Time a run by the clock on the wall, in milliseconds."""
    start = time.perf_counter()
    run()
    return 1000 * (time.perf_counter() - start)


def cuda_timer(run: Run) -> float:
    """Time a run on the GPU between two events, in milliseconds."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Let PyTorch compute with so many threads within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
