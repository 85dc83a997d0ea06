"""The report on where the operators of an ML Program are expected, as a table and for JSON."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from mmcare.deploy import placement_plan as planned
from mmcare.deploy.placement_plan import Plan, PlannedOperator
from mmcare.deploy.placement_program import Operator, Program
from mmcare.deploy.placement_rules import (
    CONVERSION,
    DEVICES,
    NEURAL_ENGINE,
    RULES,
    SOURCES,
    Rule,
    Verdict,
)
from mmcare.version import __version__

MOST_LINES = 12
FREE_SIZES = {
    'range': 'any size of a range: all but the default leave the neural engine',
    'enumerated': 'one of several sizes: all but the default may leave the neural engine',
}


def make_report(program: Program, verdicts: Sequence[Verdict], plan: Plan | str) -> dict[str, Any]:
    """Collect everything for JSON.

    Args:
        program: What was read.
        verdicts: See :func:`mmcare.deploy.placement_rules.judge`.
        plan: Core ML's own, or why there is none.
    """
    counts = Counter(verdict.device for verdict in verdicts)
    return dict(
        model=program.name,
        opset=program.opset,
        mmcare_version=__version__,
        devices={device: counts[device] for device in DEVICES},
        switches=_count_switches(verdict.device for verdict in verdicts),
        flexible_inputs=dict(program.flexible),
        all_on_neural_engine=stays(program, verdicts, plan),
        operators=[_describe(verdict) for verdict in verdicts],
        rules=[
            dict(
                name=rule.name,
                text=rule.text,
                expected=rule.device,
                by=rule.by,
                sources={source: SOURCES[source] for source in rule.sources},
            )
            for rule in RULES
        ],
        compute_plan=plan if isinstance(plan, str) else asdict(plan),
        compute_plan_note=planned.NEVER_RUN,
    )


def stays(program: Program, verdicts: Iterable[Verdict], plan: Plan | str) -> bool:
    """Whether everything is expected on the neural engine, by the rules and by Core ML's plan."""
    by_rules = all(verdict.device in (NEURAL_ENGINE, CONVERSION) for verdict in verdicts)
    by_plan = isinstance(plan, str) or not leaving(verdicts, plan)
    return by_rules and by_plan and not program.flexible


def leaving(verdicts: Iterable[Verdict], plan: Plan) -> list[PlannedOperator]:
    """What Core ML plans for other devices, the most expensive first; no conversions."""
    conversions = {one.operator.name for one in verdicts if one.device == CONVERSION}
    found = [
        one
        for one in plan.operators
        if one.device in (planned.CPU, planned.GPU) and one.name not in conversions
    ]
    return sorted(found, key=lambda one: -(one.cost or 0))


def format_report(program: Program, verdicts: Sequence[Verdict], plan: Plan | str) -> str:
    """Write the table: operators by group, what leaves the engine, and why."""
    lines = [
        f'{program.name}: ML Program, {program.opset}, {len(verdicts)} operators besides constants',
        '',
        *_group_table(verdicts),
    ]
    lines += [
        '',
        f'changes of the device along the program: '
        f'{_count_switches(verdict.device for verdict in verdicts)}',
    ]
    lines += [f'input {name}: {FREE_SIZES[kind]}' for name, kind in program.flexible.items()]
    broken = {name for verdict in verdicts for name, _ in verdict.findings}
    for rule in RULES:
        if rule.name in broken:
            lines += ['', *_rule_lines(rule, verdicts)]
    lines += ['', *_padding_lines(verdicts), '', *_plan_lines(verdicts, plan), '']
    lines.append(
        'expected: everything on the neural engine'
        if stays(program, verdicts, plan)
        else 'expected: NOT everything on the neural engine'
    )
    return '\n'.join(lines)


def _describe(verdict: Verdict) -> dict[str, Any]:
    operator = verdict.operator
    return dict(
        name=operator.name,
        type=operator.type,
        group=operator.group,
        outputs=[_shape(operator, index) for index in range(len(operator.outputs))],
        device=verdict.device,
        findings=[dict(rule=name, found=text) for name, text in verdict.findings],
        padding=round(verdict.padding, 3),
    )


