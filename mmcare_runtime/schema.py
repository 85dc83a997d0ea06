"""Check what a file says of itself, once, when it is opened and before anything relies on it.

``schema.json`` says what each field may hold, for any language. What one field says of another is
checked here. Keys that nothing here reads are not checked. docs/description.md explains the keys.
"""

from __future__ import annotations

import json
import re
import reprlib
from decimal import Decimal
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping, Sequence

from mmcare_runtime.text import escape

SCHEMA = json.loads(Path(__file__).with_name('schema.json').read_bytes())
PARTS = tuple(SCHEMA['properties']['part']['enum'])
LARGEST_SIDE = SCHEMA['definitions']['side']['maximum']  # of images and maps, in pixels
LARGEST_BATCH = SCHEMA['definitions']['input']['properties']['shape']['items'][0]['maximum']
MOST_CHANNELS = 65536
Expect = Callable[[bool, str, str], None]  # whether a field is right, its name, what is expected


def parse(text: str | bytes | None, file: object) -> Mapping[str, Any]:
    """Read a description from JSON, and check it; return an empty one for None."""
    if text is None:
        return {}
    try:
        description = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(escape(f'{file}: its description is not JSON: {error}')) from error
    return check(description, file)


def check(description: Any, file: object) -> Mapping[str, Any]:
    """Check a description and return it.

    Raises:
        ImportError: If fastjsonschema is not installed.
        ValueError: If a field is missing or invalid; the error names the file and the field.
    """
    from fastjsonschema import JsonSchemaValueException  # training needs no descriptions

    def expect(good: bool, name: str, expected: str) -> None:
        if not good:
            raise _fault(description, file, name, f'expected {expected}')

    try:
        text = json.dumps(description)
        # A Decimal is no integer, even if it is 32.0; NaN becomes what no field may hold.
        _validator()(json.loads(text, parse_float=Decimal, parse_constant=lambda _: ...))
    except JsonSchemaValueException as error:
        name = str(error.name).replace('data', '', 1).lstrip('.')
        if error.rule == 'required':
            held = _look_up(description, name)
            missing = next(key for key in error.rule_definition if key not in held)
            name = f'{name}.{missing}'.lstrip('.')
            raise ValueError(escape(f'{file}: its description lacks {name}')) from None
        words = error.message.partition(' must ')[2]
        raise _fault(description, file, name, f'which must {words}') from None
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(escape(f'{file}: its description is not JSON: {error}')) from error
    batch = _check_input(description, expect)
    shapes = [
        _check_output(output, f'outputs[{index}]', batch, expect)
        for index, output in enumerate(description['outputs'])
    ]
    names = {tensor['name'] for tensor in [*description['inputs'], *description['outputs']]}
    expect(len(names) > len(shapes), 'outputs', 'different names of inputs and outputs')
    if description['part'] == 'model':
        _check_model(description, shapes, expect)
    return description


@lru_cache(maxsize=None)
def _validator() -> Callable[[Any], Any]:
    from fastjsonschema import compile

    return compile(SCHEMA)


def _look_up(description: Any, name: str) -> Any:
    """Return the value of a field, such as ``inputs[0].shape``."""
    for key in re.findall(r'[^.\[\]]+', name):
        description = description[int(key) if isinstance(description, (list, tuple)) else key]
    return description


def _fault(description: Any, file: object, name: str, words: str) -> ValueError:
    value = reprlib.repr(_look_up(description, name))
    has = f'has {name} =' if name else 'is'
    return ValueError(escape(f'{file}: its description {has} {value}, {words}'))


