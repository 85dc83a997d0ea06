"""Compute Core ML's ML Programs with PyTorch, on any system.

Operators are computed in float32, sums included, and each result is rounded to the type that the
program declares, so that values outside the range of float16 are seen. In Core ML, the type of sums
depends on the device. Semantics: the documentation of MIL's operators,
https://apple.github.io/coremltools/source/coremltools.converters.mil.mil.ops.defs.html
"""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from mmcare.compatibility import require
from mmcare.export.backends.coreml_nms import suppress
from mmcare_runtime import Model
from mmcare_runtime.schema import parse
from mmcare_runtime.verify import check_package


def refuse_options(path: Path, options: Mapping[str, Any]) -> None:
    """Raise a ValueError if options are given that the interpreter does not have."""
    names = [name for name in options if options[name] and name not in ('threads', 'verify')]
    if names:
        raise ValueError(f'nothing here computes {path} with {", ".join(names)}')


def open_package(
    path: Path, names: Sequence[str] = (), description: Mapping[str, Any] | None = None
) -> Model:
    """Open an ``.mlpackage`` to compute its program.

    Args:
        path: The package. Boxes and scores that its NMS drops are zeros at the end.
        names: Names of the outputs, in order; empty: the order of the program.
        description: The description of the file; None: the package's own.

    Raises:
        ImportError: If coremltools is missing.
        ValueError: If the package is damaged, or if the program has operators that are missing in
            ``OPERATORS``.
    """
    check_package(path)
    ct = require('coremltools', 'running an .mlpackage')
    from coremltools.converters.mil.frontend.milproto.load import load

    model = ct.models.MLModel(str(path), skip_model_load=True)
    spec = model.get_spec()
    program, *steps_after = spec.pipeline.models if spec.HasField('pipeline') else [spec]
    function = load(program, spec.specificationVersion, model.weights_dir).functions['main']
    (image,), results = function.inputs.values(), [*function.outputs]
    results.sort(key=lambda result: [*names, result.name].index(result.name))
    constants = {}
    steps: list[tuple[Any, Any, list[str]]] = []
    for operation in function.operations:
        if operation.op_type == 'const' or operation.op_type.startswith('constexpr_'):
            (variable,) = operation.outputs
            constants[variable.name] = _read(operation)
        else:
            inputs = {key: x for key, x in operation.inputs.items() if x is not None}
            if operation.op_type == 'classify':  # names the classes of the probabilities
                results = [inputs['probabilities']]
            else:
                steps.append((operation, inputs, []))
    if lacking := {operation.op_type for operation, *_ in steps} - {*OPERATORS}:
        raise ValueError(f'mmcare cannot compute {", ".join(sorted(lacking))} (backends/mil.py)')
    needed = {result.name for result in results} | {*constants}
    for _, inputs, done in reversed(steps):  # a result is freed after its last use
        done += {variable.name for variable in tree_leaves(inputs)} - needed
        needed |= {*done}

    @torch.no_grad()
    def run(pixels: np.ndarray) -> list[np.ndarray]:
        """Map an image of the file's shape to its outputs."""
        values = {**constants, image.name: _round(torch.from_numpy(pixels).float(), image)}
        for operation, inputs, done in steps:
            arguments = tree_map_only(ct.converters.mil.Var, lambda x: values[x.name], inputs)
            try:
                computed = OPERATORS[operation.op_type](**arguments)
                computed = computed if isinstance(computed, list | tuple) else [computed]
                for output, result in zip(operation.outputs, computed, strict=True):
                    values[output.name] = _round(result, output)
            except Exception as error:
                raise ValueError(f'{operation.op_type} {operation.name}: {error}') from error
            for name in done:
                del values[name]
        arrays = [values[result.name].numpy() for result in results]
        for step in steps_after:
            names = [result.name for result in results]
            kept = suppress(step, dict(zip(names, arrays, strict=True)))
            padding = [(0, len(arrays[0]) - len(kept[names[0]])), (0, 0)]
            arrays = [np.pad(kept[name], padding) for name in names]
        return arrays

    if description is None:
        description = parse(spec.description.metadata.userDefined.get('mmcare'), path)
    return Model(run, tuple(image.shape), description, path, timed=False)


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


