"""LiteRT, Android's runtime, with XNNPACK."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from mmcare.export.backends import tflite_metadata
from mmcare.export.backends.base import AUTHORS, Backend, Inputs, WriteResult
from mmcare.export.graph import Graph
from mmcare.export.rewrites import LITERT, ChannelsLast, with_torchvision
from mmcare.export.tasks import OutputFormat
from mmcare.export.tasks.base import Description, Options
from mmcare_runtime import Model, open_exported
from mmcare_runtime.engines import litert

QUIET = dict(enable_progress_bar=False, enable_progress_report=False)


class LiteRT(Backend):
    """``.tflite``; images and maps are NHWC, as Android's image libraries give them."""

    name = 'litert'
    suffix = '.tflite'
    packages = ('ai_edge_litert', 'ai_edge_quantizer', 'litert_torch')  # the last imports the rest
    extra = 'litert'
    systems = ' (macOS, and Linux on x86_64)'
    precisions: ClassVar = {**Backend.precisions, 'float16': 5e-3, 'int8': None}
    runtime = 'LiteRT'
    layout = 'NHWC'
    uint8_input = True
    # As MediaPipe expects boxes.
    output_format = OutputFormat(relative=True, labels=torch.float32, with_count=True)
    options: ClassVar = AUTHORS

    def write(
        self, graph: Graph, path: Path, description: Description, options: Options, images: Inputs
    ) -> WriteResult:
        """Write a ``.tflite`` file, which computes the same with and without XNNPACK."""
        import litert_torch

        litert_torch.config.show_progress = False
        program = graph.program.run_decompositions(with_torchvision(LITERT))
        layouts = [output['layout'] for output in description['outputs']]
        network = ChannelsLast(program.module(), graph.output_names, layouts)
        dtype = getattr(torch, description['inputs'][0]['dtype'])
        image = _to_input(graph.example, dtype)
        litert_torch.convert(network, sample_kwargs=dict(image=image)).export(str(path))
        if description['precision'] == 'int8':
            arrays = [_to_input(image, dtype).numpy() for image in images]
            _quantize(path, arrays, graph.output_names)
        if description['precision'] == 'float16':
            _cast(path)
        author, terms = (options.get(key, '') for key in ('author', 'license'))
        standard = tflite_metadata.write_metadata(description, author, terms)
        entries = dict(mmcare=json.dumps(description).encode(), TFLITE_METADATA=standard)
        _store(path, {name: data for name, data in entries.items() if data})
        if standard:
            tflite_metadata.append_labels(path, description)
        # Cross-check XNNPACK: another LiteRT version multiplied transposed matrices wrongly.
        plain = litert.open_file(path, threads=1, delegate=False).run
        return WriteResult(
            _count_operators(path), lambda image: plain(image.numpy()), 'LiteRT without XNNPACK'
        )

    def open_float16(self, path: Path) -> Model:
        """Open a file in LiteRT, with XNNPACK computing in float16."""
        return open_exported(path, float16=True)


