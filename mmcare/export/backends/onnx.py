"""ONNX, run by ONNX Runtime."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmcare.compatibility import require
from mmcare.export.backends.base import Backend, Exported, WriteResult, count_convolutions
from mmcare.export.postprocessing import NMS_OPTIONS, Style
from mmcare.export.spec import ExportSpec, to_bytes

OPSET = 20  # the first with an operator for GELU


class Onnx(Backend):
    """``.onnx``; the input is ``image``."""

    name = 'onnx'
    ending = '.onnx'
    packages = ('onnx', 'onnxscript', 'onnxruntime')
    runtime = 'ONNX Runtime'
    takes_bytes = True
    style = Style(nms='operator')
    options: ClassVar = {
        'dynamic': dict(
            action='store_true',
            help='ONNX for any height and width from 33 to 4096; with --part neck or model, '
            'multiples of 32',
        ),
        **NMS_OPTIONS,
    }

    def write(self, spec: ExportSpec, path: Path, description: Mapping[str, Any]) -> WriteResult:
        """Write an ONNX file; report opset and convolutions by stage."""
        converted = torch.onnx.export(
            spec.program,
            input_names=['image'],
            output_names=list(spec.output_names),
            opset_version=OPSET,
            verbose=False,
        )
        assert converted is not None, 'an ONNXProgram, since no file is named'
        if spec.takes_bytes:
            take_bytes(converted.model.graph)
        converted.model.metadata_props['mmcare'] = json.dumps(description)
        converted.save(path, external_data=False)
        return WriteResult(
            dict(opset=OPSET, convolutions=count_convolutions(spec.program, spec.info.stages))
        )

    def open(self, path: Path) -> Exported:
        """Open a file in ONNX Runtime."""
        onnxruntime = require('onnxruntime', 'running an ONNX file')
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        providers = ['CPUExecutionProvider']
        session = onnxruntime.InferenceSession(str(path), options, providers=providers)
        image = session.get_inputs()[0]
        convert = to_bytes if image.type == 'tensor(uint8)' else Tensor.contiguous
        return Exported(
            lambda images: session.run(None, {image.name: convert(images).numpy()}),
            tuple(image.shape),
            json.loads(session.get_modelmeta().custom_metadata_map.get('mmcare', '{}')),
        )


def take_bytes(graph: Any) -> None:
    """Let a graph take uint8, and cast it."""
    import onnx_ir as ir

    image = graph.inputs[0]
    cast = ir.node('Cast', [image], dict(to=ir.DataType.FLOAT.value))
    cast.outputs[0].shape, cast.outputs[0].dtype = image.shape, image.dtype
    image.dtype = ir.DataType.UINT8
    ir.convenience.replace_all_uses_with(image, cast.outputs[0])
    cast.replace_input_with(0, image)
    graph.insert_before(graph[0], cast)
