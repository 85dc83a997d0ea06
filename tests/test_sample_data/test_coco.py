import json
from itertools import combinations

import cv2
import numpy as np
import pytest
from pycocotools.coco import COCO

from mmcare.sample_data import make_coco
from mmcare.sample_data.coco import CATEGORY_SHAPES, arrange
from mmcare.sample_data.coco_categories import COCO_CATEGORIES
from mmcare.sample_data.masks import measure_area


def by_image(content):
    scenes = {image['id']: [] for image in content['images']}
    for annotation in content['annotations']:
        scenes[annotation['image_id']].append(annotation)
    return scenes


def objects(content):
    return [annotation for annotation in content['annotations'] if not annotation['iscrowd']]


@pytest.fixture(scope='module')
def coco(coco_directory):
    return COCO(str(coco_directory / 'annotations/instances_train2017.json'))


@pytest.fixture(scope='module')
def pictures(coco_directory, coco_train):
    return {
        image['id']: cv2.imread(str(coco_directory / 'train2017' / image['file_name']))
        for image in coco_train['images']
    }


def test_layout(coco_directory, read_all_files):
    files = set(read_all_files(coco_directory))
    expected = {'preview.png'}
    image_ids, annotation_ids = [], []
    for split, count in (('train2017', 80), ('val2017', 16)):
        name = f'annotations/instances_{split}.json'
        content = json.loads((coco_directory / name).read_text())
        assert len(content['images']) == count
        for image in content['images']:
            assert image['file_name'] == f'{image["id"]:012d}.jpg'
            picture = cv2.imread(str(coco_directory / split / image['file_name']))
            assert picture.shape == (image['height'], image['width'], 3) == (192, 192, 3)
            expected.add(f'{split}/{image["file_name"]}')
        expected.add(name)
        image_ids += [image['id'] for image in content['images']]
        annotation_ids += [annotation['id'] for annotation in content['annotations']]
    assert files == expected
    assert len(set(image_ids)) == 96
    assert len(set(annotation_ids)) == len(annotation_ids)


def test_all_categories_in_order_with_their_ids(coco_train):
    ids = [category['id'] for category in coco_train['categories']]
    assert coco_train['categories'] == COCO_CATEGORIES
    assert ids == sorted(ids)
    assert set(range(1, 91)) - set(ids) == {12, 26, 29, 30, 45, 66, 68, 69, 71, 83}
    coco_dataset = pytest.importorskip('mmdet.datasets').CocoDataset
    names = tuple(category['name'] for category in coco_train['categories'])
    assert names == coco_dataset.METAINFO['classes']


def test_only_three_categories_occur_about_equally_often(coco_train):
    used = [annotation['category_id'] for annotation in objects(coco_train)]
    names = {category['id']: category['name'] for category in COCO_CATEGORIES}
    counts = {names[number]: used.count(number) for number in set(used)}
    assert counts.keys() == CATEGORY_SHAPES.keys()
    # Shapes that cover more are rejected a little more often.
    assert min(counts.values()) > 0.6 * max(counts.values())


def test_same_seed_gives_the_same_bytes(tmp_path, read_all_files):
    for name, seed in (('first', 5), ('second', 5), ('other', 6)):
        make_coco(tmp_path / name, seed=seed, train=3, val=2, size=96)
    first = read_all_files(tmp_path / 'first')
    other = read_all_files(tmp_path / 'other')
    assert first == read_all_files(tmp_path / 'second')
    assert first.keys() == other.keys()
    assert not set(first.values()) & set(other.values())
    # No scene of one split comes again in the other.
    assert len({data for name, data in first.items() if name.endswith('.jpg')}) == 5


def test_a_larger_set_begins_with_the_smaller_one(tmp_path, read_all_files):
    make_coco(tmp_path / 'small', train=2, val=1, size=96)
    make_coco(tmp_path / 'large', train=4, val=1, size=96)
    small, large = (read_all_files(tmp_path / name) for name in ('small', 'large'))
    for number in (1, 2):
        assert small[f'train2017/{number:012d}.jpg'] == large[f'train2017/{number:012d}.jpg']
    assert small[f'val2017/{3:012d}.jpg'] == large[f'val2017/{5:012d}.jpg']


def test_numbers_of_objects(coco_train):
    counts = [
        sum(not annotation['iscrowd'] for annotation in scene)
        for scene in by_image(coco_train).values()
    ]
    assert set(counts) == {2, 3, 4, 5, 6}


