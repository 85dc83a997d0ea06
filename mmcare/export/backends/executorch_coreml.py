"""ExecuTorch, with Core ML's delegate, for iPhones."""

import json
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import torch

from mmcare.export.backends.base import Backend, Inputs, WriteResult, count_convolutions
from mmcare.export.backends.executorch import lower
from mmcare.export.backends.mil import open_package, refuse_options
from mmcare.export.check import FLOAT16
from mmcare.export.graph import Graph
from mmcare.export.tasks import OutputFormat
from mmcare.export.tasks.base import Description, Options
from mmcare_runtime import Model
from mmcare_runtime.engines.executorch import check_header, read_description


class ExecuTorchCoreML(Backend):
    """``.pte``, whose outputs have no names; Core ML computes it in float16."""

    name = 'executorch-coreml'
    format = 'executorch'
    suffix = '.pte'
    packages = ('executorch',)
    precisions: ClassVar = {'float16': FLOAT16}
    unnamed_precision = 'float32'  # as in names of other .pte files
    runtime = 'ExecuTorch'
    separate_convolutions = True
    # The NMS of one-stage detectors is left to the app.
    output_format = OutputFormat(nms='outside', label_map=torch.int32)
    fixes_precision = True

    def settings(self, options: Options) -> dict[str, str]:
        """Name the delegate."""
        return dict(delegate='coreml')

    def write(
        self, graph: Graph, path: Path, description: Description, options: Options, images: Inputs
    ) -> WriteResult:
        """Write a ``.pte`` file; the report counts operators outside of the delegate."""
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')  # ExecuTorch warns about its own code
            facts = lower(graph.program, partition_coreml(), path, description)
        facts['convolutions'] = count_convolutions(graph.program, graph.info.stages)
        return WriteResult(facts)

    def reads(self, path: Path) -> bool:
        """Return whether a file has a part for Core ML; the runtime reports damaged files."""
        if not super().reads(path):
            return False
        try:
            check_header(path)
        except (OSError, ValueError):
            return False
        plan = deserialize(path).execution_plan[0]
        return any(delegate.id == 'CoreMLBackend' for delegate in plan.delegates)

    def open(self, path: Path, **options: Any) -> Model:
        """Open a file in the interpreter of ML Programs."""
        refuse_options(path, options)
        return open_coreml(path)


def partition_coreml() -> Any:
    """Return the partitioner that gives Core ML its part of a program, in float16."""
    import coremltools as ct
    from executorch.backends.apple.coreml.compiler import CoreMLBackend
    from executorch.backends.apple.coreml.partition import CoreMLPartitioner

    specs = CoreMLBackend.generate_compile_specs(
        compute_precision=ct.precision.FLOAT16, minimum_deployment_target=ct.target.iOS16
    )
    return CoreMLPartitioner(compile_specs=specs)


def deserialize(path: Path) -> Any:
    """Read the program in a file."""
    from executorch.exir._serialize._program import deserialize_pte_binary

    return deserialize_pte_binary(path.read_bytes()).program


def open_coreml(path: Path) -> Model:
    """Open the ML Program in a file that Core ML would run as a whole."""
    from executorch.backends.apple.coreml import executorchcoreml
    from executorch.runtime import Runtime

    description = read_description(Runtime.get().load_program(str(path)), path)
    program = deserialize(path)
    plan = program.execution_plan[0]
    if len(plan.delegates) != 1 or plan.delegates[0].id != 'CoreMLBackend':
        raise ValueError('Core ML takes only parts of it')
    data = program.backend_delegate_data[plan.delegates[0].processed.index].data
    with TemporaryDirectory() as folder:
        executorchcoreml.unflatten_directory_contents(bytes(data), folder)
        (package,) = Path(folder).rglob('*.mlpackage')
        (metadata,) = Path(folder).rglob('metadata.json')
        names = json.loads(metadata.read_text())['outputNames']
        (call,) = plan.chains[0].instructions  # its arguments are inputs, then outputs
        values = dict(zip(call.instr_args.args[len(plan.inputs) :], names, strict=True))
        names = [values[output] for output in plan.outputs]
        return open_package(package, names, description)