def _to_input(images: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn images (1, C, H, W) into what a file takes: (1, H, W, C), perhaps as uint8."""
    return images.permute(0, 2, 3, 1).contiguous().to(dtype)


def _cast(path: Path) -> None:
    """Store the weights of convolutions and linear layers in float16, in place."""
    from ai_edge_quantizer import qtyping, quantizer

    operators = qtyping.TFLOperationName.ALL_SUPPORTED
    cast = quantizer.Quantizer(str(path))
    cast.add_weight_only_config(
        '.*', operators, 16, algorithm_key=quantizer.AlgorithmName.FLOAT_CASTING
    )
    result = cast.quantize(**QUIET)
    path.write_bytes(result.quantized_model)


def _quantize(path: Path, images: Sequence[np.ndarray], names: Sequence[str]) -> None:
    """Quantize the convolutions of a file, in place.

    Pieces of large depth-wise kernels (see :data:`mmcare.export.rewrites.PIECES`), which are not
    square, stay in float32.
    """
    from ai_edge_litert import schema_py_generated as schema
    from ai_edge_litert.tools import flatbuffer_utils
    from ai_edge_quantizer import calibrator, qtyping, quantizer
    from ai_edge_quantizer.utils.qsv_utils import min_max_update

    quantized = quantizer.Quantizer(str(path))
    dense, depth_wise = map(qtyping.TFLOperationName, ('CONV_2D', 'DEPTHWISE_CONV_2D'))
    for kind in (dense, depth_wise):
        quantized.add_static_config('.*', kind, 8, 8)
    for name in _find_pieces(path):
        quantized.update_quantization_recipe(
            f'^{re.escape(name)};?$',  # the quantizer appends a semicolon
            depth_wise,
            algorithm_key=quantizer.AlgorithmName.NO_QUANTIZE,
        )
    data = [dict(image=image) for image in images]
    # By default the calibrator averages the ranges of pictures, which cuts off rare activations.
    ranges = calibrator.Calibrator(str(path), 1, qsv_update_func=min_max_update)
    ranges.calibrate(dict(serving_default=data), quantized._recipe_manager)
    result = quantized.quantize(ranges.get_model_qsvs(), **QUIET)
    model = flatbuffer_utils.read_model_from_bytearray(result.quantized_model)
    # The quantizer (0.10.0) confuses dtypes where an output also feeds a layer: the output becomes
    # int8, or the convolution's input becomes float32. The signature names the tensors in float32,
    # unless a convolution computes them.
    (graph,), (signature,) = model.subgraphs, model.signatureDefs
    small = [tensor.type == schema.TensorType.INT8 for tensor in graph.tensors]
    ends = [(op.inputs[0], op.outputs[0]) for op in graph.operators]
    ends = [(source, out) for source, out in ends if small[source] and not small[out]]
    floats, integers = dict(ends), {out: source for source, out in ends}
    for output in signature.outputs:
        output.tensorIndex = floats.get(output.tensorIndex, output.tensorIndex)
    tensors = {output.name.decode(): output.tensorIndex for output in signature.outputs}
    graph.outputs = [tensors[name] for name in names]
    for op in graph.operators:
        if len(op.inputs) > 1 and small[op.inputs[1]]:
            op.inputs[0] = integers.get(op.inputs[0], op.inputs[0])
    flatbuffer_utils.write_model(model, str(path))


def _find_pieces(path: Path) -> list[str]:
    """Name the outputs of depth-wise convolutions whose kernels are not square."""
    from ai_edge_litert import schema_py_generated as schema
    from ai_edge_litert.tools import flatbuffer_utils

    model = flatbuffer_utils.read_model(str(path))
    (graph,), code = model.subgraphs, schema.BuiltinOperator.DEPTHWISE_CONV_2D
    names = []
    for op in graph.operators:
        if model.operatorCodes[op.opcodeIndex].builtinCode == code:
            _, height, width, _ = graph.tensors[op.inputs[1]].shape
            if height != width:
                names.append(graph.tensors[op.outputs[0]].name.decode())
    return names


def _store(path: Path, entries: Mapping[str, bytes]) -> None:
    from ai_edge_litert import schema_py_generated as schema
    from ai_edge_litert.tools import flatbuffer_utils

    model = flatbuffer_utils.read_model(str(path))
    for name, data in entries.items():
        buffer, entry = schema.BufferT(), schema.MetadataT()
        buffer.data, entry.name, entry.buffer = data, name, len(model.buffers)
        model.buffers.append(buffer)
        model.metadata = [*(model.metadata or ()), entry]
    flatbuffer_utils.write_model(model, str(path))


def _count_operators(path: Path) -> dict[str, Any]:
    """Count XNNPACK's delegates, and the operators outside of them by type."""
    from ai_edge_litert.interpreter import Interpreter

    program = Interpreter(str(path), num_threads=1)
    program.allocate_tensors()
    nodes = program._get_ops_details()  # in the order of computation, then delegates
    delegates = [node for node in nodes if node['op_name'] == 'DELEGATE']
    inside = set()
    for delegate in delegates:
        needed = {*delegate['outputs']}
        for node in reversed(nodes):
            if needed & {*node['outputs']}:
                inside.add(node['index'])
                needed |= {*node['inputs']} - {*delegate['inputs']}
    outside = Counter(node['op_name'] for node in nodes if node['index'] not in inside)
    return dict(delegates=len(delegates), non_delegated_ops={**outside})
