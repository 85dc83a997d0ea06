"""The operators of an ML Program, read from the protobuf of an ``.mlpackage``; nothing is run.

The messages are those of MIL.proto and Model.proto of coremltools
(https://apple.github.io/coremltools/mlmodel/Format/MIL.html).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mmcare.deploy.requirements import require

FLOATS = ('float16', 'float32')
SHORT_CONSTANT = 16  # values: strides, axes, and the like; not weights


@dataclass(frozen=True)
class Tensor:
    """A value of the program.

    Attributes:
        name: Of the value.
        dtype: ``'float16'`` and so on; ``'list'`` or ``'dictionary'`` if it is no tensor.
        shape: None for an axis whose size is settled when the model runs.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...]


@dataclass(frozen=True)
class Operator:
    """An operator of the program.

    Attributes:
        name: Of its first output.
        type: Without the version of the opset: ``'conv'``, not ``'ios16.conv'``.
        group: The model's output on the way to which it lies, such as ``'stage2'``.
        inputs: What is computed, constants left out.
        outputs: At least one.
        weights: Shapes of constants, by parameter.
        values: Values of short constants, by parameter.
        nested: Type of the operator in whose block it stands, or ``''``.
        converts: Whether it only turns an input or output of the model from one float type into
            another.
    """

    name: str
    type: str
    group: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    weights: Mapping[str, tuple[int | None, ...]]
    values: Mapping[str, tuple]
    nested: str
    converts: bool


@dataclass(frozen=True)
class Program:
    """An ML Program.

    Attributes:
        name: Of the file.
        opset: Such as ``'CoreML6'``.
        operators: In the order of the program, constants left out.
        flexible: How sizes of an input may vary, by input: ``'range'`` or ``'enumerated'``.
    """

    name: str
    opset: str
    operators: tuple[Operator, ...]
    flexible: Mapping[str, str]


