"""ML Programs computed with PyTorch, for machines without Core ML.

Each operator is computed in float32 and its result rounded to the type that the program declares,
so that what leaves the range of float16 shows. Semantics: the documentation of MIL's operators,
https://apple.github.io/coremltools/source/coremltools.converters.mil.mil.ops.defs.html
"""

import numpy as np
import torch
import torch.nn.functional as F


def run_program(model, image):
    """Outputs of an ``MLModel`` that was just converted for an image, in order, as float32."""
    function = model._mil_program.functions['main']
    (name,) = function.inputs
    values = {function.inputs[name].name: image.float()}

    def value_of(variable):
        if isinstance(variable, list | tuple):
            return [value_of(each) for each in variable]
        if variable is None or variable.name in values:
            return None if variable is None else values[variable.name]
        value = variable.val
        assert value is not None, variable.name
        if isinstance(value, np.ndarray) and value.dtype.kind == 'f':
            return torch.from_numpy(value.astype(np.float32))
        return value.tolist() if isinstance(value, np.ndarray | np.generic) else value

    for operation in function.operations:
        if operation.op_type == 'const':
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
    top, bottom, left, right = i['pad'] if i['pad_type'] == 'custom' else (0, 0, 0, 0)
    assert i['pad_type'] in ('custom', 'valid') and i['dilations'] == [1, 1]
    x = F.pad(i['x'], (left, right, top, bottom))
    return F.conv2d(x, i['weight'], i['bias'], i['strides'], groups=i['groups'])


def _matmul(i):
    x, y = (i[name].mT if i[f'transpose_{name}'] else i[name] for name in 'xy')
    return x @ y


def _upsample(mode):
    factors = 'scale_factor_height', 'scale_factor_width'
    return lambda i: F.interpolate(i['x'], scale_factor=[i[name] for name in factors], mode=mode)


def _slice(i):
    x = i['x']
    for axis, (first, last) in enumerate(zip(i['begin'], i['end'], strict=True)):
        first = 0 if (i.get('begin_mask') or {axis: False})[axis] else first
        last = x.shape[axis] if (i.get('end_mask') or {axis: False})[axis] else last
        x = x.narrow(axis, first, last - first)
    return x


def _pad(i):
    assert i['mode'] == 'constant' and i['constant_val'] == 0
    pairs = [i['pad'][k : k + 2] for k in range(0, len(i['pad']), 2)]
    return F.pad(i['x'], [side for pair in reversed(pairs) for side in pair])


def _reduce(function):
    return lambda i: function(i['x'], i['axes'], keepdim=i['keep_dims'])


OPERATORS = {
    'add': lambda i: i['x'] + i['y'],
    'batch_norm': lambda i: F.batch_norm(
        i['x'], i['mean'], i['variance'], i['gamma'], i['beta'], eps=i['epsilon']
    ),
    'cast': lambda i: i['x'],
    'concat': lambda i: torch.cat(i['values'], i['axis']),
    'conv': _conv,
    'elu': lambda i: F.elu(i['x'], i['alpha']),
    'gelu': lambda i: F.gelu(i['x'], approximate={'EXACT': 'none'}[i['mode']]),
    'layer_norm': lambda i: F.layer_norm(
        i['x'], i['x'].shape[-1:], i.get('gamma'), i.get('beta'), i['epsilon']
    ),
    'linear': lambda i: F.linear(i['x'], i['weight'], i['bias']),
    'matmul': _matmul,
    'max_pool': lambda i: F.max_pool2d(i['x'], i['kernel_sizes'], i['strides']),
    'mul': lambda i: i['x'] * i['y'],
    'pad': _pad,
    'real_div': lambda i: i['x'] / i['y'],
    'reduce_mean': _reduce(torch.mean),
    'reduce_sum': _reduce(torch.sum),
    'relu': lambda i: F.relu(i['x']),
    'reshape': lambda i: i['x'].reshape(i['shape']),
    'slice_by_index': _slice,
    'split': lambda i: i['x'].split(i['split_sizes'], i['axis']),
    'sub': lambda i: i['x'] - i['y'],
    'upsample_bilinear': _upsample('bilinear'),
    'upsample_nearest_neighbor': _upsample('nearest'),
}
