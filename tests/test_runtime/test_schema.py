"""Descriptions are inputs: each field is checked, and no error is a traceback."""

import copy

import numpy as np
import pytest
from helpers import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from runtime_helpers import SHAPE, TASKS, describe, output, outputs_of

from mmcare_runtime import Model
from mmcare_runtime.prepare import CV2_CODES, CV2_FLAGS, DECODERS
from mmcare_runtime.schema import SCHEMA, check, find_differences, match, parse


def change(description, path, value):
    *parents, last = path
    for key in parents:
        description = description[key]
    if value is ...:
        del description[last]
    else:
        description[last] = value


COLOR_JUNK = ('1', [1], 256, -1, 1.5, float('nan'), True)


@pytest.mark.parametrize('task', TASKS)
def test_valid_descriptions(task):
    check(describe(task), 'file')


@pytest.mark.parametrize(
    ('task', 'path', 'value', 'words'),
    [
        ('classifier', ('inputs',), ..., 'lacks inputs'),
        ('classifier', ('inputs',), [], 'inputs = '),
        ('classifier', ('inputs',), [3], r'inputs\[0\] = 3'),
        ('classifier', ('outputs',), [], 'outputs = '),
        ('classifier', ('shape',), [8000, 8000], r'inputs\[0\].shape'),
        ('classifier', ('shape', 0), 10**9, r'shape\[0\]'),
        ('classifier', ('shape', 0), True, r'shape\[0\]'),
        ('classifier', ('classes',), ['cat'], 'classes = '),
        ('classifier', ('classes', 1), 3, r'classes\[1\] = 3'),
        *(
            ('classifier', ('palette', 0), color, r'palette\[0\]')
            for color in ('red', None, [0, 0], *([x, 0, 0] for x in COLOR_JUNK))
        ),
        ('classifier', ('palette',), 'red);background:url(//host)', 'palette = '),
        ('classifier', ('activation',), 'tanh', 'activation'),
        ('classifier', ('part',), ['model'], 'part'),
        ('classifier', ('inputs', 0, 'kind'), 'tensors', r'inputs\[0\].kind'),
        ('classifier', ('inputs', 0, 'padding'), [float('nan')] * 3, r'padding\[0\] = nan'),
        ('classifier', ('inputs', 0, 'padding'), [300, 0, 0], r'padding\[0\]'),
        ('classifier', ('inputs', 0, 'resize'), 'cv2', 'resize'),
        ('classifier', ('inputs', 0, 'resize'), ..., r'lacks inputs\[0\].resize'),  # not: null
        ('classifier', ('inputs', 0, 'mean'), ..., r'lacks inputs\[0\].mean'),
        ('classifier', ('inputs', 0, 'resize', 'backend'), 'gpu', 'resize.backend'),
        ('classifier', ('inputs', 0, 'resize', 'crop'), [0, 3], r'resize.crop\[0\]'),
        ('classifier', ('inputs', 0, 'resize', 'shorter'), 10**7, 'resize.shorter'),
        ('segmentor', ('outputs', 0, 'layout'), ..., r'outputs\[0\].layout'),
        ('segmentor', ('outputs', 0, 'name'), 'image', 'outputs'),
        ('binary', ('threshold',), 1, 'threshold'),
        ('classifier', ('inputs', 0, 'loader', 'bits'), 9, r'loader.bits'),
        ('classifier', ('inputs', 0, 'loader', 'color_type'), 'any', 'loader.color_type'),
        ('windows', ('align_corners',), 'no', 'align_corners'),
        ('windows', ('slide', 'stride', 1), 0, r'slide.stride\[1\]'),
        ('windows', ('slide', 'resize', 'scale'), [9], 'slide.resize.scale'),
        ('windows', ('slide', 'multiple'), 10**6, 'slide.multiple'),
        ('windows', ('outputs', 0, 'activation'), None, r'outputs\[0\].activation'),
        ('detector', ('decode',), [], 'decode'),
        ('detector', ('decode', 'strides'), [8], 'outputs'),
        ('detector', ('decode', 'coder', 'means'), [0], 'decode.coder.means'),
        ('detector', ('decode', 'coder', 'wh_ratio_clip'), 0, 'wh_ratio_clip'),
        ('detector', ('decode', 'prior_params', 'base_anchors'), [[[]]], 'base_anchors'),
        ('detector', ('decode', 'test_cfg', 'nms'), None, 'decode.test_cfg.nms'),
        ('detector', ('classes',), ['cat'], 'classes'),
        ('boxes', ('test_cfg',), ..., 'test_cfg'),
        ('boxes', ('outputs', 0, 'scale'), [1, 1, 0, 1], r'outputs\[0\].scale\[2\]'),
        ('boxes', ('outputs', 1, 'shape'), [1, 4], r'outputs\[1\].shape'),
        ('candidates', ('classes',), ['cat', 'dog'], 'classes'),
        ('instances', ('outputs', 3, 'shape'), [1, 4, 7, 7], r'outputs\[3\].shape'),
    ],
)
def test_each_field(task, path, value, words):
    description = describe(task)
    change(description, path, value)
    with pytest.raises(ValueError, match=f'mine.onnx: its description .*{words}'):
        check(description, 'mine.onnx')


