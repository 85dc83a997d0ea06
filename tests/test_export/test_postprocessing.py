"""Results in files: probabilities, maps of labels, and boxes are those of the toolboxes."""

import zipfile
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from export_helpers import SHAPE
from mmengine.config import Config

from mmcare.export import export_model, load_model, open_exported
from mmcare.export.backends import BACKENDS, tflite_metadata
from mmcare.export.backends.coreml_nms import ON_MAC, choose_rows
from mmcare.export.errors import ExportError
from mmcare.export.loading import IMAGENET
from mmcare.export.plain_operators import nms_mask
from mmcare.export.tasks import OutputFormat
from mmcare.export.tasks.one_stage_detector import describe_decoding
from mmcare.export.tasks.one_stage_results import Boxes, OwnBoxes, read_test_cfg
from mmcare.export.tasks.segmentor import LabelMap
from mmcare_runtime.results import decode_boxes, read_detections

pytest.importorskip('coremltools')
pytest.importorskip('mmseg')
import coremltools as ct
from mmseg.structures import SegDataSample
from test_decoding import HEADS, load
from test_whole_models import write_config

CLASSES = ['a', 'b', 'c', 'd', 'e']
FORMATS = [backend.output_format for backend in BACKENDS.values()]


def detector(folder, name='RetinaNet', std=0.1, classes=2):
    source = load(folder, name, classes)
    head = source.task.head
    head.test_cfg.update(
        nms_pre=-1, min_bbox_size=0, score_thr=0.3, nms=dict(type='nms', iou_threshold=0.5)
    )
    head.test_cfg.max_per_img = 20
    for parameter in head.parameters():
        if parameter.dim() > 1:  # so that scores differ
            parameter.normal_(0, std)
    return source


@pytest.mark.parametrize('name', ['RetinaNet', 'FCOS', 'RTMDet', 'ATSS'])
@pytest.mark.parametrize('output_format', FORMATS, ids=list(BACKENDS))
def test_boxes_are_those_of_mmdet(tmp_path, name, output_format):
    task = detector(tmp_path, name, 0.3).task
    head, raw = task.head, task(torch.randn(1, 3, *SHAPE))
    maps = [list(raw[start : start + 3]) for start in range(0, len(raw), 3)]
    meta = dict(img_shape=SHAPE, scale_factor=(1.0, 1.0))
    (expected,) = head.predict_by_feat(*maps, batch_img_metas=[meta])
    decode, arrays = describe_decoding(head)['decode'], [x.numpy() for x in raw]
    by_description = decode_boxes(arrays, decode, (0, 0, *SHAPE))
    for key, theirs in dict(boxes='bboxes', scores='scores', labels='labels').items():
        mine = torch.from_numpy(by_description[key])
        torch.testing.assert_close(mine, expected[theirs], atol=1e-4, rtol=0)
    expected = expected[expected.scores > 0.3]  # mmdet's threshold ignores the centerness
    decoder = Boxes(head, raw, SHAPE, dict(max_detections=20), output_format)
    found = [x.numpy() for x in decoder(raw)]
    assert decoder.max_error(raw, found) < 1e-5
    outputs = [
        dict(entry, shape=[*x.shape]) for entry, x in zip(decoder.outputs, found, strict=True)
    ]
    description = dict(decoder.metadata, outputs=outputs)
    detections = map(torch.from_numpy, read_detections(description, found)[:3])
    boxes, scores, labels = detections
    if description['nms'] in ('matrix', 'operator'):
        assert outputs[0]['shape'] == [1, 20, 4]
        wanted = expected.bboxes, expected.scores, expected.labels
        for mine, theirs in zip((boxes, scores, labels), wanted, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0, check_dtype=False)
    else:
        everything = dict(head.test_cfg, nms_pre=100_000, min_bbox_size=-1)
        (expected,) = head.predict_by_feat(
            *maps, batch_img_metas=[meta], cfg=Config(everything), with_nms=False
        )
        assert len(boxes) == (expected.scores > 0.3).sum() > 5
        order = [torch.argsort(x, descending=True)[:5] for x in (scores, expected.scores)]
        torch.testing.assert_close(boxes[order[0]], expected.bboxes[order[1]])


