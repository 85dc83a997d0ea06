"""LiteRT with XNNPACK."""

from __future__ import annotations

from math import prod
from pathlib import Path
from threading import Lock
from typing import Any, Callable, Mapping

import numpy as np

from mmcare_runtime.engines.base import OpenedFile, to_input
from mmcare_runtime.schema import nchw, parse

NAME, PACKAGE, INSTALL, OPTIONS = 'LiteRT', 'ai_edge_litert', 'ai-edge-litert', ('float16',)
FORCE_FLOAT16 = 4  # TFLITE_XNNPACK_DELEGATE_FLAG_FORCE_FP16


def open_file(path: Path, threads: int, float16: bool = False, delegate: bool = True) -> OpenedFile:
    """Open a file, with XNNPACK or without it; images and maps are NHWC inside."""
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    description = read_description(path)
    resolver = 'AUTO' if delegate else 'BUILTIN_WITHOUT_DEFAULT_DELEGATES'
    program = Interpreter(
        str(path), num_threads=threads, experimental_op_resolver_type=OpResolverType[resolver]
    )
    (image,), outputs = program.get_input_details(), program.get_output_details()
    uint8_input = image['dtype'] is np.uint8
    shapes = [[int(side) for side in output['shape']] for output in outputs]
    layouts = ['NHWC' if len(shape) == 4 else None for shape in shapes]
    if description:
        layouts = [output['layout'] for output in description['outputs']]
    _, height, width, channels = map(int, image['shape'])
    if float16:
        compute = _compile_float16(path, threads)
    else:
        program.allocate_tensors()
        compute = _interpret(program, image['index'], [output['index'] for output in outputs])
    lock = Lock()

    def run(pixels: np.ndarray) -> list[np.ndarray]:
        pixels = to_input(pixels, uint8_input)
        with lock:
            arrays = compute(np.ascontiguousarray(pixels.transpose(0, 2, 3, 1)))
        return [
            x.transpose(0, 3, 1, 2) if layout == 'NHWC' else x for x, layout in zip(arrays, layouts)
        ]

    input_shape = 1, channels, height, width
    output_shapes = [
        nchw(dict(shape=shape, layout=layout)) for shape, layout in zip(shapes, layouts)
    ]
    return OpenedFile(run, input_shape, description, output_shapes)


def read_description(path: Path) -> Mapping[str, Any]:
    """Read and check the description in a file's metadata; empty if it has none."""
    from ai_edge_litert.schema_py_generated import Model

    data = path.read_bytes()
    if data[4:8] != b'TFL3':
        raise ValueError('it is not a .tflite file')
    model, text = Model.GetRootAs(data), None
    for index in range(model.MetadataLength()):
        entry = model.Metadata(index)
        if entry.Name() == b'mmcare':
            text = model.Buffers(entry.Buffer()).DataAsNumpy().tobytes()
    return parse(text, path)


def _interpret(
    program: Any, source: int, targets: list[int]
) -> Callable[[np.ndarray], list[np.ndarray]]:
    def compute(image: np.ndarray) -> list[np.ndarray]:
        program.set_tensor(source, image)
        program.invoke()
        return [program.get_tensor(target) for target in targets]

    return compute


def _compile_float16(path: Path, threads: int) -> Callable[[np.ndarray], list[np.ndarray]]:
    """Let XNNPACK compute in float16."""
    from ai_edge_litert.compiled_model import CompiledModel
    from ai_edge_litert.environment import Environment
    from ai_edge_litert.options import CpuOptions, Options

    options = Options(cpu_options=CpuOptions(num_threads=threads, xnnpack_flags=FORCE_FLOAT16))
    program = CompiledModel.from_file(str(path), None, Environment.create(), options)
    (source,), targets = program.create_input_buffers(0), program.create_output_buffers(0)
    details = [target.get_tensor_details() for target in targets]

    def compute(image: np.ndarray) -> list[np.ndarray]:
        source.write(image)
        program.run_by_index(0, [source], targets)
        return [
            target.read(prod(about['shape']), np.dtype(about['dtype'])).reshape(about['shape'])
            for target, about in zip(targets, details)
        ]

    return compute
