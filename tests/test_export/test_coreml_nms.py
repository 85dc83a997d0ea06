"""The NMS that follows a detector for Core ML: its fields are computed, and compared."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mmcare.export.backends.coreml_nms import (
    append_nms,
    check_nms,
    choose_rows,
    draw_rows,
    suppress,
)
from mmcare.export.errors import ExportError

ct = pytest.importorskip('coremltools')

NAMES = ('coordinates', 'confidence')
PATH = Path('mine.mlpackage')


def describe(classes=3, iou=0.5, score=0.3):
    return dict(
        outputs=[dict(name=name) for name in NAMES],
        classes=[f'class {index}' for index in range(classes)],
        test_cfg=dict(score_thr=score, nms=dict(type='nms', iou_threshold=iou)),
    )


def make_step(description):
    program = ct.proto.Model_pb2.Model(specificationVersion=7)
    for name, values in zip(NAMES, (4, len(description['classes'])), strict=True):
        array = program.description.output.add(name=name).type.multiArrayType
        array.shape.extend([9, values])
        array.dataType = ct.proto.FeatureTypes_pb2.ArrayFeatureType.FLOAT32
    network = SimpleNamespace(get_spec=lambda: program, weights_dir=None)
    return append_nms(network, description).get_spec().pipeline.models[1]


@pytest.mark.parametrize('classes', [1, 2, 80])
@pytest.mark.parametrize(('iou', 'score'), [(0.5, 0.3), (0.65, 0.001), (0.3, 0.0)])
def test_it_keeps_what_torchvision_keeps(classes, iou, score):
    description = describe(classes, iou, score)
    step = make_step(description)
    check_nms(PATH, step, description)
    boxes, scores = draw_rows(classes)
    rows = choose_rows(boxes, scores, description['test_cfg'])
    assert 50 < len(rows) < (scores.amax(1) > score).sum()
    kept = suppress(step, dict(coordinates=boxes.numpy(), confidence=scores.numpy()))
    np.testing.assert_array_equal(kept['confidence'], scores[rows].numpy())


def test_a_row_has_one_class():
    """A better row of another class drops nothing; a row that is dropped loses all classes."""
    boxes = np.array([[0.5, 0.5, 0.2, 0.2]] * 3, np.float32)
    scores = np.array([[0.6, 0.5], [0.1, 0.9], [0.2, 0.8]], np.float32)
    step = make_step(describe(2))
    inputs = dict(coordinates=boxes, confidence=scores)
    np.testing.assert_array_equal(suppress(step, inputs)['confidence'], scores[[1, 0]])
    for name, value, kept in (('confidenceThreshold', 0.7, 1), ('iouThreshold', 1.0, 3)):
        assert len(suppress(step, {**inputs, name: value})['coordinates']) == kept


WRONG = dict(
    score=lambda nms: setattr(nms, 'confidenceThreshold', 2.0),
    a_near_score=lambda nms: setattr(nms, 'confidenceThreshold', 0.31),
    iou=lambda nms: setattr(nms, 'iouThreshold', 0.55),
    all_classes_as_one=lambda nms: setattr(nms.pickTop, 'perClass', False),
    names=lambda nms: nms.stringClassLabels.vector.reverse(),
)


@pytest.mark.parametrize('change', WRONG.values(), ids=WRONG)
def test_a_wrong_nms_is_found(change):
    description = describe()
    step = make_step(description)
    change(step.nonMaximumSuppression)
    with pytest.raises(ExportError, match=r'the NMS of mine.mlpackage .* is not written'):
        check_nms(PATH, step, description)
