"""Export to ExecuTorch for XNNPACK, compared with PyTorch in ExecuTorch's runtime."""

import warnings
from pathlib import Path
from typing import Any

from torch import nn
from torch.export import ExportedProgram

from mmcare.export.program import XNNPACK
from mmcare.export.verify import trial_images, verify
from mmcare.files import moved_into_place


def lower(program: ExportedProgram) -> Any:
    """Delegate the supported operators of a program to XNNPACK, in float32.

    Returns:
        The ``executorch.exir.EdgeProgramManager``.
    """
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from executorch.exir.passes.constant_prop_pass import constant_prop_pass

    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # of ExecuTorch about its own code
        # Pieces of weights become weights.
        program = constant_prop_pass(program.run_decompositions(dict(XNNPACK)))
        return to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])


def write_executorch(program: ExportedProgram, path: Path, reference: nn.Module) -> dict[str, Any]:
    """Write a ``.pte`` file, once ExecuTorch's runtime has agreed with PyTorch.

    Operators that XNNPACK does not take cut the program into several delegates and run in slower
    kernels between them; a warning names them.

    Args:
        program: Of :func:`mmcare.export.program.export_program`.
        path: File to write, replaced if it exists.
        reference: What the file should compute.

    Returns:
        Entries of the report: ``delegates``, their number; ``outside``, operators in none of them
        with their numbers; operators by type; ``deviation`` of a random image, and all deviations.

    Raises:
        ExportError: If the outputs differ from PyTorch's; no file is written then.
    """
    from executorch.devtools.backend_debug import get_delegation_info

    edge = lower(program)
    info = get_delegation_info(edge.exported_program().graph_module)
    kinds = info.delegation_by_operator
    kinds.pop('getitem', None)  # takes an output of a delegate
    outside = {name: kind.non_delegated for name, kind in kinds.items() if kind.non_delegated}
    if info.num_delegated_subgraphs != 1 or outside:
        warnings.warn(
            f'{path.name} has {info.num_delegated_subgraphs} XNNPACK delegates instead of one, '
            f'which is slower; not taken by XNNPACK: {", ".join(outside) or "nothing"}',
            stacklevel=2,
        )
    *_, channels, height, width = program.example_inputs[0][0].shape
    with moved_into_place(path) as temporary:
        edge.to_executorch().save(str(temporary))
        deviations = verify(
            temporary, reference, trial_images(channels, (height, width)), 'ExecuTorch'
        )
    return dict(
        delegates=info.num_delegated_subgraphs,
        outside=outside,
        deviation=deviations['random'],
        operators={name: kind.delegated + kind.non_delegated for name, kind in kinds.items()},
        deviations=deviations,
    )
