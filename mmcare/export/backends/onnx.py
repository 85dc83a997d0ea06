"""ONNX, for ONNX Runtime and other engines."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from mmcare.export.backends.base import Backend, Inputs, WriteResult, count_convolutions
from mmcare.export.backends.onnx_float16 import round_to_float16
from mmcare.export.graph import Graph
from mmcare.export.plain_operators import NMS_SCALE
from mmcare.export.tasks import OutputFormat
from mmcare.export.tasks.base import Description, Options
from mmcare_runtime import Model, open_exported

OPSET = 20  # the first with an operator for GELU


class Onnx(Backend):
    """``.onnx``; the input is ``image``."""

    name = 'onnx'
    suffix = '.onnx'
    packages = ('onnx', 'onnxscript', 'onnxruntime')
    runtime = 'ONNX Runtime'
    uint8_input = True
    output_format = OutputFormat(nms='operator')

    def write(
        self, graph: Graph, path: Path, description: Description, options: Options, images: Inputs
    ) -> WriteResult:
        """Write an ONNX file; report opset and convolutions by stage."""
        converted = torch.onnx.export(
            graph.program,
            input_names=['image'],
            output_names=list(graph.output_names),
            opset_version=OPSET,
            custom_translation_table={torch.ops.mmcare.nms_mask.default: translate_nms},
            verbose=False,
        )
        assert converted is not None, 'an ONNXProgram, since no file is named'
        if description['inputs'][0]['dtype'] == 'uint8':
            take_uint8(converted.model.graph)
        converted.model.metadata_props['mmcare'] = json.dumps(description)
        converted.save(path, external_data=False)
        return WriteResult(
            dict(opset=OPSET, convolutions=count_convolutions(graph.program, graph.info.stages))
        )

    def open_float16(self, path: Path) -> Model:
        """Open a file in ONNX Runtime, with each tensor rounded to float16."""
        with TemporaryDirectory() as folder:
            rounded = Path(folder, path.name)
            round_to_float16(path, rounded)
            return open_exported(rounded)


def translate_nms(boxes: Any, scores: Any, iou_threshold: float, labels: Any, classes: int) -> Any:
    """Write :func:`mmcare.export.plain_operators.nms_mask_operator` by ``NonMaxSuppression``.

    It keeps classes apart in its scores (1, K, N): a box has score 0 for other classes than its
    own, and boxes of score 0 are not looked at. So no label is computed with floats.
    """
    from onnxscript import opset18 as op

    number, scores = boxes.shape[0], op.Unsqueeze(scores, [0])
    if classes > 1:
        numbers = op.Unsqueeze(op.Constant(value_ints=[*range(classes)]), [1])
        own = op.Equal(numbers, op.Unsqueeze(labels, [0]))
        scores = op.Where(own, scores, 0.0)
    boxes = op.Unsqueeze(op.Mul(boxes, NMS_SCALE), [0])
    kept = op.NonMaxSuppression(boxes, op.Unsqueeze(scores, [0]), number, iou_threshold, 0.0)
    kept = op.Slice(kept, [2], [3], [1])  # the last of batch, class and box
    ones = op.Expand(1.0, op.Shape(op.Squeeze(kept, [1])))
    return op.ScatterND(op.Expand(0.0, [number]), kept, ones)


def take_uint8(graph: Any) -> None:
    """Let a graph take uint8, and cast it."""
    import onnx_ir as ir

    image = graph.inputs[0]
    cast = ir.node('Cast', [image], dict(to=ir.DataType.FLOAT.value))
    cast.outputs[0].shape, cast.outputs[0].dtype = image.shape, image.dtype
    image.dtype = ir.DataType.UINT8
    ir.convenience.replace_all_uses_with(image, cast.outputs[0])
    cast.replace_input_with(0, image)
    graph.insert_before(graph[0], cast)
