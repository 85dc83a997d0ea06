"""ExecuTorch for XNNPACK."""

import json
import warnings
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.export import ExportedProgram

from mmcare.compatibility import require
from mmcare.export.backends.base import Exported, Format, Job, Written
from mmcare.export.rewrites import (
    XNNPACK,
    count_convolutions,
    export_program,
    separate_convolutions,
)


class ExecuTorch(Format):
    """``.pte``, whose outputs have no names."""

    name = 'executorch'
    ending = '.pte'
    packages = ('executorch',)
    precisions: ClassVar = {**Format.precisions, 'int8': None}
    runtime = 'ExecuTorch'

    def write(self, job: Job, path: Path, description: Mapping[str, Any]) -> Written:
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
            network = separate_convolutions(job.network)
            program = decompose(export_program(network, job.size[0], job.size[1:]))
            if int8:
                program = quantize(program, job.calibration)
            edge: Any = to_edge_transform_and_lower(
                program,
                partitioner=[XnnpackPartitioner()],
                constant_methods=dict(mmcare=json.dumps(description)),
            )
        info = get_delegation_info(edge.exported_program().graph_module)
        kinds = info.delegation_by_operator
        kinds.pop('getitem', None)  # takes an output of a delegate
        outside = {name: kind.non_delegated for name, kind in kinds.items() if kind.non_delegated}
        edge.to_executorch().save(str(path))
        facts = dict(
            delegates=info.num_delegated_subgraphs,
            outside=outside,
            convolutions=count_convolutions(program),
        )
        return Written(facts, program.module() if int8 else None, 'PyTorch')

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
            # Without a look at the strides, values are taken in the order of the memory.
            return [output.numpy() for output in method.execute([images.contiguous()])]

        shape = tuple(method.metadata.input_tensor_meta(0).sizes())
        return Exported(run, shape, json.loads(description))


def decompose(program: ExportedProgram) -> ExportedProgram:
    """Write a program in operators that XNNPACK has, with pieces of weights as weights."""
    from executorch.exir.passes.constant_prop_pass import constant_prop_pass

    return constant_prop_pass(program.run_decompositions(dict(XNNPACK)))


@torch.no_grad()
def quantize(program: ExportedProgram, images: Sequence[Tensor]) -> ExportedProgram:
    """Quantize the convolutions of a program by PT2E, with XNNPACK's quantizer.

    Args:
        program: Decomposed, with constants propagated: after quantization that would turn int8
            weights into float32. Large kernels, which are ``aten.convolution``, stay in float32.
        images: Pictures (1, C, H, W) that show the ranges of activations, normalised.
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
    # The quantizer passes over a convolution whose weight another one has, as those of heads for
    # several levels, and ExecuTorch (1.5.1) would quantize their bias for the first one's input:
    # each gets a copy. Files hold equal weights once.
    for node in module.graph.find_nodes(op='get_attr'):
        for user in [*node.users][1:]:
            with module.graph.inserting_before(user):
                own = module.graph.node_copy(node)
            own.target = own.name
            module.register_buffer(own.target, attrgetter(node.target)(module).clone())
            user.replace_input_with(node, own)
    module = prepare_pt2e(module, quantizer)
    for image in images:
        module(image)
    module = convert_pt2e(module)
    # Not the images themselves: their strides would be those that the program takes.
    return torch.export.export(module, program.example_inputs[0])
