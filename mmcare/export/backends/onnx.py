"""ONNX, for ONNX Runtime and other engines."""

import json
import math
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import torch
from torch.export import ExportedProgram

from mmcare.export.backends import onnx_int8
from mmcare.export.backends.base import Backend, Inputs, WriteResult, count_convolutions
from mmcare.export.backends.onnx_float16 import round_to_float16
from mmcare.export.errors import Argument, ExportError
from mmcare.export.graph import Graph
from mmcare.export.plain_operators import NMS_SCALE
from mmcare.export.rewrites import aten
from mmcare.export.tasks import OutputFormat
from mmcare.export.tasks.base import Description, Options
from mmcare_runtime import Model, open_exported

# Each opset with the IR version of its ONNX release: engines refuse a later IR version.
OPSETS = {18: 8, 19: 9, 20: 9}
GELU_OPSET = 20  # the first opset with an operator for GELU
DEFORM_OPSET = 19  # the first opset with an operator for deformable convolutions
OPSET = 18  # ONNX Runtime 1.15, TensorRT 9 and RKNN Toolkit 2.5 read it


class Onnx(Backend):
    """``.onnx``; the input is ``image``."""

    name = 'onnx'
    suffix = '.onnx'
    packages = ('onnx', 'onnxscript', 'onnxruntime')
    runtime = 'ONNX Runtime'
    uint8_input = True
    takes_batches = True
    precisions: ClassVar = {**Backend.precisions, 'int8': None}
    options: ClassVar = {
        'opset': dict(
            type=int,
            choices=OPSETS,
            help=f'opset of ONNX files; default: {OPSET}, or {DEFORM_OPSET} with '
            'deformable convolutions',
        ),
        'nms': dict(
            choices=('outside',),
            help='outside: decoded detectors in ONNX return all boxes and scores, for engines '
            'without NonMaxSuppression or with an NMS of their own',
        ),
        'int8_for': dict(
            choices=('tensorrt',),
            help='tensorrt: ONNX files in int8 have no zero points, as TensorRT needs; they are '
            'slow in ONNX Runtime, and OpenVINO computes them wrongly',
        ),
    }

    def choose_output_format(self, options: Options) -> OutputFormat:
        """Leave NMS to the engine or the app, if that was asked for."""
        if options.get('nms') == 'outside':
            return OutputFormat(nms='outside', with_batch=True)
        return OutputFormat(nms='operator')

    def settings(self, options: Options) -> dict[str, str]:
        """Name where NMS is, if it is not in the file, and the engine that int8 is for."""
        return {key: options[key] for key in ('nms', 'int8_for') if key in options}

    def write(
        self, graph: Graph, path: Path, description: Description, options: Options, images: Inputs
    ) -> WriteResult:
        """Write an ONNX file; report opset and convolutions by stage."""
        opset = choose_opset(graph.program, options)
        translations: dict[Any, Any] = {torch.ops.mmcare.nms_mask.default: translate_nms}
        if opset >= DEFORM_OPSET and 'torchvision' in sys.modules:
            deform = torch.ops.torchvision.deform_conv2d.default
            translations[deform] = translate_deform_conv2d
        if opset < GELU_OPSET:
            translations[aten.gelu.default] = translate_gelu
        converted = torch.onnx.export(
            graph.program,
            input_names=['image'],
            output_names=list(graph.output_names),
            opset_version=opset,
            custom_translation_table=translations,
            verbose=False,
            optimize=False,
        )
        assert converted is not None, 'an ONNXProgram, since no file is named'
        optimize(converted.model)
        dtype = description['inputs'][0]['dtype']
        if dtype == 'uint8':
            take_uint8(converted.model.graph)
        for node in converted.model.graph:
            # Stack traces: paths of this machine, up to a fifth of a file.
            node.metadata_props.clear()
        converted.model.ir_version = OPSETS[opset]
        converted.model.metadata_props['mmcare'] = json.dumps(description)
        converted.save(path, external_data=False)
        facts = dict(opset=opset, convolutions=count_convolutions(graph.program, graph.info.stages))
        if description['precision'] != 'int8':
            return WriteResult(facts)
        batch = len(graph.example)
        arrays = [x.repeat(batch, 1, 1, 1).numpy().astype(dtype) for x in images]
        if options.get('int8_for') == 'tensorrt':
            onnx_int8.quantize_for_tensorrt(path, arrays)
            engines = {}
        else:
            onnx_int8.quantize(path, arrays)
            engines = onnx_int8.open_others(path)
        unfused = onnx_int8.open_unfused(path)
        return WriteResult(facts, unfused, 'ONNX Runtime without fused operators', engines)

    def open_float16(self, path: Path) -> Model:
        """Open a file in ONNX Runtime, with each tensor rounded to float16."""
        with TemporaryDirectory() as folder:
            rounded = Path(folder, path.name)
            round_to_float16(path, rounded)
            return open_exported(rounded, verify=False)