@pytest.mark.parametrize('text', ['[]', 'null', '3', '{', '[' * 100_000, b'\xff\xfe'])
def test_other_json(text):
    with pytest.raises(ValueError, match=r'mine.onnx: its description is'):
        parse(text, 'mine.onnx')


def test_schema_and_tables():
    """What the schema allows is what is read, and docs/description.md explains each key."""
    definitions = SCHEMA['definitions']
    loader = definitions['input']['properties']['loader']['properties']
    assert {*loader['color_type']['enum']} == {*CV2_FLAGS, None}
    assert {*loader['imdecode_backend']['enum']} == {*DECODERS, None}
    interpolation = definitions['interpolation']
    names = {
        k: {*interpolation[k]['properties']['interpolation']['enum']} for k in ('then', 'else')
    }
    assert names['else'] == {*CV2_CODES}
    assert all(hasattr(Image, name.upper()) for name in names['then'])
    text = (ROOT / 'docs/description.md').read_text(encoding='utf-8')
    tables = [SCHEMA, *(definitions[k] for k in ('tensor', 'input', 'slide', 'output', 'decode'))]
    keys = {key for table in tables for key in table['properties']}
    assert not [key for key in keys if f'`{key}`' not in text]


def test_control_characters_are_escaped():
    with pytest.raises(ValueError) as caught:
        check(describe('classifier', activation='\x1b[2J\u202e\u200b'), '\x1b.onnx')
    assert str(caught.value).isprintable()


def test_match():
    about = describe('classifier')
    match(about, 'f', (1, 3, *SHAPE), [(1, 3)], ['image', 'logits'])
    match(about, 'f', (1, 3, 'h', 'w'), [None])
    with pytest.raises(ValueError, match=r'f: .* image is .*, the file '):
        match(about, 'f', (1, 3, 64, 64), [(1, 3)])
    with pytest.raises(ValueError, match='has 1 outputs, the file 2'):
        match(about, 'f', (1, 3, *SHAPE), [(1, 3), (1, 3)])
    with pytest.raises(ValueError, match='names logits, the file scores'):
        match(about, 'f', (1, 3, *SHAPE), [(1, 3)], ['image', 'scores'])


def test_differences():
    """What a tool finds between a file and a config; what one of them does not say is none."""
    about = describe('binary', inputs=[dict(describe('binary')['inputs'][0], mean=[1.0, 2, 3])])
    same = dict(classes=('a',), threshold=0.4, slide=None, reduce_zero_label=True)
    assert not [*find_differences(about, dict(same, inputs=[dict(mean=(1, 2, 3), std=[1] * 3)]))]
    (text,) = find_differences(about, dict(same, classes=['b']))
    assert text == "classes is ['a'] in the file, ['b'] in the config"
    texts = find_differences(about, dict(inputs=[dict(channels='BGR', mean=[1, 2, 4])]))
    assert [text.partition(' ')[0] for text in texts] == ['inputs[0].channels', 'inputs[0].mean']


def test_layouts():
    """Shapes are in the file's layout, results in NCHW."""
    about = describe('segmentor', outputs=[dict(output('logits', 1, 8, 12, 3), layout='NHWC')])
    about['inputs'][0].update(shape=[1, *SHAPE, 3], layout='NHWC')
    model = Model(lambda _: [np.ones((1, 3, 8, 12), np.float32)], (1, 3, *SHAPE), about)
    assert model.predict(np.zeros((20, 30, 3), np.uint8))['labels'].shape == (20, 30)


def paths(value, path=()):
    """List the places in a description."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items if isinstance(value, (dict, list)) else ():
        yield (*path, key)
        yield from paths(item, (*path, key)) if isinstance(item, (dict, list)) else ()


JUNK = st.one_of(
    st.sampled_from([..., None, True, 0, 1, -1, 7, 10**30, 1e-300, 'x', '', [], {}, [1], [[]]]),
    st.sampled_from([float('nan'), float('inf'), 8000, '\x1b', [0] * 4, {'shape': 3}, 1e9, -1e9]),
)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(task=st.sampled_from([*TASKS]), data=st.data())
def test_any_change_is_refused_or_read(task, data):
    """A description that passes gives results for outputs of its shapes, or one ValueError."""
    description = describe(task)
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.sampled_from([*paths(description)]))
        change(description, place, copy.deepcopy(data.draw(JUNK)))
    try:
        check(description, 'file')
        sizes = [np.prod(tensor['shape']) for tensor in description['outputs']]
        if max(sizes) > 10**6:
            return  # an engine has outputs of other sizes
        outputs = outputs_of(describe(task))
        model = Model(lambda _: outputs, (1, 3, *SHAPE), description, 'file')
        with np.errstate(over='ignore', invalid='ignore'):  # of large values in coders
            model.predict(np.zeros((20, 30, 3), np.uint8))
    except ValueError as error:
        assert str(error)
