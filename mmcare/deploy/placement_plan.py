"""Core ML's own plan: the device and the estimated cost of each operator, read on macOS.

It follows the documented classes of coremltools (coremltools.models.compute_plan); no Mac was at
hand, so it has been tested with objects of these classes only (:data:`NEVER_RUN`).
"""

import json
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

NEVER_RUN = 'reading of compute plans: never run on a Mac yet'
NEEDS_MAC = 'not read: that needs macOS 14.4 or later'
FORMAT = 'mmcare compute plan 1'
COMPUTE_UNITS = ('ALL', 'CPU_AND_NE')
DEVICES = NEURAL_ENGINE, GPU, CPU, NOT_TOLD = 'neural engine', 'GPU', 'CPU', 'not told'


@dataclass(frozen=True)
class PlannedOperator:
    """What Core ML plans for an operator.

    Attributes:
        name: Of its first output.
        type: Without the version of the opset.
        device: The one of :data:`DEVICES` that it prefers, or ``'not told'``.
        supported: Those that could run it.
        cost: Estimated share of the time of the whole model, or None.
    """

    name: str
    type: str
    device: str
    supported: tuple[str, ...]
    cost: float | None


@dataclass(frozen=True)
class Plan:
    """A compute plan.

    Attributes:
        compute_units: What Core ML was allowed to use, one of :data:`COMPUTE_UNITS`.
        system: On which it was made.
        operators: In the order of the program, constants left out.
    """

    compute_units: str
    system: str
    operators: tuple[PlannedOperator, ...]


def make_plan(path: Path, compute_units: str = 'ALL') -> Plan:
    """Let Core ML plan a model; on macOS only.

    Args:
        path: An ``.mlpackage``.
        compute_units: One of :data:`COMPUTE_UNITS`.
    """
    import coremltools as ct
    from coremltools.models.compute_plan import MLComputePlan
    from coremltools.models.utils import compile_model

    with TemporaryDirectory() as directory:
        compiled = compile_model(str(path), str(Path(directory, f'{path.stem}.mlmodelc')))
        plan = MLComputePlan.load_from_path(compiled, ct.ComputeUnit[compute_units])
        return Plan(compute_units, platform.platform(), tuple(read_plan(plan)))


def read_plan(plan: Any) -> Iterator[PlannedOperator]:
    """Read a ``coremltools.models.compute_plan.MLComputePlan``.

    Raises:
        ValueError: If it is of something else than an ML Program.
    """
    program = plan.model_structure.program
    if program is None:
        raise ValueError('the compute plan is not of an ML Program')
    for function in program.functions.values():
        yield from _read_block(plan, function.block)


def _read_block(plan: Any, block: Any) -> Iterator[PlannedOperator]:
    for operation in block.operations:
        kind = operation.operator_name.split('.')[-1]
        if kind == 'const' or kind.startswith('constexpr'):
            continue
        usage = plan.get_compute_device_usage_for_mlprogram_operation(operation)
        cost = plan.get_estimated_cost_for_mlprogram_operation(operation)
        yield PlannedOperator(
            name=operation.outputs[0].name if operation.outputs else kind,
            type=kind,
            device=_device(usage.preferred_compute_device) if usage else NOT_TOLD,
            supported=tuple(map(_device, usage.supported_compute_devices)) if usage else (),
            cost=cost.weight if cost else None,
        )
        for inner in operation.blocks:
            yield from _read_block(plan, inner)


def _device(device: Any) -> str:
    from coremltools.models import compute_device

    for kind, name in (
        (compute_device.MLNeuralEngineComputeDevice, NEURAL_ENGINE),
        (compute_device.MLGPUComputeDevice, GPU),
        (compute_device.MLCPUComputeDevice, CPU),
    ):
        if isinstance(device, kind):
            return name
    return NOT_TOLD


def format_plan(plan: Plan) -> str:
    """Write a plan as JSON, for :func:`load_plan`."""
    return json.dumps(dict(format=FORMAT, **asdict(plan)), indent=1)


def load_plan(path: Path) -> Plan:
    """Read a recorded plan.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it is not a plan in the format of :func:`format_plan`; with the entry.
    """
    problem = f'{path} is not a compute plan that tools/placement_report.py has written on macOS'
    try:
        content = json.loads(path.read_text(encoding='utf-8'))
    except ValueError as error:
        raise ValueError(problem) from error
    if not isinstance(content, dict) or content.get('format') != FORMAT:
        raise ValueError(f'{problem}: it has no "format": "{FORMAT}"')
    units, system, entries = map(content.get, ('compute_units', 'system', 'operators'))
    if units not in COMPUTE_UNITS or not isinstance(system, str):
        raise ValueError(
            f'{problem}: "compute_units" must be one of {COMPUTE_UNITS} and "system" text, got '
            f'{units!r} and {system!r}'
        )
    if not isinstance(entries, list) or not entries:
        raise ValueError(f'{problem}: "operators" must list at least one, got {entries!r}')
    operators = tuple(
        _read_entry(entry, f'{problem}: operators[{index}]') for index, entry in enumerate(entries)
    )
    return Plan(units, system, operators)


def _read_entry(entry: Any, where: str) -> PlannedOperator:
    names = [field.name for field in fields(PlannedOperator)]
    if not isinstance(entry, dict) or set(entry) != set(names):
        raise ValueError(f'{where} must have exactly the keys {names}, got {entry!r}')
    supported, cost = entry['supported'], entry['cost']
    is_share = isinstance(cost, int | float) and not isinstance(cost, bool) and 0 <= cost <= 1
    for name, fits, allowed in (
        ('name', isinstance(entry['name'], str), 'text'),
        ('type', isinstance(entry['type'], str), 'text'),
        ('device', entry['device'] in DEVICES, f'one of {DEVICES}'),
        (
            'supported',
            isinstance(supported, list) and all(device in DEVICES for device in supported),
            f'a list of {DEVICES}',
        ),
        ('cost', cost is None or is_share, 'a number from 0 to 1, or null'),
    ):
        if not fits:
            raise ValueError(f'{where}: "{name}" must be {allowed}, got {entry[name]!r}')
    return PlannedOperator(**{**entry, 'supported': tuple(supported)})
