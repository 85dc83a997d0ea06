"""Predict which operators of a Core ML model run on the neural engine, and why others do not.

Apple does not publish what the engine can do. ``RULES`` holds Apple's remarks and what others have
measured, mostly on Macs. A model that keeps all rules can run on the engine; whether it does, Core
ML decides when it loads the model. Nothing is run here.
"""

import json
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise, product
from numbers import Integral
from pathlib import Path
from typing import Any

from mmcare.compatibility import require
from mmcare.files import check_writable, moved_into_place
from mmcare.version import __version__

NEURAL_ENGINE, ELSEWHERE, UNCERTAIN = 'neural engine', 'GPU or CPU', 'uncertain'
CONVERSION = 'conversion'  # of the image from float32, for example: once, and on any device
DEVICES = (NEURAL_ENGINE, ELSEWHERE, UNCERTAIN, CONVERSION)
MOST_LINES = 12  # of operators below a rule in the text; the JSON has all
FLOATS = {'float16', 'float32'}

GUIDES = 'https://apple.github.io/coremltools/docs-guides/source'
ISSUES = 'https://github.com/apple/coremltools/issues'
ANE_GUIDE = 'https://ane-guide.readthedocs.io/en/latest'
HOLLANCE = 'https://github.com/hollance/neural-engine/blob/master/docs/unsupported-layers.md'
SOURCES = {  # pages of Apple and remarks of its engineers; what others found by experiment
    'Typed Execution': ('Apple', f'{GUIDES}/typed-execution.html'),
    'Core ML Tools FAQs': ('Apple', f'{GUIDES}/faqs.html'),
    'Apple, thread 724930': ('Apple', 'https://developer.apple.com/forums/thread/724930'),
    'coremltools 1723': ('Apple', f'{ISSUES}/1723'),
    'coremltools 1103': ('community', f'{ISSUES}/1103'),
    'coremltools 1909': ('community', f'{ISSUES}/1909'),
    'coremltools 2370': ('community', f'{ISSUES}/2370'),
    'rf-detr 1495': ('community', 'https://github.com/roboflow/rf-detr/pull/1495'),
    'hollance': ('community', HOLLANCE),
    'ANE Guide 17': ('community', f'{ANE_GUIDE}/part-5-practice/17-model-design-rules.html'),
    'ANE Guide A': ('community', f'{ANE_GUIDE}/appendices/a-op-device-matrix.html'),
}

# Name: (where an operator that breaks the rule is expected, keys of SOURCES, the requirement).
RULES = {
    'float32': (ELSEWHERE, 'Typed Execution', 'float16; inputs and outputs may be converted'),
    'data type': (ELSEWHERE, 'ANE Guide 17', 'float16, bool or integers of 8 bits'),
    'rank': (ELSEWHERE, 'coremltools 1723; ANE Guide 17', 'at most 5, on any device'),
    'axis': (
        ELSEWHERE,
        'ANE Guide 17; ANE Guide A',
        'at most 16384 elements (channels 65536, and other axes from A16 on)',
    ),
    'free size': (
        ELSEWHERE,
        'Apple, thread 724930',
        'sizes are fixed; of a range of sizes only the default runs on the engine',
    ),
    'enumerated size': (
        UNCERTAIN,
        'Core ML Tools FAQs; Apple, thread 724930; coremltools 1909; coremltools 2370',
        'every size of a list should run on the engine, says Apple; users measured that all but '
        'the default do not, or that single operators do not',
    ),
    'operator': (
        ELSEWHERE,
        'ANE Guide A; hollance; coremltools 1103; rf-detr 1495',
        'no indexing, control flow, recurrent cells, lists, or shapes that depend on data',
    ),
    'newer operator': (UNCERTAIN, 'ANE Guide A', 'resizing, sorting and sine need A14 or A15'),
    'unknown operator': (UNCERTAIN, 'ANE Guide A', 'the sources do not list the operator'),
    'kernel': (ELSEWHERE, 'ANE Guide 17', 'at most 29 high and 13 wide, in float16'),
    'large dilation': (ELSEWHERE, 'ANE Guide 17; hollance', 'at most 8'),
    'dilation': (UNCERTAIN, 'ANE Guide 17; hollance', 'the sources disagree above 1'),
    'stride': (
        UNCERTAIN,
        'ANE Guide 17; ANE Guide A',
        'products of at most two of 2, 3, 4 and 8; others are taken apart',
    ),
    'pooling': (
        UNCERTAIN,
        'hollance; ANE Guide 17',
        'windows above 13 or strides above 2 were seen elsewhere; a newer source has none of it',
    ),
    'upsampling': (UNCERTAIN, 'hollance', 'factors above 2 were seen elsewhere'),
}


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Types of operators, from appendix A of the ANE Guide. It lists `gather` as supported in part; here
# it leaves the engine, as in coremltools 1103 and rf-detr 1495, which also saw `topk` on the CPU.
SUPPORTED = _words("""
    avg_pool conv conv_transpose einsum l2_pool linear matmul max_pool scaled_dot_product_attention
    batch_norm instance_norm l2_norm layer_norm local_response_norm
    abs add atan ceil clamped_relu clip elu equal erf exp exp2 floor floor_div gelu greater
    greater_equal inverse leaky_relu less less_equal linear_activation log logical_not maximum
    minimum mul not_equal pow prelu real_div relu relu6 round rsqrt scaled_tanh select sigmoid
    sigmoid_hard sign silu softmax softplus softplus_parametric softsign sqrt square sub tanh
    threshold thresholded_relu
    reduce_argmax reduce_l1_norm reduce_l2_norm reduce_log_sum reduce_log_sum_exp reduce_max
    reduce_mean reduce_min reduce_sum reduce_sum_square
    batch_to_space cast concat coreml_update_state crop depth_to_space dequantize expand_dims fill
    fill_like flatten2d identity pad pixel_shuffle pixel_unshuffle quantize read_state reshape
    reshape_like reverse slice_by_index slice_by_size slice_update space_to_batch space_to_depth
    split squeeze stack tile transpose
""")
UNSUPPORTED = _words("""
    cond while_loop
    band_part gather gather_along_axis gather_nd non_zero one_hot range_1d reverse_sequence scatter
    scatter_along_axis scatter_nd shape sliding_windows topk
    acos asin atanh cosh logical_and logical_or logical_xor mod reduce_prod sinh tan
    gru list_gather list_length list_read list_scatter list_write lstm make_list rnn
    non_maximum_suppression random_bernoulli random_categorical random_normal
""")
NEWER = {
    'A14': _words(
        'affine argsort crop_resize resample resize resize_bilinear resize_nearest_neighbor '
        'upsample_bilinear upsample_nearest_neighbor'
    ),
    'A15': _words('cos random_uniform reduce_argmin sin'),
}