def test_more_boxes_than_the_config_keeps(tmp_path):
    """Readers of the file keep as many boxes as were asked for, by default as the config."""
    task = detector(tmp_path).task
    raw = task(torch.randn(1, 3, *SHAPE))
    for options, kept in ((dict(max_detections=30), 30), (dict(max_detections=9), 9), ({}, 20)):
        metadata = task.post_process(raw, SHAPE, OutputFormat(), options).metadata
        assert metadata['test_cfg']['max_per_img'] == kept


def test_nms_of_long_chains():
    """Each box overlaps the next alone: every other one stays."""
    starts = torch.arange(14.0)[:, None] / 28
    boxes = torch.cat([starts, 0 * starts, starts + 0.1, 0 * starts + 1], 1)
    kept = nms_mask(boxes, 0.4, torch.zeros(14))
    assert kept.tolist() == [1.0, 0.0] * 7


SPOILT = dict(
    moved=lambda boxes, scores, labels: (boxes + 5 * torch.eye(20)[:, :1], scores, labels),
    doubled=lambda *results: [torch.cat([x[:, :1], x[:, :1], x[:, 2:]], 1) for x in results],
    best_missing=lambda *results: [torch.cat([x[:, 1:], 0 * x[:, :1]], 1) for x in results],
    other_classes=lambda boxes, scores, labels: (boxes, scores, 1 - labels),
    nan=lambda boxes, scores, labels: (boxes, scores * float('nan'), labels),
)


@pytest.mark.parametrize('spoil', SPOILT.values(), ids=SPOILT)
def test_wrong_boxes_are_found(tmp_path, spoil):
    task = detector(tmp_path).task
    raw = task(torch.randn(1, 3, *SHAPE))
    decoder = Boxes(task.head, raw, SHAPE, dict(max_detections=20), OutputFormat())
    assert not decoder.max_error(raw, spoil(*decoder(raw))) < 1e-2


def test_classes_with_nearly_the_same_score(tmp_path):
    """YOLOX's boxes have one class each: rounding may choose either of two, but not neither."""
    task = detector(tmp_path, 'YOLOX').task
    raw = [*task(torch.randn(1, 3, *SHAPE))]
    decoder = OwnBoxes(task.head, raw, SHAPE, {}, BACKENDS['coreml'].output_format)
    for difference, either in (1e-3, True), (1.0, False):
        raw[:3] = [torch.cat([x[:, :1], x[:, :1] - difference], 1) for x in raw[:3]]
        boxes, scores = (x.numpy() for x in decoder(raw))
        assert ((scores > 0).sum(1) == 1).all()
        assert decoder.max_error(raw, [boxes, scores]) == 0
        for other in scores[:, ::-1].copy(), scores.sum(1, keepdims=True).repeat(2, 1):
            assert (decoder.max_error(raw, [boxes, other]) < 1e-3) == either
        for wrong in 0 * scores, scores * float('nan'), scores + 0.1 * (scores > 0):
            assert not decoder.max_error(raw, [boxes, wrong]) < 1e-2
        assert decoder.max_error(raw, [boxes + 0.1, scores]) > 1e-2


@pytest.mark.parametrize('channels', [1, 5])
def test_labels_are_those_of_mmseg(tmp_path, channels):
    one = dict(num_classes=2, out_channels=1, threshold=0.45) if channels == 1 else {}
    path = write_config(tmp_path, 'fpn', **{f'model.decode_head.{k}': v for k, v in one.items()})
    model = load_model(path, part='model').task.model
    logits = torch.randn(1, channels, 16, 24)
    logits[:, -1] = logits[:, 0] - 1e-6  # nearly as good, and its label is far from the best
    meta = [dict(img_shape=SHAPE)]
    resized = model.decode_head.predict_by_feat(logits, meta)
    sample = SegDataSample(metainfo=dict(ori_shape=SHAPE, img_shape=SHAPE))
    (expected,) = model.postprocess_result(resized, [sample])
    for dtype in (torch.uint8, torch.int32, torch.float32):
        decoder = LabelMap(model.decode_head, channels, SHAPE, dtype)
        (found,) = decoder([logits])
        assert found.dtype == dtype and torch.equal(found.long(), expected.pred_sem_seg.data.long())
        assert decoder.max_error([logits], [found.numpy()]) < 1e-6
        assert decoder.max_error([logits], [(found.numpy() + 1) % max(channels, 2)]) > 0.01


