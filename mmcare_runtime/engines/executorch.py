"""ExecuTorch, which needs PyTorch."""

from __future__ import annotations

import logging
import struct
from pathlib import Path
from threading import Lock
from typing import Any, Mapping
from weakref import WeakSet

import numpy as np

from mmcare_runtime.engines.base import OpenedFile
from mmcare_runtime.schema import parse

NAME, PACKAGE, INSTALL, OPTIONS = 'ExecuTorch', 'executorch', 'executorch', ()
INTERPRETER = (
    "only Core ML computes it, and mmcare's interpreter where Core ML is missing: "
    'mmcare.export.open_exported, in an environment with the extra mmcare[export]'
)
_opened: WeakSet[Any] = WeakSet()  # methods of files that are in use


def open_file(path: Path, threads: int) -> OpenedFile:
    """Open a file for XNNPACK."""
    check_header(path)
    logger = logging.getLogger('torch.utils._pytree')
    level = logger.level
    logger.setLevel(logging.ERROR)  # torchao, which ExecuTorch imports, registers deprecated types
    try:
        from executorch.extension.pybindings import portable_lib
        from executorch.runtime import Runtime
    finally:
        logger.setLevel(level)

    if portable_lib._threadpool_get_thread_count() != threads:
        if _opened:  # they would lose their threads
            raise ValueError('ExecuTorch has one number of threads for all files of a process')
        portable_lib._unsafe_reset_threadpool(threads)
        if portable_lib._threadpool_get_thread_count() != threads:
            raise ValueError(f'ExecuTorch does not compute on {threads} threads')
    program = Runtime.get().load_program(str(path))
    description = read_description(program, path)
    if description.get('delegate') == 'coreml':
        raise ValueError(INTERPRETER)
    method = program.load_method('forward')
    if method is None:
        raise ValueError('ExecuTorch cannot load its method forward')
    _opened.add(method)
    about, lock = method.metadata, Lock()

    def run(pixels: np.ndarray) -> list[np.ndarray]:
        import torch

        # ExecuTorch ignores strides and reads values in the order of the memory.
        image = torch.from_numpy(np.ascontiguousarray(pixels, np.float32))
        with lock:
            return [output.numpy().copy() for output in method.execute([image])]

    shapes = [about.output_tensor_meta(i).sizes() for i in range(about.num_outputs())]
    return OpenedFile(run, tuple(about.input_tensor_meta(0).sizes()), description, shapes)


def read_description(program: Any, path: Path) -> Mapping[str, Any]:
    """Read and check what a loaded program says of itself; empty if it says nothing."""
    if 'mmcare' not in program.method_names:
        return {}
    (text,) = program.load_method('mmcare').execute([])
    return parse(text, path)


def check_header(path: Path) -> None:
    """Check identifiers and sizes, since ExecuTorch aborts the process on other files.

    The header after the flatbuffer's identifier has the sizes of what follows, see
    https://docs.pytorch.org/executorch/stable/pte-file-format.html

    Raises:
        ValueError: If the file is not a complete ``.pte`` file.
    """
    size = path.stat().st_size
    with path.open('rb') as file:
        head = file.read(40)
    if len(head) < 40 or head[4:6] != b'ET' or head[8:12] != b'eh00':
        raise ValueError('it is not a .pte file')
    root, length = struct.unpack('<I', head[:4])[0], struct.unpack('<I', head[12:16])[0]
    program, segments = struct.unpack('<QQ', head[16:32])
    if length < 24 or not 8 <= root < program <= size or not (segments == 0 or segments <= size):
        raise ValueError('it is damaged, or only a part of the file')