def _pad(x: Tensor, pad: list[int], mode: str = 'constant', constant_val: float = 0) -> Tensor:
    sides = np.reshape(pad, (-1, 2))[::-1].ravel().tolist()  # PyTorch has the last axis first
    return F.pad(x, sides, mode, constant_val) if any(sides) else x


def _conv(x: Tensor, weight: Tensor, pad_type: str, pad: list[int], **rest: Any) -> Tensor:
    x = _pad(x, dict(custom=pad, valid=[])[pad_type])
    options = rest['strides'], 0, rest['dilations'], rest['groups']
    return F.conv2d(x, weight, rest.get('bias'), *options)


def _max_pool(x: Tensor, pad_type: str, pad: list[int], ceil_mode: bool, **rest: Any) -> Tensor:
    x = _pad(x, dict(custom=pad, valid=[])[pad_type], constant_val=-torch.inf)
    return F.max_pool2d(x, rest['kernel_sizes'], rest['strides'], ceil_mode=ceil_mode)


def _avg_pool(
    x: Tensor, pad_type: str, pad: list[int], exclude_padding_from_average: bool, **rest: Any
) -> Tensor:
    pad = dict(custom=pad, valid=[0, 0, 0, 0])[pad_type]
    assert pad[::2] == pad[1::2], f'padding {pad} that is not the same on both sides'
    options = rest['kernel_sizes'], rest['strides'], pad[::2], rest['ceil_mode']
    return F.avg_pool2d(x, *options, count_include_pad=not exclude_padding_from_average)


def _slice(x: Tensor, begin: list[int], end: list[int], **rest: Any) -> Tensor:
    none = [False] * len(begin)
    masks = [rest.get(f'{name}_mask') or none for name in ('begin', 'end', 'squeeze')]
    steps = rest.get('stride') or [1] * len(begin)
    bounds = zip(begin, end, steps, *masks, strict=True)
    return x[
        tuple(
            i if squeeze else slice(None if a else i, None if b else j, step)
            for i, j, step, a, b, squeeze in bounds
        )
    ]


def _conv_transpose(
    x: Tensor, weight: Tensor, pad_type: str, pad: list[int], **rest: Any
) -> Tensor:
    # If the whole output is wanted, pads are 0 and output_shape adds nothing.
    assert pad_type == 'valid' or not any(pad), f'padding {pad} of {pad_type}'
    options = rest['strides'], 0, 0, rest['groups'], rest['dilations']
    return F.conv_transpose2d(x, weight, rest.get('bias'), *options)


def _gather(x: Any, indices: Any, axis: int, batch_dims: int = 0, **_: Any) -> Tensor:
    assert batch_dims == 0, 'indices are the same for all rows'
    x, indices = torch.as_tensor(x), torch.as_tensor(indices)
    axis %= x.dim()
    rows = x.index_select(axis, indices.flatten().long())
    return rows.reshape(*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])


def _scatter(data: Tensor, indices: Any, updates: Any, axis: int, mode: str, **_: Any) -> Tensor:
    assert mode == 'update', mode
    return data.index_copy(axis, torch.as_tensor(indices).long(), torch.as_tensor(updates))


def _topk(x: Tensor, k: int, axis: int, ascending: bool, **_: Any) -> list[Tensor]:
    values, indices = x.topk(k, axis, not ascending)
    return [values, indices.int()]


def _cast(x: Any, dtype: str) -> Tensor:
    types = dict(bool=torch.bool, int16=torch.int32, uint16=torch.int32, int32=torch.int32)
    return torch.as_tensor(x).to(types.get(dtype, torch.float32))