def load_model(path: Path) -> tuple[Any, Any]:
    """Read an ``.mlpackage``.

    Returns:
        Its program, a ``coremltools.converters.mil.Program``, and its specification.

    Raises:
        ImportError: If coremltools is missing; the message says what installs it.
        FileNotFoundError: If there is no such path.
        ValueError: If it is not an ``.mlpackage`` with an ML Program that can be read.
    """
    ct = require('coremltools', 'the placement report')
    from coremltools.converters.mil.frontend.milproto.load import load

    if not path.exists():
        raise FileNotFoundError(f'{path} does not exist')
    try:
        model = ct.models.MLModel(str(path), skip_model_load=True)
        spec = model.get_spec()
        return load(spec, spec.specificationVersion, model.weights_dir), spec
    except Exception as error:  # the many ways in which coremltools fails on a damaged file
        raise ValueError(f'{path} cannot be read as an ML Program: {error}') from error


def judge(program: Any, enumerated: bool = False) -> list[dict[str, Any]]:
    """Apply the rules to the operators of a program.

    Args:
        program: A ``coremltools.converters.mil.Program``.
        enumerated: Sizes that are not fixed come from a list and not from a range.

    Returns:
        For each operator, constants left out: ``name`` (of its first output), ``type``, ``group``
        (the first output of the model that it comes before), ``outputs`` (types and shapes),
        ``device``, ``findings`` (rules that it breaks, and what was found) and ``padding``: the
        engine aligns rows to 64 bytes, which makes its outputs so many times larger
        (https://machinelearning.apple.com/research/neural-engine-transformers).
    """
    judged = []
    for title, function in program.functions.items():
        groups = _groups(function)
        for op in _walk(function):
            findings = _broken_rules(op, enumerated)
            devices = {RULES[name][0] for name in findings}
            free = CONVERSION if _converts(op) else NEURAL_ENGINE
            judged.append(
                dict(
                    name=op.outputs[0].name if op.outputs else op.name,
                    type=op.op_type,
                    group=f'{title}: ' * (len(program.functions) > 1) + groups[op],
                    outputs=[_describe(tensor) for tensor in op.outputs],
                    device=ELSEWHERE if ELSEWHERE in devices else UNCERTAIN if devices else free,
                    findings=[dict(rule=name, found=text) for name, text in findings.items()],
                    padding=round(max(map(_padding, op.outputs), default=1), 3),
                )
            )
    return judged