def source_of(name, folder):
    if name in HEADS:
        source = detector(folder, name)
    else:
        source = load_model(write_config(folder, name), part='model')
    classes = CLASSES[:2] if name in HEADS else CLASSES
    about = dict(classes=classes, palette=[[1, 2, 255]] * len(classes))
    return replace(source, normalization=IMAGENET, metadata=about)


@pytest.mark.conversion
@pytest.mark.parametrize(
    ('name', 'backend', 'options', 'kinds'),
    [
        ('classifier', 'onnx', {}, 'probabilities'),
        ('fpn', 'litert', {}, 'labels'),
        ('fpn', 'ncnn', {}, 'labels'),
        ('RetinaNet', 'onnx', {}, 'boxes scores labels'),
        ('RetinaNet', 'litert', {}, 'boxes scores labels count'),
        ('RetinaNet', 'ncnn', {}, 'boxes scores'),
        ('RTMDet', 'coreml', {}, 'boxes scores'),
        ('ATSS', 'coreml', {}, 'boxes scores'),  # group norms
        ('RetinaNet', 'executorch', {}, 'boxes scores labels'),
        pytest.param(
            *('RetinaNet', 'executorch', dict(precision='int8'), 'boxes scores labels'),
            marks=pytest.mark.slow,
        ),
        ('RetinaNet', 'executorch-coreml', {}, 'boxes scores'),
    ],
)
def test_export(tmp_path, pictures, name, backend, options, kinds):
    """The export itself compares results with PyTorch's, or raises; test_core_ml has others."""
    for package in BACKENDS[backend].packages:
        pytest.importorskip(package)
    source = source_of(name, tmp_path)
    options = dict(options, outputs='decoded', images=pictures)
    report = export_model(source, tmp_path, SHAPE, (backend,), **options)[backend]
    assert '_model_64x96_decoded' in report['file'] and 'decode' not in report
    assert [output['kind'] for output in report['outputs']] == kinds.split()
    opened = open_exported(tmp_path / report['file'])
    outputs = opened.run(np.full((1, 3, *SHAPE), 0.5, np.float32))
    shapes = [output['shape'] for output in report['outputs']]
    assert [[*output.shape] for output in outputs] == shapes
    assert opened.description['outputs'] == report['outputs']
    if backend == 'litert' and name == 'fpn':
        assert outputs[0].dtype == np.uint8


@pytest.mark.conversion
def test_core_ml_says_what_vision_and_xcode_look_for(tmp_path):
    options = dict(shape=SHAPE, formats=('coreml',), outputs='decoded', author='A', license='B')
    specs = {}
    for name in ('classifier', 'fpn', 'RetinaNet'):
        file = export_model(source_of(name, tmp_path), tmp_path, **options)['coreml']['file']
        specs[name] = ct.utils.load_spec(str(tmp_path / file))
        metadata = specs[name].description.metadata
        assert (metadata.author, metadata.license) == ('A', 'B')
        assert metadata.shortDescription.endswith(': model')
        assert 'CARE' not in metadata.shortDescription
    assert specs['classifier'].description.predictedFeatureName == 'classLabel'
    preview = specs['fpn'].description.metadata.userDefined
    assert preview['com.apple.coreml.model.preview.type'] == 'imageSegmenter'
    assert '#0102ff' in preview['com.apple.coreml.model.preview.params']
    program, nms = specs['RetinaNet'].pipeline.models
    assert [x.name for x in nms.description.output] == ['coordinates', 'confidence']
    assert [x.name for x in program.description.output] == ['coordinates', 'confidence']
    settings = nms.nonMaximumSuppression
    assert [*settings.stringClassLabels.vector] == ['a', 'b'] and settings.iouThreshold == 0.5
    image, *thresholds = specs['RetinaNet'].description.input
    assert image.name == 'image' and all(x.type.isOptional for x in thresholds)
    assert [x.name for x in thresholds] == ['iouThreshold', 'confidenceThreshold']


