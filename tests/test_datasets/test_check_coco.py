"""Annotation files in COCO's format: what is malformed is named, what is left out is counted."""

import copy
import json
import re

import cv2
import numpy as np
import pytest
from PIL import Image

from mmcare.datasets import check_coco_file, check_png
from mmcare.datasets.check_coco import _decode_runs

CLASSES = ('person', 'kite')
CONTENT = dict(
    images=[dict(id=7, file_name='a.jpg', height=40, width=60)],
    categories=[dict(id=1, name='person'), dict(id=38, name='kite'), dict(id=90, name='other')],
    annotations=[
        dict(
            id=1,
            image_id=7,
            category_id=38,
            bbox=[5, 5, 10, 20],
            area=200,
            iscrowd=0,
            segmentation=[[5, 5, 15, 5, 15, 25, 5, 25]],
        ),
        dict(
            id=2,
            image_id=7,
            category_id=1,
            bbox=[0, 0, 60, 40],
            area=2400,
            iscrowd=1,
            segmentation=dict(size=[40, 60], counts=[0, 2400]),
        ),
    ],
)


def write(folder, change=None):
    content = copy.deepcopy(CONTENT)
    if change:
        change(content)
    file = folder / 'instances.json'
    file.write_text(json.dumps(content))
    return file


def put(value, *place):
    """A change: a value at a place of the tree."""

    def change(content):
        for key in place[:-1]:
            content = content[key]
        content[place[-1]] = value

    return change


def annotation(value, key, index=0):
    return put(value, 'annotations', index, key)


def test_what_is_right_passes(tmp_path):
    assert check_coco_file(write(tmp_path), CLASSES, with_masks=True) == []


@pytest.mark.parametrize(
    ('change', 'words'),
    [
        (put(None, 'images'), 'images is None, not a list'),
        (put(3, 'images', 0), r'images\[0\] is 3, not a dict'),
        (put(None, 'images', 0, 'id'), 'has the id None'),
        (put('wide', 'images', 0, 'width'), r'images\[0\] \(id 7\) has the width .wide.'),
        (put(float('nan'), 'images', 0, 'height'), 'has the height nan'),
        (put(5, 'images', 0, 'file_name'), 'has the file_name 5'),
        (put('bird', 'categories', 0, 'name'), 'the classes person are no categories'),
        (put(38, 'categories', 0, 'id'), 'categories has the id 38 2 times'),
        (lambda content: content['categories'].reverse(), "label 0 would be 'kite', not 'person'"),
        (lambda content: content.pop('annotations'), 'annotations is None'),
        (annotation(1, 'id', 1), 'annotations has the id 1 2 times'),
        (annotation(12, 'category_id'), r'annotations\[0\] \(id 1\) has the category_id 12'),
        (annotation([5, 5, 10], 'bbox'), r'has the bbox \[5, 5, 10\]'),
        (annotation([5, 5, float('nan'), 5], 'bbox'), 'has the bbox'),
        (annotation([5, 5, 1e30, 5], 'bbox'), 'has the bbox'),
        (annotation(['5', 5, 5, 5], 'bbox'), 'has the bbox'),
        (annotation('much', 'area'), 'has the area'),
        (annotation('no', 'iscrowd'), "has iscrowd 'no', not 0 or 1"),
        (annotation(None, 'segmentation'), 'has the segmentation None'),
        (annotation([[1, 2, 3, float('inf'), 5, 6]], 'segmentation'), 'has the polygon'),
        (annotation([[1, 2, 3, 'x', 5, 6]], 'segmentation'), 'has the polygon'),
        (annotation(dict(size=[4, 6], counts=[24]), 'segmentation'), r'a mask of size \[4, 6\]'),
        (annotation(dict(size=[40, 60], counts=[9]), 'segmentation'), 'do not fill its mask'),
        (annotation(dict(size=[40, 60], counts='zz'), 'segmentation'), 'do not fill its mask'),
    ],
)
def test_what_is_malformed_is_named(tmp_path, change, words):
    file = write(tmp_path, change)
    with pytest.raises(ValueError, match=rf'instances\.json.*{words}'):
        check_coco_file(file, CLASSES, with_masks=True)


@pytest.mark.parametrize('text', ['', '{"images": [', '[1]', '\x00', '[' * 100_000, '1' * 5000])
def test_no_json(tmp_path, text):
    (tmp_path / 'broken.json').write_text(text)
    with pytest.raises(ValueError, match=r'broken\.json'):
        check_coco_file(tmp_path / 'broken.json')


@pytest.mark.parametrize(
    ('change', 'words'),
    [
        (annotation([70, 5, 10, 10], 'bbox'), '1 boxes lie outside'),
        (annotation(0, 'area'), r'have no area; mmdet leaves them out \(id 1\)'),
        (annotation(8, 'image_id'), '1 annotations belong to no image'),
        (annotation([[1, 2, 3, 4]], 'segmentation'), '1 polygons are not of three'),
    ],
)
def test_what_is_left_out_is_counted(tmp_path, change, words):
    (line,) = check_coco_file(write(tmp_path, change), CLASSES, with_masks=True)
    assert 'instances.json' in line
    assert re.search(words, line)


def test_test_data_have_no_annotations(tmp_path):
    file = write(tmp_path, lambda content: content.pop('annotations'))
    assert check_coco_file(file, CLASSES, test_mode=True) == []


def test_compressed_runs():
    """As pycocotools writes them."""
    mask = pytest.importorskip('pycocotools.mask')
    rng = np.random.default_rng(0)
    for _ in range(20):
        height, width = rng.integers(1, 90, 2)
        pixels = np.asfortranarray(rng.random((height, width)) < rng.random(), np.uint8)
        runs = _decode_runs(mask.encode(pixels)['counts'].decode())
        values = np.repeat(np.arange(len(runs)) % 2, runs).reshape(pixels.shape, order='F')
        assert np.array_equal(values, pixels)
    assert _decode_runs('P') is None


def test_damaged_label_map(tmp_path):
    """A flipped bit in the pixels, which Pillow decodes without a word, or with one of its own."""
    file = tmp_path / 'labels.png'
    labels = np.random.default_rng(0).integers(0, 150, (40, 60), np.uint8)
    cv2.imwrite(str(file), labels)
    check_png(file)
    content = file.read_bytes()
    for place in range(60, len(content) - 20, 97):
        damaged = bytearray(content)
        damaged[place] ^= 1
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r'labels\.png'):
            check_png(file)


def test_label_map_of_few_bits(tmp_path):
    """Pillow reads 3 of 15 as 51 of 255."""
    file = tmp_path / 'labels.png'
    Image.fromarray(np.full((4, 6), 1, bool)).save(file)
    with pytest.raises(ValueError, match='grey values of 1 bits'):
        check_png(file)
    cv2.imwrite(str(file), np.zeros((1, 6), np.uint8))
    with pytest.raises(ValueError, match='is 6 x 1; mmseg does not read'):
        check_png(file)
