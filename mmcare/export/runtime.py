"""Exported files, run on the CPU by one thread."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from mmcare.compatibility import require


@dataclass(frozen=True)
class Exported:
    """An opened file.

    Attributes:
        run: Maps images (1, C, H, W) to the outputs, in the program's order.
        input_shape: (1, C, H, W); of a free height or width, its name.
        names: Of the outputs; empty for ``.pte``, which does not hold them.
    """

    run: Callable[[Tensor], list[np.ndarray]]
    input_shape: tuple[Any, ...]
    names: tuple[str, ...] = ()


def open_exported(path: Path) -> Exported:
    """Open an ``.onnx`` or ``.pte`` file.

    Raises:
        FileNotFoundError: If it does not exist.
        ImportError: If ONNX Runtime or ExecuTorch is missing.
        ValueError: If it is damaged, or neither.
    """
    openers = {'.onnx': _open_onnx, '.pte': _open_executorch}
    if path.suffix not in openers:
        raise ValueError(f'{path} is neither .onnx nor .pte: other formats cannot be run here')
    if not path.is_file():
        raise FileNotFoundError(f'{path} is not a file')
    try:
        return openers[path.suffix](str(path))
    except ImportError:
        raise
    except Exception as error:  # the runtimes have classes of their own
        raise ValueError(f'{path} cannot be opened: {error}') from error


def _open_onnx(path: str) -> Exported:
    onnxruntime = require('onnxruntime', 'running an ONNX file')
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=['CPUExecutionProvider'])
    image = session.get_inputs()[0]
    names = tuple(output.name for output in session.get_outputs())
    return Exported(
        lambda images: session.run(None, {image.name: images.numpy()}), tuple(image.shape), names
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
