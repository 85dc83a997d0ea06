"""ML Programs, Core ML's, computed by PyTorch on any system.

The operators are computed in float32, sums included, and each result is rounded to the type that
the program declares, so that what leaves the range of float16 shows. Core ML itself chooses how it
sums, by device. Semantics: the documentation of MIL's operators,
https://apple.github.io/coremltools/source/coremltools.converters.mil.mil.ops.defs.html
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from mmcare.compatibility import require
from mmcare.export.formats.base import Exported


def open_package(path: Path) -> Exported:
    """Read an ``.mlpackage`` to compute its program; images are NCHW, as pixels if it takes these.

    Raises:
        ImportError: If coremltools is missing.
        ValueError: If the package is damaged, or the program has operators that are missing here.
    """
    ct = require('coremltools', 'running an .mlpackage')
    from coremltools.converters.mil.frontend.milproto.load import load

    try:
        model = ct.models.MLModel(str(path), skip_model_load=True)
        spec = model.get_spec()
        function = load(spec, spec.specificationVersion, model.weights_dir).functions['main']
    except Exception as error:  # its reader's are of many classes, and RuntimeErrors of C++
        raise ValueError(f'coremltools cannot read it: {" ".join(str(error).split())}') from error
    (image,) = function.inputs.values()
    constants = {}
    steps: list[tuple[Any, Any, list[str]]] = []
    for operation in function.operations:
        if operation.op_type == 'const' or operation.op_type.startswith('constexpr_'):
            (variable,) = operation.outputs
            constants[variable.name] = _read(operation)
        else:
            inputs = {key: one for key, one in operation.inputs.items() if one is not None}
            steps.append((operation, inputs, []))
    if lacking := {operation.op_type for operation, *_ in steps} - {*OPERATORS}:
        raise ValueError(f'mmcare cannot compute {", ".join(sorted(lacking))} (formats/mil.py)')
    needed = {one.name for one in function.outputs} | {*constants}
    for _, inputs, done in reversed(steps):  # what no later operator takes is freed
        done += {one.name for one in tree_leaves(inputs)} - needed
        needed |= {*done}

    @torch.no_grad()
    def run(images: Tensor) -> list[np.ndarray]:
        values = {**constants, image.name: _round(images.float(), image)}
        for operation, inputs, done in steps:
            arguments = tree_map_only(ct.converters.mil.Var, lambda one: values[one.name], inputs)
            try:
                results = OPERATORS[operation.op_type](arguments)
                results = results if isinstance(results, list | tuple) else [results]
                for output, result in zip(operation.outputs, results, strict=True):
                    values[output.name] = _round(result, output)
            except Exception as error:
                raise ValueError(f'{operation.op_type} {operation.name}: {error}') from error
            for name in done:
                del values[name]
        return [values[output.name].numpy() for output in function.outputs]

    description = spec.description.metadata.userDefined.get('mmcare', '{}')
    return Exported(run, tuple(image.shape), json.loads(description), timed=False)


def _read(operation: Any) -> Any:
    """Return a constant, unpacked, as a tensor of float32 or as plain Python."""
    packed = operation.op_type != 'const'
    value = operation.materialized_val_inference() if packed else operation.outputs[0].val
    if isinstance(value, np.ndarray) and value.dtype.kind == 'f':
        return torch.from_numpy(value.astype(np.float32))
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def _round(result: Tensor, variable: Any) -> Tensor:
    if variable.shape != tuple(result.shape):
        raise ValueError(f'{variable.shape} expected, got {tuple(result.shape)}')
    return result.half().float() if variable.dtype.__name__ == 'fp16' else result


Inputs = Mapping[str, Any]


def _padded(i: Inputs, value: float = 0.0) -> Tensor:
    top, bottom, left, right = dict(custom=i['pad'], valid=(0, 0, 0, 0))[i['pad_type']]
    return F.pad(i['x'], (left, right, top, bottom), value=value)


def _conv(i: Inputs) -> Tensor:
    rest = i['strides'], 0, i['dilations'], i['groups']
    return F.conv2d(_padded(i), i['weight'], i.get('bias'), *rest)


def _matmul(i: Inputs) -> Tensor:
    x, y = (i[name].mT if i[f'transpose_{name}'] else i[name] for name in 'xy')
    return x @ y


def _pad(i: Inputs) -> Tensor:
    pairs = [i['pad'][k : k + 2] for k in range(0, len(i['pad']), 2)]
    sides = [side for pair in reversed(pairs) for side in pair]
    return F.pad(i['x'], sides, i['mode'], i['constant_val'])


def _pool(i: Inputs) -> Tensor:
    sizes = i['kernel_sizes'], i['strides']
    return F.max_pool2d(_padded(i, -torch.inf), *sizes, ceil_mode=i['ceil_mode'])


def _slice(i: Inputs) -> Tensor:
    x = i['x']
    for axis, (first, last) in enumerate(zip(i['begin'], i['end'], strict=True)):
        first = 0 if (i.get('begin_mask') or {axis: False})[axis] else first
        last = x.shape[axis] if (i.get('end_mask') or {axis: False})[axis] else last
        x = x.narrow(axis, first, last - first)
    return x


def _reduce(function: Callable[..., Tensor]) -> Callable[[Inputs], Tensor]:
    return lambda i: function(i['x'], i['axes'], keepdim=i['keep_dims'])


def _upsample(mode: str) -> Callable[[Inputs], Tensor]:
    factors = 'scale_factor_height', 'scale_factor_width'
    return lambda i: F.interpolate(i['x'], scale_factor=[i[name] for name in factors], mode=mode)


OPERATORS: Mapping[str, Callable[[Inputs], Any]] = {
    'add': lambda i: i['x'] + i['y'],
    'batch_norm': lambda i: F.batch_norm(
        i['x'], i['mean'], i['variance'], i['gamma'], i['beta'], eps=i['epsilon']
    ),
    'cast': lambda i: i['x'],
    'concat': lambda i: torch.cat(i['values'], i['axis']),
    'conv': _conv,
    'elu': lambda i: F.elu(i['x'], i['alpha']),
    'gelu': lambda i: F.gelu(i['x'], approximate=dict(EXACT='none')[i['mode']]),
    'layer_norm': lambda i: F.layer_norm(
        i['x'], i['x'].shape[-1:], i.get('gamma'), i.get('beta'), i['epsilon']
    ),
    'linear': lambda i: F.linear(i['x'], i['weight'], i['bias']),
    'matmul': _matmul,
    'max_pool': _pool,
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
