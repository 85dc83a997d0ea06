"""Check what a file says of itself, once, when it is opened and before anything relies on it.

The keys are explained in docs/deploy.md. Keys that nothing here reads are not checked.
"""

from __future__ import annotations

import json
import reprlib
from typing import Any, Iterator, Mapping, Sequence

from mmcare_runtime.prepare import CV2_CODES, CV2_FLAGS, DECODERS, PILLOW_FILTERS
from mmcare_runtime.text import escape

LARGEST_SIDE = 8192  # of images and maps, in pixels
MOST_CHANNELS = 65536
MOST_CANDIDATES = 10_000_000  # rows of boxes
LARGEST_BATCH = 64
PARTS = ('backbone', 'neck', 'model')
OUTPUT_KINDS = ('boxes', 'scores', 'labels', 'count', 'masks', 'probabilities')
LARGEST_SCALE = 65536  # of pictures that windows slide over
LARGEST_DIVISOR = 1024  # of their sides
INTERPOLATIONS = {'cv2': [*CV2_CODES], 'pillow': ['nearest', *PILLOW_FILTERS]}


class Field:
    """A value of a description, which knows its name and its file for errors."""

    def __init__(self, value: Any, name: str, file: object) -> None:
        self.value, self.name, self.file = value, name, file

    def fail(self, expected: str) -> ValueError:
        """Return an error that says what was expected."""
        value = reprlib.repr(self.value)
        return ValueError(
            escape(f'{self.file}: its description has {self.name} = {value}, expected {expected}')
        )

    def __getitem__(self, key: str | int) -> Field:
        name = f'{self.name}[{key}]' if isinstance(key, int) else f'{self.name}.{key}'.lstrip('.')
        if isinstance(key, int):
            return Field(self.value[key], name, self.file)
        return Field(self.value.get(key), name, self.file)

    def __contains__(self, key: str) -> bool:
        return key in self.value

    def __iter__(self) -> Iterator[Field]:
        return (self[index] for index in range(len(self.value)))

    def require(self, *keys: str) -> None:
        """Expect keys, whose values may be null."""
        for key in keys:
            if key not in self:
                raise ValueError(escape(f'{self.file}: its description lacks {self[key].name}'))

    def is_none(self) -> bool:
        """Tell whether the value is missing or null."""
        return self.value is None

    def mapping(self) -> Field:
        """Expect a mapping."""
        if not isinstance(self.value, Mapping):
            raise self.fail('an object with keys')
        return self

    def items(self, length: int | None = None) -> Field:
        """Expect a list, perhaps of a length."""
        is_list = isinstance(self.value, (list, tuple))
        if not is_list or (length is not None and len(self.value) != length):
            raise self.fail('a list' if length is None else f'a list of {length}')
        return self

    def text(self) -> str:
        """Expect a string."""
        if not isinstance(self.value, str):
            raise self.fail('a text')
        return self.value

    def one_of(self, choices: Sequence[Any]) -> Any:
        """Expect one of these values."""
        if not isinstance(self.value, (str, type(None))) or self.value not in choices:
            raise self.fail(f'one of {", ".join(choice or "null" for choice in choices)}')
        return self.value

    def number(self, low: float = -1e9, high: float = 1e9) -> float:
        """Expect a number within these limits, which NaN is not."""
        is_number = isinstance(self.value, (int, float)) and not isinstance(self.value, bool)
        if not is_number or not low <= self.value <= high:
            raise self.fail(f'a number from {low:g} to {high:g}')
        return self.value

    def integer(self, low: int = 1, high: int = LARGEST_SIDE) -> int:
        """Expect a whole number within these limits."""
        is_integer = isinstance(self.value, int) and not isinstance(self.value, bool)
        if not is_integer or not low <= self.value <= high:
            raise self.fail(f'a whole number from {low} to {high}')
        return self.value

    def numbers(self, length: int, low: float = -1e9, high: float = 1e9) -> list[float]:
        """Expect a list of numbers."""
        return [item.number(low, high) for item in self.items(length)]


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
        ValueError: If a field is missing or invalid; the error names the file and the field.
    """
    top = Field(description, '', file)
    if not isinstance(description, Mapping):
        value = reprlib.repr(description)
        raise ValueError(escape(f'{file}: its description is {value}, expected an object'))
    part = top['part'].one_of(PARTS)
    for side in top['shape'].items(2):
        side.integer()
    image, batch = _check_input(top)
    outputs = top['outputs'].items()
    if not outputs.value:
        raise outputs.fail('a list with an output at least')
    shapes = [_check_output(output, batch) for output in outputs]
    names = [output['name'].value for output in outputs]
    if len({*names, image['name'].value}) <= len(names):
        raise outputs.fail('different names of inputs and outputs')
    if part == 'model':
        _check_model(top, shapes)
    return description


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
    expected = [nchw(tensor) for tensor in tensors]
    shapes = [input_shape, *output_shapes]
    if len(shapes) != len(tensors):
        raise ValueError(
            escape(
                f'{file}: its description has {len(tensors) - 1} outputs, '
                f'the file {len(shapes) - 1}'
            )
        )
    for tensor, shape, actual in zip(tensors, expected, shapes):
        if actual is not None and not fits(shape, actual):
            raise ValueError(
                escape(
                    f'{file}: its description says that {tensor["name"]} is {[*shape]}, '
                    f'the file {[*actual]}'
                )
            )
    for tensor, name in zip(tensors, names):
        if tensor['name'] != name:
            raise ValueError(
                escape(f'{file}: its description names {tensor["name"]}, the file {name}')
            )


def fits(shape: Sequence[int | None], actual: Sequence[Any]) -> bool:
    """Tell whether a shape is one that a description allows; what is not an int is free."""
    return len(shape) == len(actual) and all(
        a == b for a, b in zip(shape, actual) if isinstance(a, int) and isinstance(b, int)
    )


def _check_shape(tensor: Field) -> tuple[int | None, ...]:
    """Check the shape and the layout of an input or output; return it as (B, C, H, W)."""
    tensor.mapping()['name'].text()
    shape = tensor['shape'].items()
    if not 0 < len(shape.value) <= 4:
        raise shape.fail('one to four dimensions')
    images = len(shape.value) == 4
    layout = tensor['layout'].one_of(['NCHW', 'NHWC'] if images else [None])
    sides = (2, 3) if layout == 'NCHW' else (1, 2)
    for index, side in enumerate(shape):
        if not (images and index in sides and side.is_none()):  # None: any size
            most = LARGEST_SIDE if images and index in sides else MOST_CANDIDATES
            side.integer(high=most)
    result = nchw(tensor.value)
    if images and (result[1] or 0) > MOST_CHANNELS:
        raise shape.fail(f'at most {MOST_CHANNELS} channels')
    return result


def _check_input(top: Field) -> tuple[Field, int]:
    """Check the input, and return it with the number of images that it takes."""
    (image,) = top['inputs'].items(1)
    shape = _check_shape(image)
    if len(shape) != 4:
        raise image['shape'].fail('images, of four dimensions')
    batch = image['shape'][0].integer(high=LARGEST_BATCH)
    height, width = top['shape'].value
    if not fits(shape[2:], (height, width)):
        raise image['shape'].fail(f'height and width of shape, {height} and {width}')
    channels = shape[1]
    assert channels is not None
    kind = image['kind'].one_of(['image', 'tensor'])
    image.require('channels', 'mean', 'std', 'resize')
    if image['channels'].one_of(['RGB', 'BGR', None]) and channels != 3:
        raise image['channels'].fail(f'null, since there are {channels}')
    for key, low in (('mean', -1e9), ('std', 1e-9)):
        if not image[key].is_none():
            image[key].numbers(channels, low)
    if kind == 'tensor' and image['mean'].is_none() != image['std'].is_none():
        raise image['std'].fail('mean and std, or none of them')
    image['padding'].numbers(channels)
    if 'letterbox' in image:
        image['letterbox'].one_of(['top-left', 'center'])
    if 'dtype' in image:
        image['dtype'].one_of(['uint8', 'float32'])
    if image['dtype'].value == 'uint8':
        image['padding'].numbers(channels, 0, 255)
    _check_loader(image['loader'])
    _check_resize(image['resize'], (height, width))
    return image, batch


def _check_loader(loader: Field) -> None:
    """Check how pictures are read; null: 8 bits, colours for three channels, gray for one."""
    if loader.is_none():
        return
    loader.mapping()['color_type'].one_of([*CV2_FLAGS, None])
    loader['imdecode_backend'].one_of([*DECODERS, None])
    if not isinstance(loader['to_float32'].value, bool):
        raise loader['to_float32'].fail('true or false')
    if loader['bits'].value not in (None, 8, 16, 32):
        raise loader['bits'].fail('8, 16, 32 or null')


def _check_resize(resize: Field, shape: tuple[int, int]) -> None:
    if resize.is_none():
        return
    _check_interpolation(resize)
    if not resize['shorter'].is_none():
        resize['shorter'].integer()
    if not resize['crop'].is_none():
        for side, most in zip(resize['crop'].items(2), shape):
            side.integer(high=most)


def _check_interpolation(resize: Field) -> None:
    resize.mapping()
    backend = resize['backend'].one_of([*INTERPOLATIONS]) if 'backend' in resize else 'cv2'
    if 'interpolation' in resize:
        resize['interpolation'].one_of(INTERPOLATIONS[backend])


def _check_slide(slide: Field) -> None:
    """Check how windows slide over pictures, as mmseg's test_cfg and data_preprocessor say."""
    for side in slide.mapping()['stride'].items(2):
        side.integer()
    if not slide['resize'].is_none():
        _check_interpolation(slide['resize'])
        for side in slide['resize']['scale'].items(2):
            side.integer(high=LARGEST_SCALE)
        if not isinstance(slide['resize']['keep_ratio'].value, bool):
            raise slide['resize']['keep_ratio'].fail('true or false')
    for key in ('multiple', 'size_divisor'):
        if not slide[key].is_none():
            slide[key].integer(high=LARGEST_DIVISOR)
    if not slide['size'].is_none():
        for side in slide['size'].items(2):
            side.integer()
    if not slide['other_steps'].is_none():
        for name in slide['other_steps'].items():
            name.text()


