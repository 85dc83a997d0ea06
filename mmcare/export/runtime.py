"""Exported files, run and timed on the CPU by one thread."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from mmengine.utils import track_iter_progress
from torch import Tensor
from torch.utils.benchmark import Timer

from mmcare.compatibility import require

SECONDS = 0.2  # of repeated runs in a round, at least one


@dataclass(frozen=True)
class Exported:
    """An opened file.

    Attributes:
        run: Maps images (1, C, H, W) to the outputs, in the program's order.
        input_shape: (1, C, H, W); of a free height or width, its name.
    """

    run: Callable[[Tensor], list[np.ndarray]]
    input_shape: tuple[Any, ...]


def open_exported(path: Path) -> Exported:
    """Open an ``.onnx`` or ``.pte`` file, or an ``.ncnn`` folder.

    Raises:
        FileNotFoundError: If it does not exist.
        ImportError: If ONNX Runtime, ExecuTorch or ncnn is missing.
        ValueError: If it is damaged, or none of these.
    """
    openers = {'.onnx': _open_onnx, '.pte': _open_executorch, '.ncnn': _open_ncnn}
    if path.suffix not in openers:
        raise ValueError(f'{path} is not {", ".join(openers)}: other formats cannot be run here')
    if not path.exists():
        raise FileNotFoundError(f'{path} does not exist')
    try:
        return openers[path.suffix](str(path))
    except ImportError:
        raise
    except Exception as error:  # the runtimes have classes of their own
        raise ValueError(f'{path} cannot be opened: {error}') from error


def measure_in_turn(
    runs: Mapping[Any, Callable[[], object]], rounds: int, threads: int = 1
) -> pd.DataFrame:
    """Time A, B, C, A, B, C, ..., so that a slow moment of the machine meets all of them.

    Args:
        runs: What to time, by name. In each round each is warmed up, then repeated for 0.2
            seconds. On a GPU the timer waits until the work is done.
        rounds: How often each gets its turn.
        threads: Threads of PyTorch.

    Returns:
        Milliseconds, a row for each round and a column for each run: the median of its repetitions.
    """
    timers = {
        name: Timer('run()', globals=dict(run=run), num_threads=threads)
        for name, run in runs.items()
    }
    return pd.DataFrame(
        {
            name: 1e3 * timer.blocked_autorange(min_run_time=SECONDS).median
            for name, timer in timers.items()
        }
        for _ in track_iter_progress(list(range(rounds)), file=sys.stderr)
    )


def _open_onnx(path: str) -> Exported:
    onnxruntime = require('onnxruntime', 'running an ONNX file')
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=['CPUExecutionProvider'])
    image = session.get_inputs()[0]
    return Exported(
        lambda images: session.run(None, {image.name: images.numpy()}), tuple(image.shape)
    )


def _open_executorch(path: str) -> Exported:
    require('executorch', 'running a .pte file')
    from executorch.extension.pybindings import portable_lib as threads
    from executorch.runtime import Runtime

    if threads._threadpool_get_thread_count() != 1:  # programs opened before would lose theirs
        threads._unsafe_reset_threadpool(1)  # of the process
    method = Runtime.get().load_program(path).load_method('forward')

    def run(images: Tensor) -> list[np.ndarray]:
        # Without a look at the strides, values are taken in the order of the memory.
        return [output.numpy() for output in method.execute([images.contiguous()])]

    return Exported(run, tuple(method.metadata.input_tensor_meta(0).sizes()))


def _open_ncnn(path: str) -> Exported:
    ncnn = require('ncnn', 'running ncnn files', 'ncnn')
    net = ncnn.Net()
    net.opt.num_threads = 1
    for name in ('packed', 'storage', 'arithmetic'):  # results are compared with float32
        setattr(net.opt, f'use_fp16_{name}', False)
    param = Path(path, 'model.ncnn.param')
    if net.load_param(str(param)) or net.load_model(str(param.with_suffix('.bin'))):
        raise ValueError('ncnn cannot read it')
    (line,) = (line for line in param.read_text().splitlines() if line.split()[0] == 'Input')
    sizes = dict(field.split('=') for field in line.split()[5:])
    names = sorted(net.output_names(), key=lambda name: int(name.removeprefix('out')))

    def run(images: Tensor) -> list[np.ndarray]:
        extractor = net.create_extractor()
        extractor.input('in0', ncnn.Mat(images[0].contiguous().numpy()).clone())
        return [np.array(extractor.extract(name)[1])[None] for name in names]

    return Exported(run, (1, *(int(sizes[key]) for key in '210')))