def _walk(block: Any) -> Iterator[Any]:
    for op in block.operations:
        if not _is_constant(op):
            yield op
            for inner in op.blocks:
                yield from _walk(inner)


def _groups(function: Any) -> dict[Any, str]:
    """Name the output that each operator comes before, or makes."""
    ops = list(_walk(function))
    # An output that is only converted is ready where its input is made: the conversions of all
    # outputs often stand together at the end of the program.
    made = {one.name: one.op for one in function.outputs}
    ends = {name: op.x.op if op and _converts(op) else op for name, op in made.items()}
    waiting = sorted(ends, key=lambda name: ops.index(ends[name]) if ends[name] in ops else -1)
    groups = {}
    for op in ops:
        groups[op] = next((name for name in made if made[name] is op), waiting[0])
        while len(waiting) > 1 and ends[waiting[0]] is op:
            waiting.pop(0)
    return groups


def _is_constant(op: Any) -> bool:
    return op.op_type == 'const' or op.op_type.startswith('constexpr')


def _inputs(op: Any) -> list[Any]:
    given = [one if isinstance(one, list | tuple) else (one,) for one in op.inputs.values()]
    return [one for group in given for one in group if not (one.op and _is_constant(one.op))]


def _converts(op: Any) -> bool:
    """Tell whether it only turns an input or output of the model into another float type."""
    block = op.enclosing_block
    if op.op_type != 'cast' or block.outer_op or {_type(op.x), _type(op.outputs[0])} - FLOATS:
        return False
    return op.x in block.inputs.values() or op.outputs[0] in block.outputs


def _type(tensor: Any) -> str:
    from coremltools.converters.mil.mil import types

    if types.is_list(tensor.sym_type):
        return 'list'
    return types.builtin_to_string(tensor.dtype).replace('fp', 'float')


def _shape(tensor: Any) -> list[int | None]:
    """Return the shape of a tensor, with None for sizes that are settled when the model runs."""
    sizes = () if _type(tensor) == 'list' else tensor.shape
    return [int(size) if isinstance(size, Integral) else None for size in sizes]


def _describe(tensor: Any) -> str:
    return f'{_type(tensor)} ({", ".join(str(size or "?") for size in _shape(tensor))})'