def _check_output(output: Field, batch: int) -> tuple[int | None, ...]:
    """Check an output, and return its shape for one image."""
    shape = _check_shape(output)
    if batch > 1:
        if shape[0] != batch:
            raise output['shape'].fail(f'results for each of {batch} images')
        shape = 1, *shape[1:]
    if output.value.get('kind') is None:
        return shape
    kind = output['kind'].one_of(OUTPUT_KINDS)
    if kind == 'boxes':
        output['box_format'].one_of(['xyxy', 'cxcywh'])
        output['scale'].numbers(4, 1e-9)
        if shape[-1] != 4 or len(shape) not in (2, 3):
            raise output['shape'].fail('four values for each box')
    elif kind == 'probabilities':
        if len(shape) not in (2, 4) or shape[0] != 1:
            raise output['shape'].fail('(1, K) or (1, K, H, W)')
        if len(shape) == 4:
            output['activation'].one_of(['softmax', 'sigmoid'])
    elif kind == 'masks' and (len(shape) != 4 or shape[0] != 1):
        raise output['shape'].fail('(1, N, h, w)')
    return shape


def _check_model(top: Field, shapes: Sequence[tuple[int | None, ...]]) -> None:
    """Check the entries that say how the outputs of a whole model are read."""
    outputs = top['outputs']
    kinds = [output.get('kind') for output in outputs.value]
    classes: int | None = None  # how many the outputs distinguish; None: they do not say it
    if not top['activation'].is_none():
        top['activation'].one_of(['softmax', 'sigmoid'])
    if 'threshold' in top:
        top['threshold'].number(1e-6, 1 - 1e-6)
    if 'align_corners' in top and not isinstance(top['align_corners'].value, bool):
        raise top['align_corners'].fail('true or false')
    if not top['slide'].is_none():
        _check_slide(top['slide'])
    if kinds[0] == 'boxes':
        classes = _check_boxes(top, kinds, shapes)
    elif kinds[0] == 'labels':
        if len(shapes) != 1 or len(shapes[0]) != 3 or shapes[0][0] != 1:
            raise outputs[0]['shape'].fail('a label map (1, H, W)')
    elif kinds[0] == 'probabilities':
        if len(shapes) != 1:
            raise outputs.fail('probabilities alone')
        classes = shapes[0][1] if shapes[0][1] != 1 else None
    elif kinds[0] is not None:
        raise outputs[0]['kind'].fail('boxes, labels or probabilities first')
    elif not top['decode'].is_none():
        classes = _check_decode(top['decode'].mapping(), outputs, shapes)
    elif len(shapes) == 1 and len(shapes[0]) in (2, 4):
        classes = shapes[0][1] if shapes[0][1] != 1 else None
    if not top['classes'].is_none():
        for name in top['classes'].items(classes):
            name.text()
    if not top['palette'].is_none():
        for color in top['palette'].items():
            for value in color.items(3):
                value.integer(0, 255)