@pytest.mark.conversion
@pytest.mark.skipif(ON_MAC, reason='Core ML computes it there')
def test_the_nms_of_a_file_for_core_ml_is_computed(tmp_path):
    """A file whose NMS drops all boxes finds nothing; the export refuses it."""
    source = source_of('RetinaNet', tmp_path)
    options = dict(shape=SHAPE, formats=('coreml',), outputs='decoded', precision='float32')
    report = export_model(source, tmp_path, **options)['coreml']
    path, backend = tmp_path / report['file'], BACKENDS['coreml']
    image = np.random.default_rng(0).standard_normal((1, 3, *SHAPE), np.float32) * 50 + 110
    boxes, scores = map(torch.from_numpy, backend.open_network(path, report).run(image))
    rows = choose_rows(boxes, scores, report['test_cfg'])
    found = open_exported(path).run(image)
    assert 1 < len(rows) < (scores.amax(1) > 0.3).sum() and len(found[0]) == len(boxes)
    for array, values in zip(found, (boxes, scores), strict=True):
        np.testing.assert_array_equal(array[: len(rows)], values[rows].numpy())
        assert not array[len(rows) :].any()
    model = ct.models.MLModel(str(path), skip_model_load=True)
    spec = model.get_spec()
    spec.pipeline.models[1].nonMaximumSuppression.confidenceThreshold = 2.0
    other = tmp_path / 'other.mlpackage'
    ct.models.MLModel(spec, weights_dir=model.weights_dir, skip_model_load=True).save(str(other))
    assert not np.any(open_exported(other, verify=False).run(image)[1])
    with pytest.raises(ExportError, match='keeps 0 of 512 boxes'):
        backend.check_rest(other, report)


@pytest.mark.conversion
def test_names_of_classes(tmp_path):
    """Of two classes of one name, Core ML would give one; a line of labels.txt is a class."""
    source = source_of('classifier', tmp_path)
    source = replace(source, metadata=dict(classes=['a', 'crane', 'b\nc', 'crane', 'd']))
    options = dict(outputs='decoded', formats=('coreml',))
    report = export_model(source, tmp_path, SHAPE, **options)['coreml']
    spec = ct.utils.load_spec(str(tmp_path / report['file'])).SerializeToString()
    assert b'crane (1)' in spec and b'crane (3)' in spec and report['classes'].count('crane') == 2
    (tmp_path / 'file').write_bytes(b'')
    tflite_metadata.append_labels(tmp_path / 'file', report)
    with zipfile.ZipFile(tmp_path / 'file') as archive:
        lines = archive.read('labels.txt').decode().splitlines()
    assert lines == ['a', 'crane', 'b c', 'crane', 'd']


@pytest.mark.conversion
def test_labels_of_many_classes_in_float16(tmp_path):
    """float16 has not all integers above 2048; a place among 40,320 scores gives the label."""
    pytest.importorskip('litert_torch')
    source = detector(tmp_path, classes=80)
    report = export_model(source, tmp_path, SHAPE, ('litert',), outputs='decoded')['litert']
    assert max(report['max_rel_error_float16'].values()) < 2e-2


def test_what_cannot_be_decoded(tmp_path):
    soft = detector(tmp_path)
    soft.task.head.test_cfg.nms.type = 'soft_nms'
    own = load(tmp_path, 'ATSS')
    own.task.head._bbox_post_process = lambda results, *_, **__: results
    for source, options, words in (
        (load_model('s0'), dict(outputs='decoded'), "is for part='model'"),
        (own, dict(outputs='decoded'), 'ATSSHead has a decoding of its own'),
        (own, dict(letterbox='center'), 'raw outputs, at the top left'),
        (load_model('s0'), dict(letterbox='center'), "is for part='model'"),
        (load_model('s0'), dict(max_detections=9), "max_detections= is for outputs='decoded'"),
        (detector(tmp_path), dict(outputs='decoded', max_detections=0), 'and at least 1'),
        (soft, dict(outputs='decoded'), 'RetinaHead .* not the plain NMS'),
        (load_model('s0'), dict(outputs='decode'), 'none of raw, decoded'),
        (load_model('s0'), dict(input_kind='pixels'), 'none of image, tensor'),
        (detector(tmp_path), dict(outputs='decoded', formats=('ncnn',), max_detections=9), 'onnx'),
    ):
        with pytest.raises(ValueError, match=words):
            export_model(
                source, tmp_path / 'out', SHAPE, **dict(dict(formats=('onnx',)), **options)
            )
    assert not (tmp_path / 'out').exists()


