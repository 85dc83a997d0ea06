"""Rules about what the neural engine runs, each with its source.

They are what Apple's documents say, and what others have found by experiment; the engine's own
limits are not published. A rule that is kept is no promise: Core ML decides when it loads a model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from mmcare.deploy.placement_operators import CONTROL_FLOW, NEWER, SUPPORTED, UNSUPPORTED
from mmcare.deploy.placement_program import Operator, Program

NEURAL_ENGINE = 'neural engine'
ELSEWHERE = 'GPU or CPU'
UNCERTAIN = 'uncertain'
CONVERSION = 'conversion'
DEVICES = (NEURAL_ENGINE, ELSEWHERE, UNCERTAIN, CONVERSION)

SOURCES = {
    'Typed Execution': 'https://apple.github.io/coremltools/docs-guides/source/typed-execution.html',
    'Core ML Tools FAQs': 'https://apple.github.io/coremltools/docs-guides/source/faqs.html',
    'Apple, thread 724930': 'https://developer.apple.com/forums/thread/724930',
    'Deploying Transformers on the Apple Neural Engine': (
        'https://machinelearning.apple.com/research/neural-engine-transformers'
    ),
    'coremltools 1103': 'https://github.com/apple/coremltools/issues/1103',
    'coremltools 1723': 'https://github.com/apple/coremltools/issues/1723',
    'coremltools 1909': 'https://github.com/apple/coremltools/issues/1909',
    'coremltools 2370': 'https://github.com/apple/coremltools/issues/2370',
    'rf-detr 1495': 'https://github.com/roboflow/rf-detr/pull/1495',
    'hollance/neural-engine': (
        'https://github.com/hollance/neural-engine/blob/master/docs/unsupported-layers.md'
    ),
    'ANE Guide 17': (
        'https://ane-guide.readthedocs.io/en/latest/part-5-practice/17-model-design-rules.html'
    ),
    'ANE Guide A': (
        'https://ane-guide.readthedocs.io/en/latest/appendices/a-op-device-matrix.html'
    ),
}

LARGEST_RANK = 5
LARGEST_AXIS = 16384
LARGEST_KERNEL = (29, 13)  # height and width, in float16
LARGEST_DILATION = 8
STRIDE_FACTORS = (1, 2, 3, 4, 8)
LARGEST_WINDOW, LARGEST_POOLING_STRIDE, LARGEST_UPSAMPLING = 13, 2, 2
OTHER_TYPES = ('float16', 'bool', 'int8', 'uint8')  # float32 has a rule of its own
ROW_BYTES, HALF_BYTES = 64, 2


@dataclass(frozen=True)
class Rule:
    """A rule.

    Attributes:
        name: Short.
        text: What the engine asks for.
        device: Where an operator that breaks the rule is expected.
        by: Who says so: ``'Apple'``, ``'community'``, or both, where they disagree.
        sources: Keys of :data:`SOURCES`.
        check: Says what is wrong with an operator, or nothing.
    """

    name: str
    text: str
    device: str
    by: str
    sources: tuple[str, ...]
    check: Callable[[Operator, Program], str]


@dataclass(frozen=True)
class Verdict:
    """What is expected of an operator.

    Attributes:
        operator: Which.
        device: One of :data:`DEVICES`.
        findings: Names of the rules it breaks, with what is wrong.
        padding: How many times its outputs grow by the padding of rows, as a whole.
    """

    operator: Operator
    device: str
    findings: tuple[tuple[str, str], ...]
    padding: float


def judge(program: Program) -> list[Verdict]:
    """Apply all rules to all operators."""
    return [_judge(operator, program) for operator in program.operators]


def padding(operator: Operator) -> float:
    """Size of the outputs with rows padded to 64 bytes, as a multiple of their size.

    The last axis is not packed but aligned to 64 bytes; one of size 1 takes 32 times the memory in
    float16 (Deploying Transformers on the Apple Neural Engine, first principle). That costs time,
    but moves no operator elsewhere.
    """
    rows = [one.shape[-1] for one in operator.outputs if one.dtype == 'float16' and one.shape]
    known = [row for row in rows if row is not None and row >= 1]
    if not rows or len(known) < len(rows):
        return 1.0
    row = min(known)
    return -(-row * HALF_BYTES // ROW_BYTES) * ROW_BYTES / (row * HALF_BYTES)


def _judge(operator: Operator, program: Program) -> Verdict:
    broken = [(rule, rule.check(operator, program)) for rule in RULES]
    broken = [(rule, text) for rule, text in broken if text]
    devices = {rule.device for rule, _ in broken}
    if ELSEWHERE in devices:
        device = ELSEWHERE
    elif UNCERTAIN in devices:
        device = UNCERTAIN
    else:
        device = CONVERSION if operator.converts else NEURAL_ENGINE
    findings = tuple((rule.name, text) for rule, text in broken)
    return Verdict(operator, device, findings, padding(operator))


# ------------------------------------------------------------------------------------- checks


def _float32(operator: Operator, program: Program) -> str:
    if operator.converts:
        return ''
    types = {one.dtype for one in (*operator.inputs, *operator.outputs)}
    return ', '.join(sorted(types & {'float32', 'float64', 'bfloat16'}))


def _other_types(operator: Operator, program: Program) -> str:
    types = {one.dtype for one in (*operator.inputs, *operator.outputs)}
    return ', '.join(sorted(types - {*OTHER_TYPES, 'float32', 'float64', 'bfloat16'}))


def _rank(operator: Operator, program: Program) -> str:
    largest = max((len(one.shape) for one in (*operator.inputs, *operator.outputs)), default=0)
    return f'rank {largest}' if largest > LARGEST_RANK else ''


def _axis(operator: Operator, program: Program) -> str:
    sizes = [size or 0 for one in (*operator.inputs, *operator.outputs) for size in one.shape]
    largest = max(sizes, default=0)
    return f'an axis of {largest}' if largest > LARGEST_AXIS else ''


def _free_axes(operator: Operator) -> bool:
    return any(None in one.shape for one in (*operator.inputs, *operator.outputs))


def _range(operator: Operator, program: Program) -> str:
    # Sizes that are free although no input is: they depend on data.
    enumerated = set(program.flexible.values()) == {'enumerated'}
    return 'size free' if _free_axes(operator) and not enumerated else ''


def _enumerated(operator: Operator, program: Program) -> str:
    enumerated = set(program.flexible.values()) == {'enumerated'}
    return 'one of several sizes' if _free_axes(operator) and enumerated else ''


def _type(operator: Operator, program: Program) -> str:
    if operator.nested in CONTROL_FLOW:
        return f'{operator.type} within {operator.nested}'
    return operator.type if operator.type in UNSUPPORTED else ''


def _newer_type(operator: Operator, program: Program) -> str:
    chip = NEWER.get(operator.type)
    return f'{operator.type}: from {chip} on' if chip else ''


def _unknown_type(operator: Operator, program: Program) -> str:
    return '' if operator.type in SUPPORTED | UNSUPPORTED | NEWER.keys() else operator.type


def _kernel(operator: Operator, program: Program) -> str:
    weight = operator.weights.get('weight', ())
    if operator.type not in ('conv', 'conv_transpose') or len(weight) < 3:
        return ''
    # (C_out, C_in, H, W), or (C_out, C_in, W) for a row.
    height, width = weight[-2:] if len(weight) > 3 else (1, weight[-1])
    too_large = (height or 0) > LARGEST_KERNEL[0] or (width or 0) > LARGEST_KERNEL[1]
    return f'kernel {height}x{width}' if too_large else ''


def _dilation(operator: Operator, program: Program) -> str:
    largest = max(operator.values.get('dilations', ()), default=1)
    return f'dilation {largest}' if largest > LARGEST_DILATION else ''


def _some_dilation(operator: Operator, program: Program) -> str:
    largest = max(operator.values.get('dilations', ()), default=1)
    return f'dilation {largest}' if 1 < largest <= LARGEST_DILATION else ''


def _stride(operator: Operator, program: Program) -> str:
    if operator.type not in ('conv', 'conv_transpose'):
        return ''
    allowed = {a * b for a, b in product(STRIDE_FACTORS, repeat=2)}
    others = [step for step in operator.values.get('strides', ()) if step not in allowed]
    return f'stride {others[0]}' if others else ''


def _pooling(operator: Operator, program: Program) -> str:
    if not operator.type.endswith('_pool'):
        return ''
    window = max(operator.values.get('kernel_sizes', ()), default=1)
    stride = max(operator.values.get('strides', ()), default=1)
    large = window > LARGEST_WINDOW or stride > LARGEST_POOLING_STRIDE
    return f'window {window}, stride {stride}' if large else ''


def _upsampling(operator: Operator, program: Program) -> str:
    if not operator.type.startswith('upsample'):
        return ''
    factors = [
        factor
        for name in ('scale_factor_height', 'scale_factor_width')
        for factor in operator.values.get(name, ())
    ]
    largest = max(factors, default=1)
    return f'by {largest:g}' if largest > LARGEST_UPSAMPLING else ''


RULES = (
    Rule(
        'float32',
        'float32 bars the engine, for a model or for single operators (conversion of the inputs '
        'and outputs aside)',
        ELSEWHERE,
        'Apple',
        ('Typed Execution',),
        _float32,
    ),
    Rule(
        'data type',
        'the engine computes in float16; besides, bool and 8 bits pass',
        ELSEWHERE,
        'community',
        ('ANE Guide 17',),
        _other_types,
    ),
    Rule(
        'rank',
        f'tensors have a rank of at most {LARGEST_RANK}, on any device',
        ELSEWHERE,
        'Apple',
        ('coremltools 1723', 'ANE Guide 17'),
        _rank,
    ),
    Rule(
        'axis',
        f'an axis has at most {LARGEST_AXIS} elements (channels may have 65536, and other axes '
        'from A16 on)',
        ELSEWHERE,
        'community',
        ('ANE Guide 17', 'ANE Guide A'),
        _axis,
    ),
    Rule(
        'free size',
        'sizes are fixed; of a range of sizes the default alone runs on the engine',
        ELSEWHERE,
        'Apple',
        ('Apple, thread 724930',),
        _range,
    ),
    Rule(
        'enumerated size',
        'every size of a list should run on the engine, says Apple; users measured that all but '
        'the default do not, or that single operators do not',
        UNCERTAIN,
        'Apple, community',
        ('Core ML Tools FAQs', 'Apple, thread 724930', 'coremltools 1909', 'coremltools 2370'),
        _enumerated,
    ),
    Rule(
        'operator',
        'indexing, control flow, recurrent cells, lists, shapes that depend on data and custom '
        'layers are left to other devices',
        ELSEWHERE,
        'community',
        ('ANE Guide A', 'hollance/neural-engine', 'coremltools 1103', 'rf-detr 1495'),
        _type,
    ),
    Rule(
        'newer operator',
        'resizing, sorting and sine need a newer engine (A14, A15)',
        UNCERTAIN,
        'community',
        ('ANE Guide A',),
        _newer_type,
    ),
    Rule(
        'unknown operator',
        'nothing is known about operators that the lists do not have',
        UNCERTAIN,
        'community',
        ('ANE Guide A',),
        _unknown_type,
    ),
    Rule(
        'kernel',
        f'kernels of convolutions are at most {LARGEST_KERNEL[0]} high and {LARGEST_KERNEL[1]} '
        'wide, in float16',
        ELSEWHERE,
        'community',
        ('ANE Guide 17',),
        _kernel,
    ),
    Rule(
        'large dilation',
        f'dilations are at most {LARGEST_DILATION}',
        ELSEWHERE,
        'community',
        ('ANE Guide 17', 'hollance/neural-engine'),
        _dilation,
    ),
    Rule(
        'dilation',
        'the sources disagree about dilated convolutions',
        UNCERTAIN,
        'community',
        ('ANE Guide 17', 'hollance/neural-engine'),
        _some_dilation,
    ),
    Rule(
        'stride',
        'strides of convolutions are products of at most two of 2, 3, 4 and 8; others are taken '
        'apart',
        UNCERTAIN,
        'community',
        ('ANE Guide 17', 'ANE Guide A'),
        _stride,
    ),
    Rule(
        'pooling',
        f'windows above {LARGEST_WINDOW} or strides above {LARGEST_POOLING_STRIDE} were seen '
        'elsewhere; a newer source has none of it',
        UNCERTAIN,
        'community',
        ('hollance/neural-engine', 'ANE Guide 17'),
        _pooling,
    ),
    Rule(
        'upsampling',
        f'factors above {LARGEST_UPSAMPLING} were seen elsewhere',
        UNCERTAIN,
        'community',
        ('hollance/neural-engine',),
        _upsampling,
    ),
)