def _shape(operator: Operator, index: int = 0) -> str:
    if not operator.outputs:
        return ''
    tensor = operator.outputs[index]
    return f'{tensor.dtype} ({", ".join("?" if n is None else str(n) for n in tensor.shape)})'


def _count_switches(devices: Iterable[str]) -> int:
    """Changes between the engine and anything else; conversions at the edge do not count."""
    on_engine = [device == NEURAL_ENGINE for device in devices if device != CONVERSION]
    return sum(a != b for a, b in pairwise(on_engine))


def _group_table(verdicts: Sequence[Verdict]) -> list[str]:
    rows: dict[str, Counter[str]] = {}
    for verdict in verdicts:
        rows.setdefault(verdict.operator.group, Counter())[verdict.device] += 1
    if len(rows) > 1:
        rows['all'] = sum(rows.values(), Counter())
    width = max(map(len, [*rows, 'operators up to']))
    lines = [f'{"operators up to":{width}}' + ''.join(f'{device:>15}' for device in DEVICES)]
    for name, counts in rows.items():
        lines.append(f'{name:{width}}' + ''.join(f'{counts[device]:15}' for device in DEVICES))
    return lines


def _rule_lines(rule: Rule, verdicts: Sequence[Verdict]) -> list[str]:
    found = [
        (verdict, text)
        for verdict in verdicts
        for name, text in verdict.findings
        if name == rule.name
    ]
    lines = [
        f'{rule.name} ({rule.device}): {rule.text}',
        f'  [{rule.by}: {"; ".join(rule.sources)}]; {len(found)} operators',
    ]
    for verdict, text in found[:MOST_LINES]:
        operator = verdict.operator
        lines.append(
            f'    {operator.group:10} {operator.type:18} {operator.name:40} '
            f'{_shape(operator)}: {text}'
        )
    if len(found) > MOST_LINES:
        lines.append(f'    and {len(found) - MOST_LINES} more, see the JSON')
    return lines


def _padding_lines(verdicts: Sequence[Verdict]) -> list[str]:
    wide = [verdict for verdict in verdicts if verdict.padding >= 2]
    if not wide:
        return ['padding of rows to 64 bytes doubles the size of no output']
    worst = max(wide, key=lambda verdict: verdict.padding)
    groups = Counter(verdict.operator.group for verdict in wide)
    return [
        f'padding of rows to 64 bytes makes the outputs of {len(wide)} operators twice as large or '
        'more; it moves none',
        f'  [Apple: Deploying Transformers on the Apple Neural Engine]; most for '
        f'{worst.operator.name}, {_shape(worst.operator)}: {worst.padding:.3g} times',
        '  ' + ', '.join(f'{name} {number}' for name, number in groups.items()),
    ]


def _plan_lines(verdicts: Sequence[Verdict], plan: Plan | str) -> list[str]:
    if isinstance(plan, str):
        return [f"Core ML's own compute plan: {plan}", f'  ({planned.NEVER_RUN})']
    counts = Counter(one.device for one in plan.operators)
    lines = [
        f"Core ML's own compute plan ({plan.compute_units}, {plan.system}): "
        + ', '.join(f'{number} {device}' for device, number in counts.items()),
        f'  ({planned.NEVER_RUN})',
    ]
    others = leaving(verdicts, plan)
    for one in others[:MOST_LINES]:
        cost = 'cost not told' if one.cost is None else f'{100 * one.cost:.2f} % of the cost'
        able = 'the engine could' if planned.NEURAL_ENGINE in one.supported else 'not on the engine'
        lines.append(f'    {one.device:4} {one.type:18} {one.name:40} {cost}, {able}')
    if len(others) > MOST_LINES:
        lines.append(f'    and {len(others) - MOST_LINES} more, see the JSON')
    if not others:
        lines.append('  nothing leaves the neural engine')
    expected = {verdict.operator.name: verdict.device for verdict in verdicts}
    differing = sum(
        one.name in expected
        and expected[one.name] != CONVERSION
        and one.device != planned.NOT_TOLD
        and (one.device == planned.NEURAL_ENGINE) != (expected[one.name] == NEURAL_ENGINE)
        for one in plan.operators
    )
    lines.append(f'  it differs from the rules for {differing} operators')
    return lines
