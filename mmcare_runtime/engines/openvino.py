"""ONNX by OpenVINO, on the CPU, in float32 or bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mmcare_runtime.engines.base import OpenedFile, to_input
from mmcare_runtime.schema import parse

NAME, PACKAGE, INSTALL, OPTIONS = 'OpenVINO', 'openvino', 'openvino', ('bfloat16',)
KEY = ['framework', 'mmcare']  # where OpenVINO keeps what an ONNX file says of itself


def open_file(path: Path, threads: int, bfloat16: bool = False) -> OpenedFile:
    """Open a file."""
    import openvino

    core = openvino.Core()
    if bfloat16 and 'BF16' not in core.get_property('CPU', 'OPTIMIZATION_CAPABILITIES'):
        raise ValueError('this CPU does not compute in bfloat16')
    model = core.read_model(str(path))
    text = model.get_rt_info(KEY).astype(str) if model.has_rt_info(KEY) else None
    description = parse(text, path)
    if description.get('precision') == 'int8' and _has_signed_maps(model):
        raise ValueError(
            'OpenVINO computes int8 without zero points wrongly, which TensorRT needs and mmcare '
            'wrote before 1.1: export it again, without --int8-for'
        )
    options = {
        'INFERENCE_NUM_THREADS': threads,
        # OpenVINO's default is bfloat16 if the CPU has it.
        'INFERENCE_PRECISION_HINT': 'bf16' if bfloat16 else 'f32',
    }
    compiled = core.compile_model(model, 'CPU', options)
    image, uint8_input = compiled.input(0), compiled.input(0).element_type == openvino.Type.u8

    def run(pixels: np.ndarray) -> list[np.ndarray]:
        pixels = to_input(pixels, uint8_input)
        request = compiled.create_infer_request()  # one for each call: threads do not share it
        request.infer({0: np.ascontiguousarray(pixels)})
        return [request.get_output_tensor(i).data.copy() for i in range(len(compiled.outputs))]

    def shape(port: Any) -> list[int | None]:
        return [None if side.is_dynamic else side.get_length() for side in port.get_partial_shape()]

    return OpenedFile(
        run,
        tuple(shape(image)),
        description,
        [shape(output) for output in compiled.outputs],
        [port.get_any_name() for port in [image, *compiled.outputs]],
    )


def _has_signed_maps(model: Any) -> bool:
    """Tell whether values are quantized to int8, not uint8; weights are constants in the file."""
    converted = (op for op in model.get_ops() if op.get_type_name() == 'Convert')
    return any(op.get_output_element_type(0).get_type_name() == 'i8' for op in converted)