def choose_opset(program: ExportedProgram, options: Options) -> int:
    """Return the opset that was asked for, or the oldest that has all operators.

    Raises:
        ExportError: If the opset that was asked for lacks an operator.
    """
    deforms = any('deform_conv2d' in str(node.target) for node in program.graph.nodes)
    opset = options.get('opset', DEFORM_OPSET if deforms else OPSET)
    if deforms and opset < DEFORM_OPSET:
        raise ExportError(
            'ONNX has deformable convolutions from ', Argument('opset', DEFORM_OPSET), ' on'
        )
    return opset


def translate_deform_conv2d(
    x: Any,
    weight: Any,
    offset: Any,
    mask: Any,
    bias: Any,
    stride_h: int,
    stride_w: int,
    pad_h: int,
    pad_w: int,
    dilation_h: int,
    dilation_w: int,
    groups: int,
    offset_groups: int,
    use_mask: bool,
) -> Any:
    """Write torchvision's ``deform_conv2d`` as ``DeformConv``."""
    from onnxscript import opset19

    op: Any = opset19  # its types do not know constants
    return op.DeformConv(
        x,
        weight,
        offset,
        bias,
        mask if use_mask else None,
        strides=[stride_h, stride_w],
        pads=[pad_h, pad_w, pad_h, pad_w],
        dilations=[dilation_h, dilation_w],
        group=groups,
        offset_group=offset_groups,
    )


def optimize(model: Any) -> None:
    """Simplify a model in place, as PyTorch's exporter does in twice the time.

    The optimizer tries each of its rules on each operator, and by default goes round twice. Two
    fifths of the operators are constants, which no rule needs.
    """
    from onnx_ir.passes.common import InlinePass, LiftConstantsToInitializersPass
    from onnxscript.optimizer import optimize_ir

    InlinePass()(model)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    optimize_ir(model, num_iterations=1)


def translate_gelu(x: Any, approximate: str = 'none') -> Any:
    """Write GELU in the order that ONNX Runtime fuses to one operator; PyTorch's order differs."""
    from onnxscript import opset18

    op: Any = opset18  # its types do not know constants
    if approximate == 'tanh':
        cubes = op.Mul(op.Mul(op.Mul(x, x), x), 0.044715)
        share = op.Tanh(op.Mul(op.Add(x, cubes), (2 / math.pi) ** 0.5))
    else:
        share = op.Erf(op.Div(x, 2**0.5))
    return op.Mul(op.Mul(x, op.Add(share, 1.0)), 0.5)


def translate_nms(boxes: Any, iou_threshold: float, labels: Any, classes: int, valid: Any) -> Any:
    """Write :func:`mmcare.export.plain_operators.nms_mask_operator` as ``NonMaxSuppression``.

    Scores (1, K, N) are ranks, from N to 1, and keep classes apart: a box has score 0 for classes
    other than its own, and ``NonMaxSuppression`` skips boxes with score 0. So no label is computed
    in floats. Float16 gives some ranks above 2048 to two boxes, of which the first is better.
    """
    from onnxscript import opset18

    op: Any = opset18  # its types do not know constants
    number = boxes.shape[0]
    ranks = op.Constant(value_floats=[float(rank) for rank in range(number, 0, -1)])
    scores = op.Unsqueeze(ranks if valid is None else op.Mul(ranks, valid), [0])
    if classes > 1:
        numbers = op.Unsqueeze(op.Constant(value_ints=[*range(classes)]), [1])
        is_label = op.Equal(numbers, op.Unsqueeze(labels, [0]))
        scores = op.Where(is_label, scores, 0.0)
    boxes = op.Unsqueeze(op.Mul(boxes, NMS_SCALE), [0])
    kept = op.NonMaxSuppression(boxes, op.Unsqueeze(scores, [0]), number, iou_threshold, 0.0)
    kept = op.Slice(kept, [2], [3], [1])  # the box, of batch, class and box
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