def _check_boxes(
    top: Field, kinds: Sequence[Any], shapes: Sequence[tuple[int | None, ...]]
) -> int | None:
    """Check the outputs of a decoded detector; return the number of classes if they say it."""
    _check_test_cfg(top['test_cfg'])
    outputs, rows = top['outputs'], shapes[0][-2]
    labels = 'labels' in kinds
    if kinds[1:2] != ['scores'] or (labels and kinds[2] != 'labels'):
        raise outputs.fail('boxes, scores and perhaps labels')
    for output, kind, shape in zip(outputs, kinds, shapes):
        size = 1
        for side in shape:
            size *= side or 0
        rest = size // (rows or 1)
        whole = kind == 'count' or size == rest * (rows or 1)
        if not whole or (kind in ('scores', 'labels') and labels and rest != 1):
            raise output['shape'].fail(f'a value for each of {rows} boxes')
        if kind == 'masks' and shape[1] != rows:
            raise output['shape'].fail(f'a mask for each of {rows} boxes')
    return None if labels else shapes[1][-1]


def _check_test_cfg(config: Field) -> None:
    """Check thresholds, as mmdet's test_cfg names them."""
    config.mapping()['nms'].mapping()['iou_threshold'].number(0, 1)
    config['max_per_img'].integer(high=MOST_CANDIDATES)
    for key in ('score_thr', 'min_bbox_size', 'mask_thr_binary'):
        if key in config:
            config[key].number()
    if 'nms_pre' in config:
        config['nms_pre'].integer(-1, MOST_CANDIDATES)