def nchw(tensor: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Return the shape of an input or output; four dimensions as (B, C, H, W)."""
    shape = tuple(tensor['shape'])
    if len(shape) == 4 and tensor.get('layout') == 'NHWC':
        return shape[0], shape[3], shape[1], shape[2]
    return shape


def match(
    description: Mapping[str, Any],
    file: object,
    input_shape: Sequence[Any],
    output_shapes: Sequence[Sequence[Any] | None],
    names: Sequence[str] = (),
) -> None:
    """Compare a description with what an engine says of the file.

    Args:
        description: A checked description.
        file: For errors.
        input_shape: (B, C, H, W). Sides that are not int are free.
        output_shapes: In the file's order, NCHW; None where an engine does not say it.
        names: Of the input and the outputs, if the format has names.

    Raises:
        ValueError: If they differ.
    """
    tensors = [*description['inputs'], *description['outputs']]
    shapes, fault = [input_shape, *output_shapes], ''
    if len(shapes) != len(tensors):
        fault = f'has {len(tensors) - 1} outputs, the file {len(shapes) - 1}'
    for tensor, actual in zip(tensors, shapes):
        if actual is not None and not fits(nchw(tensor), actual):
            shape = f'{[*nchw(tensor)]}, the file {[*actual]}'
            fault = fault or f'says that {tensor["name"]} is {shape}'
    for tensor, name in zip(tensors, names):
        if tensor['name'] != name:
            fault = fault or f'names {tensor["name"]}, the file {name}'
    if fault:
        raise ValueError(escape(f'{file}: its description {fault}'))


def find_differences(description: Mapping[str, Any], expected: Mapping[str, Any]) -> Iterator[str]:
    """Compare what a file says of itself with what a config says, and yield the differences.

    Fields are compared that both have, with values: what a config does not fix, and what a file of
    an older mmcare does not say, is no difference. Fields of ``inputs`` are compared as well.

    Args:
        description: A checked description.
        expected: Of the same form, such as ``dict(classes=[...], inputs=[dict(mean=[...])])``.
    """
    pairs = [('', description, expected)]
    for index, images in enumerate(zip(description.get('inputs', ()), expected.get('inputs', ()))):
        pairs.append((f'inputs[{index}].', *images))
    for prefix, said, wanted in pairs:
        for key in wanted:
            texts = [json.dumps(table.get(key)) for table in (said, wanted)]
            values = [json.loads(text, parse_int=float) for text in texts]  # 1 is 1.0
            if key != 'inputs' and None not in values and values[0] != values[1]:
                text = f'{prefix}{key} is {reprlib.repr(values[0])} in the file, '
                yield escape(f'{text}{reprlib.repr(values[1])} in the config')


def fits(shape: Sequence[int | None], actual: Sequence[Any]) -> bool:
    """Tell whether a shape is one that a description allows; what is not an int is free."""
    return len(shape) == len(actual) and all(
        a == b for a, b in zip(shape, actual) if isinstance(a, int) and isinstance(b, int)
    )


def _check_shape(tensor: Mapping[str, Any], name: str, expect: Expect) -> tuple[Any, ...]:
    """Check which sides may be large, and which null; return the shape as (B, C, H, W)."""
    shape, order = nchw(tensor), [*range(len(tensor['shape']))]
    if tensor.get('layout') == 'NHWC':
        order = [0, 3, 1, 2]
    for place, side in zip(order, shape):
        field = f'{name}.shape[{place}]'
        if place in order[2:] and len(shape) == 4:  # height and width; None: any
            expect((side or 1) <= LARGEST_SIDE, field, f'at most {LARGEST_SIDE}')
        else:
            expect(side is not None, field, 'a whole number')
    if len(shape) == 4:
        channels = shape[1] or 0
        expect(channels <= MOST_CHANNELS, f'{name}.shape', f'at most {MOST_CHANNELS} channels')
    return shape


def _check_input(top: Mapping[str, Any], expect: Expect) -> int:
    """Check the input, and return the number of images that it takes."""
    (image,), name = top['inputs'], 'inputs[0]'
    batch, channels, *sides = _check_shape(image, name, expect)
    height, width = top['shape']
    wanted = f'height and width of shape, {height} and {width}'
    expect(fits(sides, (height, width)), f'{name}.shape', wanted)
    if image['channels']:
        expect(channels == 3, f'{name}.channels', f'null, since there are {channels}')
    for key in ('mean', 'std', 'padding'):
        number = channels if image[key] is None else len(image[key])
        expect(number == channels, f'{name}.{key}', f'a list of {channels}')
    if image['kind'] == 'tensor':
        both = (image['mean'] is None) == (image['std'] is None)
        expect(both, f'{name}.std', 'mean and std, or none of them')
    crop = (image['resize'] or {}).get('crop') or (1, 1)
    inside = crop[0] <= height and crop[1] <= width
    expect(inside, f'{name}.resize.crop', f'at most {height} and {width}')
    return batch


def _check_output(
    output: Mapping[str, Any], name: str, batch: int, expect: Expect
) -> tuple[Any, ...]:
    """Check an output, and return its shape for one image."""
    shape, kind, field = _check_shape(output, name, expect), output.get('kind'), f'{name}.shape'
    if batch > 1:
        expect(shape[0] == batch, field, f'results for each of {batch} images')
        shape = 1, *shape[1:]
    if kind == 'boxes':
        expect(shape[-1] == 4, field, 'four values for each box')
    elif kind == 'probabilities':
        expect(len(shape) in (2, 4) and shape[0] == 1, field, '(1, K) or (1, K, H, W)')
    elif kind == 'masks':
        expect(len(shape) == 4 and shape[0] == 1, field, '(1, N, h, w)')
    return shape


def _check_model(top: Mapping[str, Any], shapes: Sequence[Any], expect: Expect) -> None:
    """Check the entries that say how the outputs of a whole model are read."""
    kinds = [output.get('kind') for output in top['outputs']]
    classes: int | None = None  # how many the outputs distinguish; None: they do not say it
    if kinds[0] == 'boxes':
        classes = _check_boxes(kinds, shapes, expect)
    elif kinds[0] == 'labels':
        is_map = len(shapes) == 1 and len(shapes[0]) == 3 and shapes[0][0] == 1
        expect(is_map, 'outputs[0].shape', 'a label map (1, H, W)')
    elif kinds[0] == 'probabilities':
        expect(len(shapes) == 1, 'outputs', 'probabilities alone')
        classes = shapes[0][1] if shapes[0][1] != 1 else None
    elif kinds[0] is not None:
        expect(False, 'outputs[0].kind', 'boxes, labels or probabilities first')
    elif top.get('decode') is not None:
        classes = _check_decode(top['decode'], shapes, expect)
    elif len(shapes) == 1 and len(shapes[0]) in (2, 4):
        classes = shapes[0][1] if shapes[0][1] != 1 else None
    if top.get('classes') is not None and classes is not None:
        expect(len(top['classes']) == classes, 'classes', f'a list of {classes}')


def _check_boxes(kinds: Sequence[Any], shapes: Sequence[Any], expect: Expect) -> int | None:
    """Check the outputs of a decoded detector; return the number of classes if they say it."""
    rows, labels = shapes[0][-2], 'labels' in kinds
    ordered = kinds[1:2] == ['scores'] and (not labels or kinds[2] == 'labels')
    expect(ordered, 'outputs', 'boxes, scores and perhaps labels')
    for index, (kind, shape) in enumerate(zip(kinds, shapes)):
        name, number = f'outputs[{index}].shape', prod(side or 0 for side in shape)
        if kind in ('scores', 'labels'):
            good = number == rows if labels else number % rows == 0
            expect(good, name, f'a value for each of {rows} boxes')
        elif kind == 'masks':
            expect(shape[1] == rows, name, f'a mask for each of {rows} boxes')
    return None if labels else shapes[1][-1]


def _check_decode(decode: Mapping[str, Any], shapes: Sequence[Any], expect: Expect) -> int | None:
    """Check how maps of a one-stage detector become boxes; return the number of classes."""
    levels = len(decode['strides'])
    wanted = f'a level for each of {len(shapes)} outputs, two or three each'
    expect(len(shapes) in (2 * levels, 3 * levels), 'decode.strides', wanted)
    anchors = decode['prior_params'].get('base_anchors', [[None]] * levels)
    expect(len(anchors) == levels, 'decode.prior_params.base_anchors', f'a list of {levels}')
    classes: int | None = None
    for index, shape in enumerate(shapes):
        level, kind = index % levels, index // levels
        name, priors = f'outputs[{index}].shape', len(anchors[level])
        is_map = len(shape) == 4 and shape[0] == 1 and shape[2:] == shapes[level][2:]
        expect(is_map, name, 'a map of the size of its level')
        values, rest = divmod(shape[1], priors or MOST_CHANNELS)
        if kind == 0:
            number = values - (decode['score_activation'] == 'softmax')
            classes = number if classes is None else classes
            good = number == classes > 0
        else:
            good = values == (4 if kind == 1 else 1)
        expect(good and not rest, name, f'values of {priors} priors')
    return classes
