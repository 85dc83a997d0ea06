"""int8 in ONNX: ``QuantizeLinear`` and ``DequantizeLinear``, for CPUs or for TensorRT.

Engines recognize quantization by pairs of these operators. Weights are symmetric, with a scale for
each channel and 7 bits, which costs up to 2.3 dB: with 8, x86 without VNNI adds two products in 16
bits and saturates, see
https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from torch import Tensor

from mmcare_runtime import open_exported

# What is quantized beside convolutions. benchmarks/int8_operators.py measures what more would do.
OPERATORS = ('Concat',)
# Operators of feature maps that may be quantized, and those that keep a map what it is.
JOINS = ('Add', 'Concat')
KEEPS = ('Relu', 'Clip', 'Gelu', 'Split', 'Slice', 'MaxPool')
# Of activations. ONNX Runtime recognizes GELU, or SiLU, in operators that read the same value.
ELEMENTWISE = {'Add', 'Div', 'Mul', 'Sigmoid'}


def quantize(
    path: Path, images: Sequence[np.ndarray], operators: Collection[str] = OPERATORS
) -> None:
    """Quantize the convolutions of a file for CPUs, in place, and other operators on their maps.

    Maps are uint8, whose ranges need not be symmetric. With int8, ONNX Runtime leaves convolutions
    that read or write a map with two readers in float32, and OpenVINO computes what follows a
    residual sum with much noise.

    Args:
        path: The file.
        images: Inputs to calibrate with.
        operators: Types of operators, of ``JOINS`` and ``KEEPS``.
    """
    import onnx
    from onnxruntime.quantization import QuantType

    names = _find_operators(onnx.load(path), operators)
    options = dict(ActivationSymmetric=False, WeightSymmetric=True)
    kinds = ['Conv', *operators]
    _quantize_static(path, images, QuantType.QUInt8, kinds, options, nodes_to_quantize=names)
    model = onnx.load(path)
    _join_readers(model.graph)
    onnx.save(model, path)


def quantize_for_tensorrt(path: Path, images: Sequence[np.ndarray]) -> None:
    """Quantize the convolutions of a file, in place, as int8 with zero point 0.

    TensorRT takes no other zero points.
    """
    from onnxruntime.quantization import QuantType

    options = dict(ActivationSymmetric=True, WeightSymmetric=True)
    _quantize_static(path, images, QuantType.QInt8, ['Conv'], options)


def _quantize_static(
    path: Path,
    images: Sequence[np.ndarray],
    activation_type: Any,
    kinds: list[str],
    extra_options: dict[str, Any],
    **options: Any,
) -> None:
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.images: Iterator[np.ndarray] = iter(images)

        def get_next(self) -> dict[str, np.ndarray] | None:
            image = next(self.images, None)
            return None if image is None else dict(image=image)

    with TemporaryDirectory() as folder:
        quantized = Path(folder, path.name)
        quantize_static(
            path,
            quantized,
            Reader(),
            op_types_to_quantize=kinds,
            per_channel=True,
            reduce_range=True,
            activation_type=activation_type,
            weight_type=QuantType.QInt8,
            extra_options=extra_options,
            **options,
        )
        path.write_bytes(quantized.read_bytes())


def _find_operators(model: Any, kinds: Collection[str]) -> list[str]:
    """Name all convolutions, and operators of these kinds on maps that convolutions write.

    Boxes, which decoders join as well, need more than 8 bits; so do the weights of attention.
    """
    import onnx

    graph = onnx.shape_inference.infer_shapes(model).graph
    shapes = {x.name: str(x.type.tensor_type.shape) for x in [*graph.value_info, *graph.output]}
    maps: set[str] = set()
    names = []
    for node in graph.node:
        reads_maps = any(name in maps for name in node.input)
        if node.op_type == 'Add':  # no bias, and no term for each channel
            first, second = (shapes.get(name) for name in node.input)
            reads_maps = reads_maps and first is not None and first == second
        if node.op_type == 'Conv' or (reads_maps and node.op_type in (*JOINS, *KEEPS)):
            maps |= {*node.output}
            if node.op_type in ('Conv', *kinds):
                names.append(node.name)
    return names


def _join_readers(graph: Any) -> None:
    """Let the operators of an activation read one copy of a quantized map.

    ONNX Runtime gives each reader of a map a ``DequantizeLinear`` of its own, and then recognizes
    no activation that is made of several operators. A ``Clip`` without limits is the copy: what
    else changes nothing, it removes before.
    """
    from onnx.helper import make_node

    readers = defaultdict(list)
    for node in graph.node:
        for name in {*node.input}:
            readers[name].append(node)
    quantized = {node.output[0] for node in graph.node if node.op_type == 'QuantizeLinear'}
    nodes = []
    for node in graph.node:
        nodes.append(node)
        if node.op_type != 'DequantizeLinear' or node.input[0] not in quantized:
            continue
        (name,), copy = node.output, f'{node.output[0]}_copy'
        if len(readers[name]) > 1 and {reader.op_type for reader in readers[name]} <= ELEMENTWISE:
            for reader in readers[name]:
                reader.input[:] = [copy if x == name else x for x in reader.input]
            nodes.append(make_node('Clip', [name], [copy], copy))
    del graph.node[:]
    graph.node.extend(nodes)


def open_unfused(path: Path) -> Callable[[Tensor], Sequence[Any]]:
    """Open a quantized file so that its operators compute floats between roundings to 8 bits."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(path.read_bytes(), options, ['CPUExecutionProvider'])
    dtype = np.uint8 if session.get_inputs()[0].type == 'tensor(uint8)' else np.float32
    return lambda image: session.run(None, dict(image=image.numpy().astype(dtype)))


def open_others(path: Path) -> dict[str, Callable[[Tensor], Sequence[Any]]]:
    """Open a quantized file in OpenVINO, if it is installed."""
    if find_spec('openvino') is None:
        return {}
    model = open_exported(path, engine='openvino', verify=False)
    return {'OpenVINO': lambda image: model.run(image.numpy())}