def _check_decode(
    decode: Field, outputs: Field, shapes: Sequence[tuple[int | None, ...]]
) -> int | None:
    """Check how maps of a one-stage detector become boxes; return the number of classes."""
    _check_test_cfg(decode['test_cfg'])
    strides = decode['strides'].items()
    levels = len(strides.value)
    for stride in strides:
        stride.number(1, LARGEST_SIDE)
    if not levels or len(shapes) not in (2 * levels, 3 * levels):
        raise strides.fail(f'a level for each of {len(shapes)} outputs, two or three each')
    activation = decode['score_activation'].one_of(['sigmoid', 'softmax'])
    params, priors = decode['prior_params'].mapping(), [1] * levels
    if 'base_anchors' in params:
        for index, anchors in enumerate(params['base_anchors'].items(levels)):
            priors[index] = len(anchors.items().value)
            for anchor in anchors:
                anchor.numbers(4)
    if 'offset' in params:
        params['offset'].number()
    _check_coder(decode['coder'].mapping())
    classes: int | None = None
    for index, (output, shape) in enumerate(zip(outputs, shapes)):
        level, kind = index % levels, index // levels
        if len(shape) != 4 or shape[0] != 1 or shape[2:] != shapes[level][2:]:
            raise output['shape'].fail('a map of the size of its level')
        values, rest = divmod(shape[1] or 0, priors[level] or MOST_CHANNELS)
        if kind == 0:
            number = values - (activation == 'softmax')
            classes = number if classes is None else classes
            fits_classes = number == classes > 0
        if rest or not (fits_classes if kind == 0 else values == (4 if kind == 1 else 1)):
            raise output['shape'].fail(f'values of {priors[level]} priors')
    return classes


def _check_coder(coder: Field) -> None:
    """Check the values of a known coder; reading boxes with another one raises an error."""
    if coder['type'].text() == 'DeltaXYWHBBoxCoder':
        coder['means'].numbers(4)
        coder['stds'].numbers(4)
        coder['wh_ratio_clip'].number(1e-9)
        coder['ctr_clamp'].number(0)
        if not isinstance(coder['add_ctr_clamp'].value, bool):
            raise coder['add_ctr_clamp'].fail('true or false')
