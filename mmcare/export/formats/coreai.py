"""Core AI, in beta: converted, but not run, since that needs an Apple system."""

from collections import Counter
from pathlib import Path
from typing import Any

from mmcare.export.formats.base import Format, Job
from mmcare.export.program import COREAI


class CoreAI(Format):
    """``.aimodel``, in float32."""

    name = 'coreai'
    ending = '.aimodel'
    packages = ('coreai_torch',)
    extra = 'coreai'

    def write(self, job: Job, path: Path) -> dict[str, Any]:
        """Write a Core AI model; report operators by type, and that it was not run."""
        from coreai_torch import TorchConverter, get_decomp_table

        program = job.program.run_decompositions({**get_decomp_table(), **COREAI})
        operators = Counter(
            str(node.target) for node in program.graph.nodes if str(node.target).startswith('aten.')
        )
        converter = TorchConverter().add_exported_program(
            program, input_names=['image'], output_names=job.names
        )
        converter.to_coreai().save_asset(path)
        return dict(
            operators=dict(operators.most_common()),
            deviations='converted, but not run: that needs an Apple system with Core AI',
        )
