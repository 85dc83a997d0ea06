"""ExecuTorch for XNNPACK."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.export import ExportedProgram

from mmcare.compatibility import require
from mmcare.export.formats.base import Exported, Format, Job, warn_of_delegates
from mmcare.export.program import XNNPACK, count_convolutions
from mmcare.export.quantize import check_quantized, quantize

RECIPE = (
    'int8, static: convolutions with a scale for each output channel; large depth-wise kernels '
    'and attention in float32'
)


def decompose(program: ExportedProgram) -> ExportedProgram:
    """Write a program in operators that XNNPACK has, with pieces of weights as weights."""
    from executorch.exir.passes.constant_prop_pass import constant_prop_pass

    program = program.run_decompositions(dict(XNNPACK))
    program._constants = dict(program.constants)  # other formats need what ExecuTorch removes
    return constant_prop_pass(program)


class ExecuTorch(Format):
    """``.pte``, whose outputs have no names."""

    name = 'executorch'
    ending = '.pte'
    packages = ('executorch',)
    int8 = True
    runtime = 'ExecuTorch'

    def write(self, job: Job, path: Path) -> dict[str, Any]:
        """Write a ``.pte`` file.

        Operators that XNNPACK does not take cut the program into several ``delegates`` and run in
        slower kernels ``outside``; a warning names them.
        """
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.devtools.backend_debug import get_delegation_info
        from executorch.exir import to_edge_transform_and_lower

        with warnings.catch_warnings():
            warnings.simplefilter('ignore')  # of ExecuTorch about its own code
            program = decompose(job.program)
            if job.calibration is not None:
                program = quantize(program, job.calibration)
            edge: Any = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
        info = get_delegation_info(edge.exported_program().graph_module)
        kinds = info.delegation_by_operator
        kinds.pop('getitem', None)  # takes an output of a delegate
        outside = {name: kind.non_delegated for name, kind in kinds.items() if kind.non_delegated}
        warn_of_delegates(path, info.num_delegated_subgraphs, outside)
        edge.to_executorch().save(str(path))
        entries: dict[str, Any] = dict(
            delegates=info.num_delegated_subgraphs,
            outside=outside,
            convolutions=count_convolutions(program),
            operators={name: kind.delegated + kind.non_delegated for name, kind in kinds.items()},
        )
        if job.calibration is not None:
            run, same = self.open(path).run, program.module()
            entries |= check_quantized(run, job, same, 'PyTorch', path.name, RECIPE)
        return entries

    def open(self, path: Path) -> Exported:
        """Open a file in ExecuTorch's runtime."""
        require('executorch', 'running a .pte file')
        from executorch.extension.pybindings import portable_lib as threads
        from executorch.runtime import Runtime

        if threads._threadpool_get_thread_count() != 1:  # programs opened before would lose theirs
            threads._unsafe_reset_threadpool(1)  # of the process
        method = Runtime.get().load_program(str(path)).load_method('forward')

        def run(images: Tensor) -> list[np.ndarray]:
            # Without a look at the strides, values are taken in the order of the memory.
            return [output.numpy() for output in method.execute([images.contiguous()])]

        return Exported(run, tuple(method.metadata.input_tensor_meta(0).sizes()))
