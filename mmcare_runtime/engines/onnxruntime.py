"""ONNX by ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Sequence

import numpy as np

from mmcare_runtime.engines.base import OpenedFile, to_input
from mmcare_runtime.schema import parse

NAME, PACKAGE, INSTALL, OPTIONS = 'ONNX Runtime', 'onnxruntime', 'onnxruntime', ('providers',)


def open_file(path: Path, threads: int, providers: Sequence[Any] | None = None) -> OpenedFile:
    """Open a file, on the CPU unless providers are named."""
    import onnxruntime

    providers = ['CPUExecutionProvider'] if providers is None else [*providers]
    names = [name if isinstance(name, str) else name[0] for name in providers]
    missing = {*names} - {*onnxruntime.get_available_providers()}
    if missing or not names:  # ONNX Runtime would only warn
        available = ', '.join(onnxruntime.get_available_providers())
        fault = f'has no {", ".join(sorted(missing))}' if missing else 'needs a provider'
        raise ValueError(f'ONNX Runtime {fault}; available: {available}')
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=providers)
    lost = {*names} - {*session.get_providers()}
    if lost:  # their libraries were not found, or the device: ONNX Runtime uses the CPU
        raise ValueError(f'ONNX Runtime cannot start {", ".join(sorted(lost))}')
    (image,), outputs = session.get_inputs(), session.get_outputs()
    uint8_input = image.type == 'tensor(uint8)'

    def run(pixels: np.ndarray) -> list[np.ndarray]:
        pixels = np.ascontiguousarray(to_input(pixels, uint8_input))
        return session.run(None, {image.name: pixels})

    text = session.get_modelmeta().custom_metadata_map.get('mmcare')
    return OpenedFile(
        run,
        tuple(image.shape),
        parse(text, path),
        [output.shape for output in outputs],
        [image.name, *(output.name for output in outputs)],
    )
