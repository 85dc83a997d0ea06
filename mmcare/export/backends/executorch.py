"""ExecuTorch for XNNPACK."""

import json
import warnings
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.export import ExportedProgram

from mmcare.export import rewrites
from mmcare.export.backends.base import Backend, Inputs, WriteResult, count_convolutions
from mmcare.export.backends.mil import open_package, refuse_options
from mmcare.export.check import FLOAT16
from mmcare.export.graph import Graph
from mmcare.export.tasks import OutputFormat
from mmcare.export.tasks.base import Description, Options
from mmcare_runtime import Model
from mmcare_runtime.engines.executorch import check_header, read_description


class ExecuTorch(Backend):
    """``.pte``, whose outputs have no names."""

    name = 'executorch'
    suffix = '.pte'
    packages = ('executorch',)
    precisions: ClassVar = {**Backend.precisions, 'float16': FLOAT16, 'int8': None}
    runtime = 'ExecuTorch'
    separate_convolutions = True
    options: ClassVar = {
        'delegate': dict(
            choices=('xnnpack', 'coreml'),
            help='what computes .pte files; coreml: for iPhones, in float16; default: xnnpack',
        ),
    }

    def choose_precision(self, precision: str | None, options: Options) -> str:
        """Return float16 for Core ML, and only for Core ML."""
        if options.get('delegate') == 'coreml':
            if precision not in (None, 'float16'):
                raise ValueError("delegate='coreml' is for precision='float16'")
            return 'float16'
        if precision == 'float16':
            raise ValueError("precision='float16' of executorch is for delegate='coreml'")
        return super().choose_precision(precision, options)

    def choose_output_format(self, options: Options) -> OutputFormat:
        """Leave the NMS of one-stage detectors to the app if Core ML runs the network."""
        if options.get('delegate') == 'coreml':
            return OutputFormat(nms='outside', label_map=torch.int32)
        return self.output_format

    def settings(self, options: Options) -> dict[str, str]:
        """Name the delegate if it is Core ML."""
        return dict(delegate='coreml') if options.get('delegate') == 'coreml' else {}

    def fixes_precision(self, options: Options) -> bool:
        """Return whether Core ML computes the file."""
        return options.get('delegate') == 'coreml'

    def write(
        self, graph: Graph, path: Path, description: Description, options: Options, images: Inputs
    ) -> WriteResult:
        """Write a ``.pte`` file.

        Operators that the delegate lacks run in slower kernels, and split the program into several
        delegates. The report counts both.
        """
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.devtools.backend_debug import get_delegation_info
        from executorch.exir import to_edge_transform_and_lower

        int8 = description['precision'] == 'int8'
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')  # ExecuTorch warns about its own code
            if 'delegate' in description:
                program, partitioner = graph.program, partition_coreml()
            else:
                program, partitioner = decompose(graph.program), XnnpackPartitioner()
            if int8:
                program = quantize(program, images)
            edge: Any = to_edge_transform_and_lower(
                program,
                partitioner=[partitioner],
                constant_methods=dict(mmcare=json.dumps(description)),
            )
        info = get_delegation_info(edge.exported_program().graph_module)
        counts = info.delegation_by_operator
        counts.pop('getitem', None)  # takes an output of a delegate
        outside = {name: n.non_delegated for name, n in counts.items() if n.non_delegated}
        edge.to_executorch().save(str(path))
        facts = dict(delegates=info.num_delegated_subgraphs, non_delegated_ops=outside)
        facts['convolutions'] = count_convolutions(program, graph.info.stages)
        return WriteResult(facts, program.module() if int8 else None, 'PyTorch')

    def open(self, path: Path, **options: Any) -> Model:
        """Open a file in ExecuTorch, or a file for Core ML in the interpreter of ML Programs."""
        if not is_for_coreml(path):
            return super().open(path, **options)
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


def is_for_coreml(path: Path) -> bool:
    """Return whether a file has a part for Core ML; the runtime reports damaged files."""
    try:
        check_header(path)
    except (OSError, ValueError):
        return False
    plan = deserialize(path).execution_plan[0]
    return any(delegate.id == 'CoreMLBackend' for delegate in plan.delegates)


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


def decompose(program: ExportedProgram) -> ExportedProgram:
    """Rewrite a program in operators that XNNPACK has; slices of weights become weights."""
    from executorch.exir.passes.constant_prop_pass import constant_prop_pass

    # Copy, since the pass deletes unused constants even from the original program.
    return constant_prop_pass(deepcopy(program).run_decompositions(dict(rewrites.EXECUTORCH)))


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
