"""ML Programs computed with PyTorch, for machines without Core ML.

Each operator is computed in float32 and its result rounded to the type that the program declares,
so that what leaves the range of float16 shows. Semantics: the documentation of MIL's operators,
https://apple.github.io/coremltools/source/coremltools.converters.mil.mil.ops.defs.html
"""

import numpy as np
import torch
import torch.nn.functional as F


def deviation(expected, found):
    """Largest difference of outputs, as a share of each one's largest magnitude."""
    pairs = list(zip(expected, found, strict=True))
    assert all(a.shape == b.shape for a, b in pairs)
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)


def run_program(program, image):
    """Outputs of ``model._mil_program`` for an image, in order, as float32."""
    function = program.functions['main']
    (name,) = function.inputs
    values = {function.inputs[name].name: image.float()}

    def value_of(variable):
        if isinstance(variable, list | tuple):
            return [value_of(each) for each in variable]
        if variable is None or variable.name in values:
            return None if variable is None else values[variable.name]
        value = variable.val
        if value is None:
            raise KeyError(variable.name)
        floating = isinstance(value, np.ndarray) and value.dtype.kind == 'f'
        return torch.from_numpy(value.astype(np.float32)) if floating else value

    for operation in function.operations:
        if operation.op_type == 'const' or operation.op_type.startswith('constexpr'):
            continue
        inputs = {key: value_of(variable) for key, variable in operation.inputs.items()}
        results = OPERATORS[operation.op_type](inputs)
        results = results if isinstance(results, list | tuple) else [results]
        for output, result in zip(operation.outputs, results, strict=True):
            assert tuple(output.shape) == tuple(result.shape), operation
            half = output.dtype.__name__ == 'fp16'
            values[output.name] = result.half().float() if half else result
    return [values[output.name] for output in function.outputs]


def _conv(i):
    x, weight, bias = i['x'], i['weight'], i['bias']
    assert i['pad_type'] in ('custom', 'valid')
    top, bottom, left, right = (0, 0, 0, 0) if i['pad_type'] == 'valid' else map(int, i['pad'])
    x = F.pad(x, (left, right, top, bottom))
    dilations = tuple(map(int, i['dilations']))
    return F.conv2d(x, weight, bias, tuple(map(int, i['strides'])), 0, dilations, int(i['groups']))


def _matmul(i):
    x = i['x'].mT if i['transpose_x'] else i['x']
    return x @ (i['y'].mT if i['transpose_y'] else i['y'])


def _split(i):
    sizes = i['split_sizes']
    axis = int(i['axis'])
    if sizes is None:
        return i['x'].chunk(int(i['num_splits']), axis)
    return i['x'].split([int(size) for size in sizes], axis)


def _gelu(i):
    assert i['mode'] == 'EXACT'
    return F.gelu(i['x'])


def _upsample_bilinear(i):
    assert not i['align_corners']
    height, width = i['x'].shape[2:]
    size = round(height * i['scale_factor_height']), round(width * i['scale_factor_width'])
    return F.interpolate(i['x'], size, mode='bilinear', align_corners=False)


def _upsample_nearest(i):
    factors = int(i['scale_factor_height']), int(i['scale_factor_width'])
    assert factors == (i['scale_factor_height'], i['scale_factor_width'])
    return i['x'].repeat_interleave(factors[0], 2).repeat_interleave(factors[1], 3)


def _reduce_mean(i):
    return i['x'].mean(tuple(map(int, i['axes'])), keepdim=bool(i['keep_dims']))


def _slice(i):
    begin, end = list(map(int, i['begin'])), list(map(int, i['end']))
    masks = i.get('begin_mask'), i.get('end_mask')
    begin_mask, end_mask = (mask if mask is not None else [False] * len(begin) for mask in masks)
    return i['x'][
        tuple(
            slice(None if free else first, None if open_ended else last)
            for first, last, free, open_ended in zip(begin, end, begin_mask, end_mask, strict=True)
        )
    ]


def _pad(i):
    assert i['mode'] == 'constant'
    pad = list(map(int, i['pad']))
    return F.pad(i['x'], [n for k in range(len(pad) - 2, -1, -2) for n in pad[k : k + 2]])


def _max_pool(i):
    assert i['pad_type'] == 'valid' or not np.any(i['pad'])
    return F.max_pool2d(i['x'], tuple(i['kernel_sizes']), tuple(i['strides']))


OPERATORS = {
    'add': lambda i: i['x'] + i['y'],
    'batch_norm': lambda i: F.batch_norm(
        i['x'], i['mean'], i['variance'], i['gamma'], i['beta'], eps=float(i['epsilon'])
    ),
    'cast': lambda i: i['x'],
    'concat': lambda i: torch.cat(i['values'], int(i['axis'])),
    'conv': _conv,
    'elu': lambda i: F.elu(i['x'], float(i['alpha'])),
    'gelu': _gelu,
    'layer_norm': lambda i: F.layer_norm(
        i['x'], i['x'].shape[-1:], i.get('gamma'), i.get('beta'), float(i['epsilon'])
    ),
    'linear': lambda i: F.linear(i['x'], i['weight'], i['bias']),
    'linear_activation': lambda i: float(i['alpha']) * i['x'] + float(i['beta']),
    'matmul': _matmul,
    'max_pool': _max_pool,
    'mul': lambda i: i['x'] * i['y'],
    'pad': _pad,
    'real_div': lambda i: i['x'] / i['y'],
    'reduce_mean': _reduce_mean,
    'relu': lambda i: F.relu(i['x']),
    'reshape': lambda i: i['x'].reshape(tuple(map(int, i['shape']))),
    'slice_by_index': _slice,
    'split': _split,
    'upsample_bilinear': _upsample_bilinear,
    'upsample_nearest_neighbor': _upsample_nearest,
}
