"""ONNX, run by ONNX Runtime."""

from collections import Counter
from pathlib import Path
from typing import Any

import torch

from mmcare.compatibility import require
from mmcare.export.formats.base import Exported, Format, Job
from mmcare.export.program import count_convolutions
from mmcare.models.backbones.care import TOTAL_STRIDE

OPSET = 20  # the first with an operator for GELU


class Onnx(Format):
    """``.onnx``; the input is ``image``."""

    name = 'onnx'
    ending = '.onnx'
    packages = ('onnx', 'onnxscript', 'onnxruntime')
    dynamic = True
    runtime = 'ONNX Runtime'

    def write(self, job: Job, path: Path) -> dict[str, Any]:
        """Write an ONNX file; report opset, operators by type and convolutions by stage."""
        import onnx

        converted = torch.onnx.export(
            job.program,
            input_names=['image'],
            output_names=list(job.names),
            opset_version=OPSET,
            verbose=False,
        )
        assert converted is not None, 'an ONNXProgram, since no file is named'
        converted.save(path, external_data=False)
        model = onnx.load(path)
        onnx.checker.check_model(model)
        free = {1: f'from {TOTAL_STRIDE + 1} on', TOTAL_STRIDE: f'multiples of {TOTAL_STRIDE}'}
        operators = Counter(node.op_type for node in model.graph.node if node.op_type != 'Constant')
        return dict(
            opset=OPSET,
            height_and_width=free[job.step] if job.step else [*job.size[1:]],
            operators=dict(operators.most_common()),
            convolutions=count_convolutions(job.program),
        )

    def open(self, path: Path) -> Exported:
        """Open a file in ONNX Runtime."""
        onnxruntime = require('onnxruntime', 'running an ONNX file')
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        providers = ['CPUExecutionProvider']
        session = onnxruntime.InferenceSession(str(path), options, providers=providers)
        image = session.get_inputs()[0]
        return Exported(
            lambda images: session.run(None, {image.name: images.numpy()}), tuple(image.shape)
        )