def _padding(tensor: Any) -> float:
    row = (_shape(tensor) or [None])[-1]
    return -(-row // 32) * 32 / row if row and _type(tensor) == 'float16' else 1


def _broken_rules(op: Any, enumerated: bool) -> dict[str, str]:
    """Return what was found, by the name of the rule."""
    tensors = [*_inputs(op), *op.outputs]
    types, shapes = {_type(one) for one in tensors}, [_shape(one) for one in tensors]
    sizes = [size for shape in shapes for size in shape]
    rank, axis = max(map(len, shapes), default=0), max(filter(None, sizes), default=0)
    kind, outer = op.op_type, op.enclosing_block.outer_op
    is_conv, is_pool = kind in ('conv', 'conv_transpose'), kind.endswith('_pool')
    # The weight is (C_out, C_in, H, W), or without H.
    height, width = [1, *op.weight.shape[2:]][-2:] if is_conv else (1, 1)
    dilation = max(op.dilations.val) if is_conv else 1
    steps = {a * b for a, b in product((1, 2, 3, 4, 8), repeat=2)}
    strides = sorted(set(op.strides.val) - steps) if is_conv else []
    window, stride = (max(op.kernel_sizes.val), max(op.strides.val)) if is_pool else (1, 1)
    upsampling = kind.startswith('upsample')
    factor = max(op.scale_factor_height.val, op.scale_factor_width.val) if upsampling else 1
    chip = next((chip for chip, kinds in NEWER.items() if kind in kinds), '')
    findings = {
        'float32': 'float32' in types and not _converts(op) and 'float32',
        'data type': ', '.join(sorted(types - FLOATS - {'bool', 'int8', 'uint8'})),
        'rank': rank > 5 and f'rank {rank}',
        'axis': axis > 16384 and f'an axis of {axis}',
        'free size': None in sizes and not enumerated and 'size free',
        'enumerated size': None in sizes and enumerated and 'one of several sizes',
        'operator': f'{kind} within {outer.op_type}' if outer else kind in UNSUPPORTED and kind,
        'newer operator': chip and f'{kind}: from {chip} on',
        'unknown operator': not chip and kind not in SUPPORTED | UNSUPPORTED and kind,
        'kernel': (height > 29 or width > 13) and f'kernel {height}x{width}',
        'large dilation': dilation > 8 and f'dilation {dilation}',
        'dilation': 1 < dilation <= 8 and f'dilation {dilation}',
        'stride': strides and f'stride {strides[0]}',
        'pooling': (window > 13 or stride > 2) and f'window {window}, stride {stride}',
        'upsampling': factor > 2 and f'by {factor:g}',
    }
    return {name: text for name, text in findings.items() if text}


def report_placement(model: str | Path, out_dir: str | Path) -> tuple[dict[str, Any], str]:
    """Check a model against the rules and write ``NAME_placement.json`` and ``.txt``.

    Args:
        model: An ``.mlpackage`` with an ML Program.
        out_dir: Where the files go; older ones are replaced.

    Returns:
        The report and its text.

    Raises:
        ImportError, FileNotFoundError, ValueError: As by :func:`load_model`.
        OSError: If ``out_dir`` cannot be written.
    """
    model, out_dir = Path(model), Path(out_dir)
    check_writable(out_dir)
    program, spec = load_model(model)
    flexible = _flexible_inputs(spec)
    operators = judge(program, enumerated=set(flexible.values()) == {'enumerated'})
    on_engine = [one['device'] == NEURAL_ENGINE for one in operators if one['device'] != CONVERSION]
    report = dict(
        model=model.name,
        opset=', '.join(sorted({one.opset for one in spec.mlProgram.functions.values()})),
        mmcare_version=__version__,
        devices={device: sum(one['device'] == device for one in operators) for device in DEVICES},
        switches=sum(a != b for a, b in pairwise(on_engine)),
        flexible_inputs=flexible,
        all_on_neural_engine=all(on_engine) and not flexible,
        operators=operators,
        rules=[
            dict(
                name=name,
                text=text,
                expected=device,
                by=', '.join(dict.fromkeys(SOURCES[one][0] for one in sources.split('; '))),
                sources={one: SOURCES[one][1] for one in sources.split('; ')},
            )
            for name, (device, sources, text) in RULES.items()
        ],
    )
    text = format_report(report)
    for ending, content in (('json', json.dumps(report, indent=1)), ('txt', text)):
        with moved_into_place(out_dir / f'{model.stem}_placement.{ending}') as temporary:
            temporary.write_text(content + '\n', encoding='utf-8')
    return report, text


def format_report(report: dict[str, Any]) -> str:
    """Write a report of :func:`report_placement` as text."""
    operators = report['operators']
    title = f'{report["model"]}: {report["opset"]}, {len(operators)} operators besides constants'
    rows: dict[str, Counter[str]] = {}
    for one in operators:
        rows.setdefault(one['group'], Counter())[one['device']] += 1
    rows['all'] = Counter(report['devices'])
    lines = [title, '', f'{"operators up to":20}' + ''.join(f'{one:>15}' for one in DEVICES)]
    for name, counts in rows.items():
        lines.append(f'{name:20}' + ''.join(f'{counts[device]:15}' for device in DEVICES))
    lines += ['', f'changes of the device along the program: {report["switches"]}']
    for name, kind in report['flexible_inputs'].items():
        lines.append(f'input {name}: free sizes ({kind}), of which only the default surely stays')
    for rule in report['rules']:
        found = [
            f'    {one["group"]:10} {one["type"]:18} {one["name"]:40} {finding["found"]}'
            for one in operators
            for finding in one['findings']
            if finding['rule'] == rule['name']
        ]
        if found:
            lines += ['', f'{rule["name"]} ({rule["expected"]}): {rule["text"]}']
            lines += [f'  [{rule["by"]}: {"; ".join(rule["sources"])}]; {len(found)} operators']
            lines += found[:MOST_LINES]
            if len(found) > MOST_LINES:
                lines.append(f'    and {len(found) - MOST_LINES} more, see the JSON')
    wide = Counter(one['group'] for one in operators if one['padding'] >= 2)
    where = ', '.join(f'{name} {number}' for name, number in wide.items()) or 'none'
    lines += ['', f'outputs at least doubled by the padding of rows to 64 bytes: {where}']
    everything = 'everything' if report['all_on_neural_engine'] else 'NOT everything'
    return '\n'.join([*lines, '', f'expected: {everything} on the neural engine'])


def _flexible_inputs(spec: Any) -> dict[str, str]:
    """Return how the sizes of inputs may vary: ``'range'`` or ``'enumerated'`` by input."""
    flexibility = {'multiArrayType': 'ShapeFlexibility', 'imageType': 'SizeFlexibility'}
    found = {}
    for value in spec.description.input:
        kind = value.type.WhichOneof('Type')
        choice = getattr(value.type, kind).WhichOneof(flexibility[kind])
        if choice:
            found[value.name] = 'enumerated' if choice.startswith('enumerated') else 'range'
    return found