@pytest.mark.parametrize(('size', 'largest'), [(192, 80), (64, 32)])
def test_sizes_and_visible_shares(size, largest):
    sizes, shares = [], []
    for seed in range(30):
        for layer in arrange(np.random.default_rng(seed), size, crowd=seed % 2 == 0):
            shares.append(measure_area(layer.visible) / layer.full_area)
            if not layer.is_crowd:
                sizes.append(np.ptp(layer.outlines[0], axis=0).max())
    assert 12 <= min(sizes) < 16
    assert largest - 4 < max(sizes) <= largest
    assert 0.75 <= min(shares) < 0.85


def test_polygons_boxes_and_areas_agree(coco, coco_train):
    parts = []
    for annotation in objects(coco_train):
        x, y, width, height = annotation['bbox']
        polygons = [np.reshape(polygon, (-1, 2)) for polygon in annotation['segmentation']]
        points = np.concatenate(polygons)
        np.testing.assert_allclose(points.min(axis=0), (x, y), atol=0.3)
        np.testing.assert_allclose(points.max(axis=0), (x + width, y + height), atol=0.3)
        assert points.min() >= 0
        assert points.max() <= 192
        exact = sum(cv2.contourArea(polygon.astype(np.float32)) for polygon in polygons)
        assert exact == pytest.approx(annotation['area'], rel=0.05, abs=5)
        pixels = coco.annToMask(annotation).sum()
        assert pixels == pytest.approx(annotation['area'], rel=0.15, abs=5)
        parts.append(len(polygons))
    assert set(parts) >= {1, 2}


def test_visible_parts_of_overlapping_objects_do_not_overlap(coco, coco_train):
    overlapping_boxes = 0
    for scene in by_image(coco_train).values():
        masks = [coco.annToMask(annotation) for annotation in scene]
        boxes = [annotation['bbox'] for annotation in scene if not annotation['iscrowd']]
        for one, other in combinations(masks, 2):
            # The polygons of neighbours share the pixels on their common border.
            assert (one & other).sum() <= 0.15 * min(one.sum(), other.sum()) + 5
        overlapping_boxes += any(
            abs(2 * a[0] + a[2] - 2 * b[0] - b[2]) < a[2] + b[2]
            and abs(2 * a[1] + a[3] - 2 * b[1] - b[3]) < a[3] + b[3]
            for a, b in combinations(boxes, 2)
        )
    assert overlapping_boxes > 40


def test_annotated_outlines_lie_where_the_picture_changes(coco, coco_train, pictures):
    kernel = np.ones((3, 3), np.uint8)
    differences = []
    for annotation in objects(coco_train):
        picture = pictures[annotation['image_id']].astype(np.float32)
        mask = coco.annToMask(annotation)
        inside, outside = cv2.erode(mask, kernel) > 0, cv2.dilate(mask, kernel, iterations=2) == 0
        near = cv2.dilate(mask, kernel, iterations=4) > 0
        if inside.any():
            differences.append(
                np.linalg.norm(
                    np.median(picture[inside], axis=0) - np.median(picture[near & outside], axis=0)
                )
            )
    assert len(differences) > 250
    assert np.quantile(differences, 0.03) > 25


def test_every_25th_scene_has_a_crowd_that_decodes(coco, coco_train):
    scenes = list(by_image(coco_train).values())
    with_crowd = [
        index
        for index, scene in enumerate(scenes)
        if any(annotation['iscrowd'] for annotation in scene)
    ]
    assert with_crowd == list(range(1, 80, 25))
    crowds = [annotation for annotation in coco_train['annotations'] if annotation['iscrowd']]
    assert len(crowds) == 4
    for crowd in crowds:
        assert isinstance(crowd['segmentation']['counts'], list)
        mask = coco.annToMask(crowd)
        assert mask.shape == (192, 192)
        assert mask.sum() == crowd['area'] > 200
        assert list(cv2.boundingRect(mask)) == crowd['bbox']


def test_colours_do_not_tell_the_category(coco, coco_train, pictures):
    colours = {}
    for annotation in objects(coco_train):
        pixels = pictures[annotation['image_id']][coco.annToMask(annotation) > 0]
        colours.setdefault(annotation['category_id'], []).append(pixels.mean(axis=0))
    spread = np.concatenate(list(colours.values())).std(axis=0)
    means = np.array([np.mean(values, axis=0) for values in colours.values()])
    # More than three standard errors of the difference of two means.
    assert (np.ptp(means, axis=0) < 0.5 * spread).all()