def _elementwise(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Let a function of two tensors take integer constants, which are plain Python numbers."""
    return lambda x, y: function(torch.as_tensor(x), torch.as_tensor(y))


def _upsample(mode: str) -> Callable[..., Tensor]:
    return lambda x, scale_factor_height, scale_factor_width, align_corners=None, **_: (
        F.interpolate(x, None, (scale_factor_height, scale_factor_width), mode, align_corners)
    )


# The functions' arguments have the names of the MIL operators' inputs.
OPERATORS: dict[str, Callable[..., Any]] = {
    'add': _elementwise(torch.add),
    'avg_pool': _avg_pool,
    'batch_norm': lambda x, mean, variance, gamma, beta, epsilon: F.batch_norm(
        x, mean, variance, gamma, beta, eps=epsilon
    ),
    'cast': _cast,
    'ceil': lambda x: x.ceil(),
    'concat': lambda values, axis, interleave=False: torch.cat(
        [*map(torch.as_tensor, values)], axis
    ),
    'conv': _conv,
    'conv_transpose': _conv_transpose,
    'clip': lambda x, alpha, beta: x.clamp(alpha, beta),
    'cos': lambda x: x.cos(),
    'equal': _elementwise(torch.eq),
    'elu': lambda x, alpha: F.elu(x, alpha),
    'exp': lambda x: x.exp(),
    'expand_dims': lambda x, axes: reduce(torch.unsqueeze, axes, x),
    'fill_like': lambda ref_tensor, value: torch.full_like(ref_tensor, value),
    'floor': lambda x: x.floor(),
    'gather': _gather,
    'gelu': lambda x, mode: F.gelu(x, approximate=dict(EXACT='none')[mode]),
    'greater': _elementwise(torch.gt),
    'greater_equal': _elementwise(torch.ge),
    'identity': lambda x: x,
    'layer_norm': lambda x, axes, epsilon, gamma=None, beta=None: F.layer_norm(
        x, x.shape[-len(axes) :], gamma, beta, epsilon
    ),
    'leaky_relu': lambda x, alpha: F.leaky_relu(x, alpha),
    'less': _elementwise(torch.lt),
    'less_equal': _elementwise(torch.le),
    'linear': lambda x, weight, bias=None: F.linear(x, weight, bias),
    'log': lambda x, epsilon: (x + epsilon).log(),
    'logical_not': lambda x: torch.as_tensor(x).logical_not(),
    'logical_or': _elementwise(torch.logical_or),
    'matmul': lambda x, y, transpose_x, transpose_y: (
        (x.mT if transpose_x else x) @ (y.mT if transpose_y else y)
    ),
    'max_pool': _max_pool,
    'maximum': _elementwise(torch.maximum),
    'minimum': _elementwise(torch.minimum),
    'mul': _elementwise(torch.mul),
    'pad': _pad,
    'pow': _elementwise(torch.pow),
    'real_div': lambda x, y: x / y,
    'reduce_argmax': lambda x, axis, keep_dims, **_: x.argmax(axis, keep_dims),
    'reduce_l2_norm': lambda x, axes, keep_dims: x.norm(dim=axes, keepdim=keep_dims),
    'reduce_max': lambda x, axes, keep_dims: x.amax(axes, keep_dims),
    'reduce_mean': lambda x, axes, keep_dims: x.mean(axes, keep_dims),
    'reduce_min': lambda x, axes, keep_dims: x.amin(axes, keep_dims),
    'reduce_sum': lambda x, axes, keep_dims: x.sum(axes, keep_dims),
    'relu': lambda x: x.relu(),
    'reshape': lambda x, shape: x.reshape(shape),
    'scatter': _scatter,
    'select': lambda cond, a, b: torch.where(*map(torch.as_tensor, (cond, a, b))),
    'sigmoid': lambda x: x.sigmoid(),
    'sigmoid_hard': lambda x, alpha, beta: (alpha * x + beta).clamp(0, 1),
    'silu': lambda x: F.silu(x),
    'sin': lambda x: x.sin(),
    'softmax': lambda x, axis: x.softmax(axis),
    'slice_by_index': _slice,
    'split': lambda x, split_sizes, axis: x.split(split_sizes, axis),
    'sqrt': lambda x: x.sqrt(),
    'square': lambda x: x.square(),
    'squeeze': lambda x, axes: x.squeeze(tuple(axes)),
    'sub': _elementwise(torch.sub),
    'tanh': lambda x: x.tanh(),
    'tile': lambda x, reps: x.repeat(reps),
    'topk': _topk,
    'transpose': lambda x, perm: x.permute(perm),
    'upsample_bilinear': _upsample('bilinear'),
    'upsample_nearest_neighbor': _upsample('nearest'),
}
