"""Round each float tensor of an ONNX file to float16, as an engine in float16 does."""

from pathlib import Path
from typing import Any

import numpy as np

# Inputs that engines keep as they are: thresholds, regions and scales of sizes, and those of int8.
KEPT = {
    'NonMaxSuppression': (3, 4),
    'Resize': (1, 2),
    'QuantizeLinear': (1,),
    'DequantizeLinear': (1,),
}


def round_to_float16(source: Path, target: Path) -> None:
    """Write a copy of a file; the copy stores each float tensor in float16, and sums in float32.

    TensorRT and other engines do the same if they compute in float16. Outputs stay float32.
    """
    import onnx_ir as ir
    from onnx_ir.passes.common import ShapeInferencePass

    model = ir.load(source)
    ShapeInferencePass()(model)
    graph = model.graph
    kept = {
        node.inputs[index]
        for node in graph
        for index in KEPT.get(node.op_type, ())
        if len(node.inputs) > index
    }
    for value in {*graph.initializers.values()} - kept:
        if value.dtype == ir.DataType.FLOAT and value.const_value is not None:
            with np.errstate(over='ignore'):  # large values become infinite, as in engines
                half = value.const_value.numpy().astype(np.float16)
            value.const_value = ir.tensor(half.astype(np.float32), name=value.name)
    first = graph[0]
    for image in graph.inputs:
        if image.dtype == ir.DataType.FLOAT:
            graph.insert_before(first, _round(image))
    for node in [*graph]:
        for value in node.outputs:
            if value.dtype == ir.DataType.FLOAT and value not in kept:
                graph.insert_after(node, _round(value))
    ir.save(model, target)


def _round(value: Any) -> list[Any]:
    """Make the two casts that round a value, and let everything else take their result."""
    import onnx_ir as ir

    half = ir.node('Cast', [value], dict(to=ir.DataType.FLOAT16.value))
    back = ir.node('Cast', half.outputs, dict(to=ir.DataType.FLOAT.value))
    (rounded,) = back.outputs
    rounded.shape, rounded.dtype = value.shape, value.dtype
    if value.is_graph_output():
        rounded.name, value.name = value.name, f'{value.name}_unrounded'
    value.replace_all_uses_with(rounded, replace_graph_outputs=True)
    half.replace_input_with(0, value)
    return [half, back]
