"""ExecuTorch, with XNNPACK."""

import json
import warnings
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.export import ExportedProgram

from mmcare.export import rewrites
from mmcare.export.backends.base import Backend, Inputs, WriteResult, count_convolutions
from mmcare.export.graph import Graph
from mmcare.export.tasks.base import Description, Options


class ExecuTorch(Backend):
    """``.pte``, whose outputs have no names."""

    name = 'executorch'
    suffix = '.pte'
    packages = ('executorch',)
    precisions: ClassVar = {**Backend.precisions, 'int8': None}
    runtime = 'ExecuTorch'
    separate_convolutions = True
    # The name of 1.0 for --format executorch-coreml, see ExportRequest.
    options: ClassVar = {
        'delegate': dict(
            choices=('xnnpack', 'coreml'), help='coreml: the same as --format executorch-coreml'
        ),
    }

    def write(
        self, graph: Graph, path: Path, description: Description, options: Options, images: Inputs
    ) -> WriteResult:
        """Write a ``.pte`` file.

        Operators that the delegate lacks run in slower kernels, and split the program into several
        delegates. The report counts both.
        """
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

        int8 = description['precision'] == 'int8'
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')  # ExecuTorch warns about its own code
            program = decompose(graph.program)
            if int8:
                program = quantize(program, images)
            facts = lower(program, XnnpackPartitioner(), path, description)
        facts['convolutions'] = count_convolutions(program, graph.info.stages)
        return WriteResult(facts, program.module() if int8 else None, 'PyTorch')


def lower(
    program: ExportedProgram, partitioner: Any, path: Path, description: Description
) -> dict[str, Any]:
    """Write a program to a ``.pte`` file; return what runs in delegates and what does not."""
    from executorch.devtools.backend_debug import get_delegation_info
    from executorch.exir import to_edge_transform_and_lower

    constants = dict(mmcare=json.dumps(description))
    edge: Any = to_edge_transform_and_lower(
        program, partitioner=[partitioner], constant_methods=constants
    )
    info = get_delegation_info(edge.exported_program().graph_module)
    counts = info.delegation_by_operator
    counts.pop('getitem', None)  # takes an output of a delegate
    outside = {name: n.non_delegated for name, n in counts.items() if n.non_delegated}
    with path.open('wb') as file:
        edge.to_executorch().write_to_file(file)  # save only logs errors, such as a full disk
    return dict(delegates=info.num_delegated_subgraphs, non_delegated_ops=outside)


def decompose(program: ExportedProgram) -> ExportedProgram:
    """Rewrite a program in operators that XNNPACK has; slices of weights become weights."""
    from executorch.exir.passes.constant_prop_pass import constant_prop_pass

    # Copy, since the pass deletes unused constants even from the original program.
    table = rewrites.with_torchvision(rewrites.EXECUTORCH)
    program = constant_prop_pass(deepcopy(program).run_decompositions(table))
    copy_constants(program)
    return program


def copy_constants(program: ExportedProgram) -> None:
    """Give each constant memory of its own, in the order of its axes, in place.

    ExecuTorch writes weights for XNNPACK from the start of the memory: for the second part of a
    weight, as in an attention with one weight for queries, keys and values, it takes the first. It
    confuses the shape of permuted constants with a first axis of 1, as Swin's bias for positions,
    and takes no kernels in channels last.
    """
    tables: Sequence[Any] = program.state_dict, program.constants
    for constants in tables:
        for x in constants.values():
            if not isinstance(x, Tensor):
                continue
            if not x.is_contiguous() or x.untyped_storage().nbytes() > x.nbytes:
                x.data = x.detach().clone(memory_format=torch.contiguous_format)
    for node in program.graph.find_nodes(op='placeholder'):
        node.meta['val'] = node.meta['val'].contiguous()


@torch.no_grad()
def quantize(program: ExportedProgram, images: Sequence[Tensor]) -> ExportedProgram:
    """Quantize the convolutions of a program by PT2E, with XNNPACK's quantizer.

    Args:
        program: Decomposed, with constants propagated. If constants were propagated after
            quantization, int8 weights would become float32. Large kernels, which are
            ``aten.convolution``, stay in float32.
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
    # Not the images themselves: the program would then expect their strides.
    return torch.export.export(module, program.example_inputs[0])
