"""Descriptions of small files, and ONNX files and ncnn folders that have them."""

import json

import numpy as np
import pytest

SHAPE = (32, 48)
NMS = dict(nms=dict(type='nms', iou_threshold=0.5), max_per_img=20, score_thr=0.1)
ANCHORS = [[[-8.0, -8.0, 8.0, 8.0], [-4.0, -8.0, 4.0, 8.0]], [[-16.0, -16.0, 16.0, 16.0]] * 2]
CODER = dict(type='DeltaXYWHBBoxCoder', means=[0.0] * 4, stds=[0.1, 0.1, 0.2, 0.2])
CODER.update(wh_ratio_clip=0.016, add_ctr_clamp=False, ctr_clamp=32)
DECODE = dict(
    strides=[8, 16],
    prior_type='AnchorGenerator',
    prior_params=dict(base_anchors=ANCHORS, center_offset=0.0),
    coder=CODER,
    score_activation='sigmoid',
    test_cfg=dict(NMS, nms_pre=50, min_bbox_size=0),
)


def output(name, *shape, **more):
    return dict(name=name, shape=[*shape], layout='NCHW' if len(shape) == 4 else None, **more)


def scored(name, *shape):
    return output(name, *shape, kind=name)


BOXES = output('boxes', 1, 5, 4, kind='boxes', scale=[1.0] * 4, box_format='xyxy')
TASKS = {
    'classifier': dict(outputs=[output('logits', 1, 3)], activation='softmax'),
    'probabilities': dict(
        outputs=[output('probabilities', 1, 3, kind='probabilities', activation='softmax')],
    ),
    'segmentor': dict(outputs=[output('logits', 1, 3, 8, 12)], activation='softmax'),
    'binary': dict(
        outputs=[output('logits', 1, 1, 8, 12)], activation='sigmoid', threshold=0.4, classes=['a']
    ),
    'labels': dict(outputs=[scored('labels', 1, *SHAPE)]),
    'windows': dict(
        outputs=[output('maps', 1, 3, *SHAPE, kind='probabilities', activation='softmax')],
        align_corners=True,
        slide=dict(
            stride=[20, 30],
            resize=dict(scale=[90, 70], keep_ratio=True, interpolation='bilinear', backend='cv2'),
            multiple=32,
            size_divisor=32,
            size=[32, 48],
            other_steps=[],
        ),
    ),
    'detector': dict(
        outputs=[
            *(output(f'cls_score{i + 1}', 1, 6, 4 // 2**i, 6 // 2**i) for i in range(2)),
            *(output(f'bbox_pred{i + 1}', 1, 8, 4 // 2**i, 6 // 2**i) for i in range(2)),
        ],
        activation='sigmoid',
        decode=DECODE,
    ),
    'boxes': dict(
        outputs=[BOXES, scored('scores', 1, 5), scored('labels', 1, 5)], test_cfg=NMS, nms='matrix'
    ),
    'candidates': dict(
        outputs=[dict(BOXES, shape=[9, 4]), scored('scores', 9, 3)], test_cfg=NMS, nms='outside'
    ),
    'instances': dict(
        outputs=[
            BOXES,
            scored('scores', 1, 5),
            scored('labels', 1, 5),
            scored('masks', 1, 5, 7, 7),
        ],
        test_cfg=NMS,
    ),
}


def describe(task, channels=3, **changes):
    """Describe a file that takes pixels as uint8."""
    image = dict(
        name='image',
        shape=[1, channels, *SHAPE],
        layout='NCHW',
        kind='image',
        channels='RGB' if channels == 3 else None,
        mean=None,
        std=None,
        padding=[124] * channels,
        letterbox='top-left',
        dtype='uint8',
        resize=dict(interpolation='bilinear', backend='cv2', shorter=None, crop=None),
        loader=dict(color_type=None, imdecode_backend=None, to_float32=False, bits=8),
    )
    about = dict(name='mine', part='model', shape=[*SHAPE], activation=None, inputs=[image])
    about.update(classes=['cat', 'dog', 'owl'], palette=[[0, 0, 255], [0, 255, 0], [255, 0, 0]])
    return json.loads(json.dumps({**about, **TASKS[task], **changes}))


def outputs_of(description, seed=0):
    """Draw outputs of the described shapes."""
    draw = np.random.default_rng(seed)
    values = []
    for tensor in description['outputs']:
        shape, kind = tensor['shape'], tensor.get('kind')
        if kind == 'boxes':
            corners = np.sort(draw.uniform(0, 32, (2, *shape[:-1], 2)), 0)
            values.append(np.concatenate([*corners], -1).astype(np.float32))
        elif kind == 'labels':
            values.append(draw.integers(0, 3, shape).astype(np.int32))
        else:
            high = 1 if kind else 3
            values.append(draw.uniform(-high * (not kind), high, shape).astype(np.float32))
    return values


def write_onnx(path, description, values=None):
    """Write a file that takes an image, and gives outputs that do not depend on it."""
    onnx = pytest.importorskip('onnx')  # not installed next to PyTorch 2.1
    pytest.importorskip('onnxruntime')
    from onnx import helper, numpy_helper

    values = outputs_of(description) if values is None else values
    (image,), nodes, constants, ends = description['inputs'], [], [], []
    name, shape = image['name'], image['shape']
    source = helper.make_tensor_value_info(name, onnx.TensorProto.UINT8, shape)
    sums = [
        helper.make_node('Cast', [name], ['floats'], to=onnx.TensorProto.FLOAT),
        helper.make_node('ReduceMean', ['floats'], ['mean'], keepdims=0),
        helper.make_node('Mul', ['mean', 'zero'], ['nothing']),
    ]
    constants.append(numpy_helper.from_array(np.zeros((), np.float32), 'zero'))
    for tensor, value in zip(description['outputs'], values, strict=True):
        end, dtype = tensor['name'], helper.np_dtype_to_tensor_dtype(value.dtype)
        constants.append(numpy_helper.from_array(value, f'{end}_values'))
        nodes.append(helper.make_node('Cast', ['nothing'], [f'{end}_zero'], to=dtype))
        nodes.append(helper.make_node('Add', [f'{end}_values', f'{end}_zero'], [end]))
        ends.append(helper.make_tensor_value_info(end, dtype, value.shape))
    graph = helper.make_graph([*sums, *nodes], 'mine', [source], ends, constants)
    opsets = [helper.make_opsetid('', 17)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    helper.set_model_props(model, dict(mmcare=json.dumps(description)))
    onnx.save(model, path)
    return path


def write_ncnn(path, description):
    """Write a folder whose network passes the image on."""
    path.mkdir()
    (image,), (end,) = description['inputs'], description['outputs']
    _, channels, height, width = image['shape']
    lines = ['7767517', '2 2', f'Input in 0 1 image 0={width} 1={height} 2={channels}']
    lines += [f'ReLU relu 1 1 image {end["name"]} 0=0.0']
    path.joinpath('model.ncnn.param').write_text('\n'.join(lines) + '\n')
    path.joinpath('model.ncnn.bin').write_bytes(b'')
    path.joinpath('mmcare.json').write_text(json.dumps(description))
    return path
