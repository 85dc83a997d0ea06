"""Engines that open and run files, one module for each; a package is imported when needed."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from mmcare_runtime.text import escape

# Engines by suffix; the format's own engine comes first.
ENGINES = {
    '.onnx': ('onnxruntime', 'openvino'),
    '.tflite': ('litert',),
    '.ncnn': ('ncnn',),
    '.pte': ('executorch',),
    '.mlpackage': ('coreml',),
}


def choose_engine(path: Path, name: str | None = None) -> Any:
    """Return the module that opens a file, or raise a ValueError."""
    engines = ENGINES.get(path.suffix)
    if engines is None:
        raise ValueError(escape(f'{path} is not {", ".join(ENGINES)}'))
    if name not in (None, *engines):
        raise ValueError(
            escape(f'{path.suffix} files are opened by {" or ".join(engines)}, not {name}')
        )
    return import_module(f'mmcare_runtime.engines.{name or engines[0]}')
