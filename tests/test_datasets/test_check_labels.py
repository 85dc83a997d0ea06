"""Label maps that do not fit are named; those that fit pass unchanged."""

import cv2
import numpy as np
import pytest
from mmengine.registry import TRANSFORMS

from mmcare.datasets import CheckLabels


def loaded(labels, size=(6, 8), path='annotations/a.png', **more):
    """What a pipeline hands on behind LoadAnnotations."""
    return dict(
        img_path='images/a.jpg', ori_shape=size, seg_map_path=path, gt_seg_map=labels, **more
    )


def label_map(value=149, size=(6, 8)):
    labels = np.zeros(size, np.uint8)
    labels[2, 3] = value
    return labels


@pytest.mark.parametrize('name', ['CheckLabels', 'mmcare.CheckLabels'])
def test_built_by_name(name):
    check = TRANSFORMS.build(dict(type=name, num_classes=3))
    assert repr(check) == 'CheckLabels(num_classes=3, ignore_index=255, enabled=True)'


@pytest.mark.parametrize('largest', [0, 149, 255])
def test_what_fits_passes_unchanged(largest):
    results = loaded(label_map(largest))
    labels = results['gt_seg_map'].copy()
    assert CheckLabels(150)(results) is results
    assert np.array_equal(results['gt_seg_map'], labels)


def test_everything_ignored():
    assert CheckLabels(150)(loaded(np.full((6, 8), 255, np.uint8)))


@pytest.mark.parametrize(
    ('reduce_zero_label', 'words'),
    [
        (
            True,
            r"'annotations/a\.png' has the label 150 \(151 in the file, before reduce_zero_label\)",
        ),
        (False, r"'annotations/a\.png' has the label 150; allowed are 0 to 149, and 255"),
    ],
)
def test_label_beyond_the_classes(reduce_zero_label, words):
    with pytest.raises(ValueError, match=words):
        CheckLabels(150)(loaded(label_map(150), reduce_zero_label=reduce_zero_label))


def test_another_label_to_ignore():
    results = loaded(label_map(7))
    assert CheckLabels(5, ignore_index=7)(results)
    with pytest.raises(ValueError, match='has the label 7; allowed are 0 to 4, and 255'):
        CheckLabels(5)(results)


@pytest.mark.parametrize(('shape', 'described'), [((8, 6), '6 x 8'), ((6, 8, 3), '8 x 6 x 3')])
def test_another_size_than_the_image(shape, described):
    words = rf"'annotations/a\.png' is {described}, its image 'images/a\.jpg' is 8 x 6"
    with pytest.raises(ValueError, match=words):
        CheckLabels(150)(loaded(np.zeros(shape, np.uint8)))


@pytest.mark.parametrize('label', [255, 256, 300])
def test_labels_of_more_than_8_bits(tmp_path, label):
    """300 is read as 44, a valid class."""
    path = tmp_path / 'deep.png'
    cv2.imwrite(str(path), np.full((6, 8), label, np.uint16))
    results = loaded(np.full((6, 8), label % 256, np.uint8), path=str(path))
    if label == 255:
        assert CheckLabels(150)(results)
    else:
        with pytest.raises(ValueError, match=rf'deep\.png.* has the label {label}'):
            CheckLabels(150)(results)


def test_images_without_annotation_pass():
    results = dict(img_path='images/a.jpg', ori_shape=(6, 8))
    assert CheckLabels(150)(results) is results


def test_before_the_annotation_is_loaded():
    results = loaded(label_map())
    del results['gt_seg_map']
    with pytest.raises(ValueError, match='belongs right behind LoadAnnotations'):
        CheckLabels(150)(results)


def test_switched_off():
    assert CheckLabels(150, enabled=False)(loaded(label_map(200, size=(4, 4))))
