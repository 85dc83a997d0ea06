"""Export to ExecuTorch for XNNPACK, compared with PyTorch in ExecuTorch's runtime."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.export import ExportedProgram

from mmcare.export.program import XNNPACK, count_convolutions
from mmcare.export.quantize import RECIPE, check_quantized, quantize
from mmcare.export.verify import verify
from mmcare.files import moved_into_place


def decompose(program: ExportedProgram) -> ExportedProgram:
    """Write a program in operators that XNNPACK has."""
    from executorch.exir.passes.constant_prop_pass import constant_prop_pass

    # Pieces of weights become weights.
    return constant_prop_pass(program.run_decompositions(dict(XNNPACK)))


def write_executorch(
    program: ExportedProgram,
    path: Path,
    names: Sequence[str],
    reference: nn.Module,
    images: Mapping[str, Tensor],
    calibration: Sequence[Tensor] | None = None,
) -> dict[str, Any]:
    """Write a ``.pte`` file, once ExecuTorch's runtime has agreed with PyTorch.

    Operators that XNNPACK does not take cut the program into several delegates and run in slower
    kernels between them; a warning names them.

    Args:
        program: Of :func:`mmcare.export.program.export_program`.
        path: File to write, replaced if it exists.
        names: Of the outputs, for messages; the file does not hold them.
        reference: What the file should compute.
        images: To compare both with; see :func:`mmcare.export.verify.verify`.
        calibration: Quantize to int8 with these pictures, and compare by decibels; see
            :mod:`mmcare.export.quantize`.

    Returns:
        Entries of the report: ``delegates``, their number; ``outside``, operators in none of them
        with their numbers; operators by type; convolutions by stage; deviations;
        ``quantization``.

    Raises:
        ExportError: If the outputs differ from PyTorch's; no file is written then.
    """
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.devtools.backend_debug import get_delegation_info
    from executorch.exir import to_edge_transform_and_lower

    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # of ExecuTorch about its own code
        program = decompose(program)
        if calibration is not None:
            program = quantize(program, calibration)
        edge: Any = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
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
    report: dict[str, Any] = dict(
        delegates=info.num_delegated_subgraphs,
        outside=outside,
        convolutions=count_convolutions(program),
        operators={name: kind.delegated + kind.non_delegated for name, kind in kinds.items()},
    )
    with moved_into_place(path) as temporary:
        edge.to_executorch().save(str(temporary))
        if calibration is None:
            report['deviations'] = verify(temporary, reference, images, 'ExecuTorch')
        else:
            snr = check_quantized(temporary, names, reference, program.module(), images)
            report['quantization'] = dict(recipe=RECIPE, images=len(calibration), snr=snr)
            report['deviations'] = 'quantized: compared by decibels, on pictures'
    return report
