"""Export to Core AI, in beta: converted, but not run, since that needs an Apple system."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.export import ExportedProgram

from mmcare.export.program import COREAI
from mmcare.files import moved_into_place


def write_coreai(program: ExportedProgram, names: Sequence[str], path: Path) -> dict[str, Any]:
    """Write a Core AI model in float32.

    Args:
        program: Of :func:`mmcare.export.program.export_program`.
        names: Of its outputs.
        path: ``.aimodel`` to write, replaced if it exists.

    Returns:
        Entries of the report: operators by type, and that it was not run.
    """
    from coreai_torch import TorchConverter, get_decomp_table

    program = program.run_decompositions({**get_decomp_table(), **COREAI})
    operators = Counter(
        str(node.target) for node in program.graph.nodes if str(node.target).startswith('aten.')
    )
    converter = TorchConverter().add_exported_program(
        program, input_names=['image'], output_names=names
    )
    with moved_into_place(path) as temporary:
        converter.to_coreai().save_asset(temporary)
    return dict(
        operators=dict(operators.most_common()),
        deviations='converted, but not run: that needs an Apple system with Core AI',
    )