def load_program(path: Path) -> Program:
    """Read an ``.mlpackage``.

    Raises:
        ImportError: If coremltools is missing; the message says what installs it.
        FileNotFoundError: If there is no such path.
        ValueError: If it is no ``.mlpackage`` that can be read, or holds something else than an
            ML Program.
    """
    require('coremltools', 'a look into Core ML models')
    import coremltools as ct
    from google.protobuf.message import DecodeError

    wanted = 'give an .mlpackage with an ML Program, as tools/export_backbone.py writes it'
    if not path.exists():
        raise FileNotFoundError(f'{path} does not exist: {wanted}')
    if path.suffix != '.mlpackage' or not path.is_dir():
        raise ValueError(f'{path} is not an .mlpackage: {wanted}')
    try:
        spec = ct.utils.load_spec(str(path))
    except (DecodeError, OSError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()
        raise ValueError(
            f'{path} cannot be read ({reason[0] if reason else type(error).__name__}): {wanted}'
        ) from error
    return read_program(spec, path.name)


def read_program(spec: Any, name: str) -> Program:
    """Read the specification of a model.

    Args:
        spec: A ``coremltools.proto.Model_pb2.Model``.
        name: For messages and the report.

    Raises:
        ValueError: If the model is not an ML Program, or has no operators.
    """
    kind = spec.WhichOneof('Type')
    if kind != 'mlProgram':
        raise ValueError(
            f'{name} holds {f"a model of the type {kind}" if kind else "no model"}, not an ML '
            "Program: convert it with convert_to='mlprogram'"
        )
    functions = spec.mlProgram.functions
    operators, opsets = [], set()
    for title, function in functions.items():
        block = function.block_specializations[function.opset]
        scope = {value.name: _tensor(value) for value in function.inputs}
        found = list(_operators(block, scope, {}, '', frozenset(scope)))
        prefix = f'{title}: ' if len(functions) > 1 else ''
        operators += _with_groups(found, list(block.outputs), prefix)
        opsets.add(function.opset)
    if not operators:
        raise ValueError(f'{name} holds an ML Program without any operator')
    return Program(name, ', '.join(sorted(opsets)), tuple(operators), dict(_flexible_inputs(spec)))


def _tensor(value: Any) -> Tensor:
    """A NamedValueType, or a Value with an empty name."""
    from coremltools.proto import MIL_pb2

    kind = value.type
    if kind.WhichOneof('type') == 'stateType':
        kind = kind.stateType.wrappedType
    name = getattr(value, 'name', '')
    if kind.WhichOneof('type') != 'tensorType':
        return Tensor(name, (kind.WhichOneof('type') or 'unknown').removesuffix('Type'), ())
    dtype = MIL_pb2.DataType.Name(kind.tensorType.dataType).lower()
    shape = tuple(
        axis.constant.size if axis.WhichOneof('dimension') == 'constant' else None
        for axis in kind.tensorType.dimensions
    )
    return Tensor(name, dtype, shape)


def _values(value: Any) -> tuple:
    """What a short constant holds; nothing for weights, which lie in a file of their own."""
    if value.WhichOneof('value') != 'immediateValue':
        return ()
    tensor = value.immediateValue.tensor
    kind = tensor.WhichOneof('value')
    if kind is None or kind == 'bytes':
        return ()
    values = getattr(tensor, kind).values
    return tuple(values) if len(values) <= SHORT_CONSTANT else ()


def _operators(
    block: Any,
    scope: dict[str, Tensor],
    constants: dict[str, tuple],
    nested: str,
    model_inputs: frozenset[str],
) -> Iterator[Operator]:
    """Walk through a block and those within it; ``scope`` and ``constants`` grow on the way."""
    for operation in block.operations:
        kind = operation.type.split('.')[-1]
        outputs = tuple(_tensor(value) for value in operation.outputs)
        scope.update((tensor.name, tensor) for tensor in outputs)
        if kind == 'const' or kind.startswith('constexpr'):
            held = operation.attributes.get('val') if kind == 'const' else None
            constants.update((tensor.name, _values(held) if held else ()) for tensor in outputs)
            continue
        inputs, weights, values = [], {}, {}
        for parameter, argument in operation.inputs.items():
            for binding in argument.arguments:
                if binding.WhichOneof('binding') == 'value':
                    weights[parameter] = _tensor(binding.value).shape
                    values[parameter] = _values(binding.value)
                elif binding.name in constants:
                    weights[parameter] = scope[binding.name].shape
                    values[parameter] = constants[binding.name]
                elif binding.name in scope:
                    inputs.append(scope[binding.name])
        types = [tensor.dtype for tensor in (*inputs, *outputs)]
        at_the_edge = any(tensor.name in model_inputs for tensor in inputs) or any(
            tensor.name in block.outputs for tensor in outputs
        )
        yield Operator(
            name=outputs[0].name if outputs else kind,
            type=kind,
            group='',
            inputs=tuple(inputs),
            outputs=outputs,
            weights=weights,
            values=values,
            nested=nested,
            converts=kind == 'cast'
            and not nested
            and at_the_edge
            and len(types) == 2
            and all(dtype in FLOATS for dtype in types),
        )
        for inner in operation.blocks:
            names = {value.name: _tensor(value) for value in inner.inputs}
            yield from _operators(inner, scope | names, dict(constants), kind, frozenset())


def _with_groups(operators: list[Operator], outputs: list[str], prefix: str) -> list[Operator]:
    """Name the output that each operator comes before, or makes."""
    makers = {tensor.name: i for i, one in enumerate(operators) for tensor in one.outputs}
    ends = {}
    for output in outputs:
        end = makers.get(output, -1)
        # An output that is only converted is ready where what is converted is; the conversions
        # of all outputs often stand together, at the end of the program.
        if end >= 0 and operators[end].converts:
            end = makers.get(operators[end].inputs[0].name, end)
        ends[output] = end
    order = sorted(ends, key=ends.__getitem__)

    def group(index: int) -> str:
        one = operators[index]
        if one.converts and one.outputs[0].name in ends:
            return one.outputs[0].name
        return next((output for output in order if ends[output] >= index), order[-1])

    if not order:
        return operators
    return [replace(one, group=prefix + group(index)) for index, one in enumerate(operators)]


def _flexible_inputs(spec: Any) -> Iterator[tuple[str, str]]:
    for value in spec.description.input:
        kind = value.type.WhichOneof('Type')
        if kind == 'multiArrayType':
            choice = value.type.multiArrayType.WhichOneof('ShapeFlexibility')
        elif kind == 'imageType':
            choice = value.type.imageType.WhichOneof('SizeFlexibility')
        else:
            choice = None
        if choice:
            yield value.name, 'enumerated' if choice.startswith('enumerated') else 'range'
