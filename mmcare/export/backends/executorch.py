"""ExecuTorch for XNNPACK."""

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.export import ExportedProgram

from mmcare.compatibility import require
from mmcare.export import rewrites
from mmcare.export.backends.base import Backend, Exported, WriteResult, count_convolutions
from mmcare.export.spec import ExportSpec


class ExecuTorch(Backend):
    """``.pte``, whose outputs have no names."""

    name = 'executorch'
    ending = '.pte'
    packages = ('executorch',)
    precisions: ClassVar = {**Backend.precisions, 'int8': None}
    runtime = 'ExecuTorch'

    def write(self, spec: ExportSpec, path: Path, description: Mapping[str, Any]) -> WriteResult:
        """Write a ``.pte`` file.

        Operators that XNNPACK does not take cut the program into several ``delegates`` and run in
        slower kernels ``outside``, as the report says.
        """
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.devtools.backend_debug import get_delegation_info
        from executorch.exir import to_edge_transform_and_lower

        int8 = description['precision'] == 'int8'
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')  # of ExecuTorch about its own code
            network = rewrites.separate_convolutions(spec.network)
            program = decompose(rewrites.export_program(network, spec.input_shape))
            if int8:
                program = quantize(program, spec.calibration)
            edge: Any = to_edge_transform_and_lower(
                program,
                partitioner=[XnnpackPartitioner()],
                constant_methods=dict(mmcare=json.dumps(description)),
            )
        info = get_delegation_info(edge.exported_program().graph_module)
        counts = info.delegation_by_operator
        counts.pop('getitem', None)  # takes an output of a delegate
        outside = {name: n.non_delegated for name, n in counts.items() if n.non_delegated}
        edge.to_executorch().save(str(path))
        facts = dict(delegates=info.num_delegated_subgraphs, outside=outside)
        facts['convolutions'] = count_convolutions(program, spec.info.stages)
        return WriteResult(facts, program.module() if int8 else None, 'PyTorch')

    def open(self, path: Path) -> Exported:
        """Open a file in ExecuTorch's runtime."""
        require('executorch', 'running a .pte file')
        from executorch.extension.pybindings import portable_lib as threads
        from executorch.runtime import Runtime

        if threads._threadpool_get_thread_count() != 1:  # programs opened before would lose theirs
            threads._unsafe_reset_threadpool(1)  # of the process
        program = Runtime.get().load_program(str(path))
        method, description = program.load_method('forward'), '{}'
        if 'mmcare' in program.method_names:
            (description,) = program.load_method('mmcare').execute([])

        def run(images: Tensor) -> list[np.ndarray]:
            # ExecuTorch ignores strides and reads values in the order of the memory.
            return [output.numpy() for output in method.execute([images.contiguous()])]

        shape = tuple(method.metadata.input_tensor_meta(0).sizes())
        return Exported(run, shape, json.loads(description))


def decompose(program: ExportedProgram) -> ExportedProgram:
    """Write a program in operators that XNNPACK has; pieces of weights become weights."""
    from executorch.exir.passes.constant_prop_pass import constant_prop_pass

    return constant_prop_pass(program.run_decompositions(dict(rewrites.EXECUTORCH)))


@torch.no_grad()
def quantize(program: ExportedProgram, images: Sequence[Tensor]) -> ExportedProgram:
    """Quantize the convolutions of a program by PT2E, with XNNPACK's quantizer.

    Args:
        program: Decomposed, with constants propagated: after quantization that would turn int8
            weights into float32. Large kernels, which are ``aten.convolution``, stay in float32.
        images: Pictures (1, C, H, W), whose activations set the ranges.
    """
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    quantizer = XNNPACKQuantizer()
    quantizer.set_operator_type(
        torch.ops.aten.conv2d.default, get_symmetric_quantization_config(is_per_channel=True)
    )
    module: Any = program.module()
    rewrites.separate_weights(module)
    module = prepare_pt2e(module, quantizer)
    for image in images:
        module(image)
    module = convert_pt2e(module)
    # Not the images themselves: their strides would be those that the program takes.
    return torch.export.export(module, program.example_inputs[0])
