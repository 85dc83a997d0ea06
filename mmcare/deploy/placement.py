"""Where the operators of a Core ML model are expected to run: the whole report."""

import json
import os
import platform
from pathlib import Path
from typing import Any

from mmcare.analysis.plots import check_matplotlib
from mmcare.deploy.placement_picture import draw_placement
from mmcare.deploy.placement_plan import (
    COMPUTE_UNITS,
    NEEDS_MAC,
    Plan,
    format_plan,
    load_plan,
    make_plan,
)
from mmcare.deploy.placement_program import Program, load_program
from mmcare.deploy.placement_report import format_report, make_report
from mmcare.deploy.placement_rules import judge
from mmcare.output import check_writable, moved_into_place


def report_placement(
    model: str | os.PathLike,
    out_dir: str | os.PathLike,
    recorded_plan: str | os.PathLike | None = None,
    compute_units: str = 'ALL',
) -> tuple[dict[str, Any], str]:
    """Check a model against what is known of the neural engine; on macOS, ask Core ML, too.

    Writes ``NAME_placement.json``, ``.txt`` and ``.png``, and ``NAME_plan.json`` if Core ML was
    asked, replacing older ones.

    Args:
        model: An ``.mlpackage`` with an ML Program.
        out_dir: Where the files go.
        recorded_plan: A ``NAME_plan.json`` from a Mac, to be used instead of asking.
        compute_units: What Core ML may use, one of ``COMPUTE_UNITS``.

    Returns:
        The report and its text.

    Raises:
        ValueError: If the model is no ML Program that can be read, or the recorded plan is of
            another model.
        ImportError: If a package is missing; the message says what installs it.
        OSError: If a file does not exist, or ``out_dir`` cannot be written.
    """
    model, out_dir = Path(model), Path(out_dir)
    if compute_units not in COMPUTE_UNITS:
        raise ValueError(f'compute units must be of {COMPUTE_UNITS}, got {compute_units!r}')
    check_writable(out_dir)
    check_matplotlib()
    program = load_program(model)
    if recorded_plan is not None:
        plan: Plan | str = _matching_plan(Path(recorded_plan), program)
    elif platform.system() == 'Darwin':
        plan = _ask_coreml(model, compute_units)
    else:
        plan = NEEDS_MAC
    verdicts = judge(program)
    report = make_report(program, verdicts, plan)
    text = format_report(program, verdicts, plan)
    stem = out_dir / model.stem
    contents = {'placement.json': json.dumps(report, indent=1), 'placement.txt': text}
    if recorded_plan is None and isinstance(plan, Plan):
        contents['plan.json'] = format_plan(plan)
    for ending, content in contents.items():
        with moved_into_place(stem.with_name(f'{stem.name}_{ending}')) as temporary:
            temporary.write_text(content + '\n', encoding='utf-8')
    with moved_into_place(stem.with_name(f'{stem.name}_placement.png')) as temporary:
        draw_placement(program.name, verdicts, plan, temporary)
    return report, text


def _ask_coreml(model: Path, compute_units: str) -> Plan | str:
    try:
        return make_plan(model, compute_units)
    # The rules have their say without a plan, too; older systems and models that do not compile
    # are no reason to stop.
    except (AttributeError, OSError, RuntimeError, TypeError, ValueError) as error:
        return f'Core ML gave none ({type(error).__name__}: {error})'


def _matching_plan(path: Path, program: Program) -> Plan:
    plan = load_plan(path)
    names = {operator.name for operator in program.operators}
    # Half, since Core ML may rename and merge some; images arrive under one name in many models.
    if 2 * sum(one.name in names for one in plan.operators) < len(plan.operators):
        raise ValueError(f'{path} is the compute plan of another model than {program.name}')
    return plan