def test_nms_may_be_the_function():
    """As it is in mmdet's configs of pure Python."""
    from mmcv.ops import nms

    by_name = read_test_cfg(dict(score_thr=0.1, nms=dict(type='nms', iou_threshold=0.5)))
    assert by_name == read_test_cfg(dict(score_thr=0.1, nms=dict(type=nms, iou_threshold=0.5)))
    for others in (None, dict(nms=None), dict(nms=dict(type=len, iou_threshold=0.5))):
        assert read_test_cfg(others) is None


def test_metadata_of_tflite():
    """None for files of BGR; MediaPipe applies the activation that the metadata name."""
    logits = dict(name='logits', layout='NHWC')

    def write(channels, activation):
        image = dict(kind='image', channels=channels)
        about = dict(name='a', inputs=[image], outputs=[logits], activation=activation)
        return tflite_metadata.write_metadata(about, '', '')

    assert write('BGR', 'softmax') is None
    assert write('RGB', 'softmax') != write('RGB', 'sigmoid')


@pytest.mark.parametrize('name', ['classifier', 'fpn', 'RetinaNet'])
def test_mediapipe_opens_tflite(tmp_path, name):
    """It takes bytes, enlarges logits itself, and reads names from the metadata."""
    mediapipe = pytest.importorskip('mediapipe')
    from mediapipe.tasks.python import vision

    outputs = 'raw' if name == 'fpn' else 'decoded'
    source = source_of(name, tmp_path)
    report = export_model(source, tmp_path, SHAPE, ('litert',), 'image', outputs)['litert']
    path, pixels = tmp_path / report['file'], torch.randint(0, 256, (*SHAPE, 3)).byte()
    kind, verb = dict(
        classifier=('ImageClassifier', 'classify'),
        fpn=('ImageSegmenter', 'segment'),
        RetinaNet=('ObjectDetector', 'detect'),
    )[name]
    base = mediapipe.tasks.BaseOptions(model_asset_path=str(path))
    options = dict(output_category_mask=True) if name == 'fpn' else dict(max_results=5)
    options = getattr(vision, f'{kind}Options')(base_options=base, **options)
    image = mediapipe.Image(image_format=mediapipe.ImageFormat.SRGB, data=pixels.numpy())
    with getattr(vision, kind).create_from_options(options) as task:
        found = getattr(task, verb)(image)
        labels = getattr(task, 'labels', None)
    program = open_exported(path)
    if name == 'fpn':
        (logits,) = map(torch.from_numpy, program.run(pixels.permute(2, 0, 1)[None].numpy()))
        enlarge = partial(torch.nn.functional.interpolate, size=SHAPE, mode='bilinear')
        (aligned,), (shares,) = enlarge(logits, align_corners=True), enlarge(logits.softmax(1))
        mask = found.category_mask.numpy_view().squeeze()
        assert labels == CLASSES and (mask == aligned.argmax(0).numpy()).mean() > 0.999
        masks = [one.numpy_view().squeeze() for one in found.confidence_masks]
        np.testing.assert_allclose(masks, shares, atol=1e-5)
        return
    predicted = program.predict(pixels.flip(2).numpy())
    if name == 'classifier':
        best = found.classifications[0].categories
        assert [one.category_name for one in best] == [CLASSES[i] for i in predicted['labels']]
    else:
        best = [one.categories[0] for one in found.detections]
        boxes = [one.bounding_box for one in found.detections]
        boxes = [[b.origin_x, b.origin_y, b.width, b.height] for b in boxes]
        low, high = np.split(predicted['boxes'][:5], 2, 1)
        np.testing.assert_allclose(boxes, np.hstack([low, high - low]), atol=1.5)
        assert [one.category_name for one in best] == [CLASSES[i] for i in predicted['labels'][:5]]
    np.testing.assert_allclose([one.score for one in best], predicted['scores'][:5], atol=0.01)
