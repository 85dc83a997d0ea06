import cv2
import numpy as np
import pytest
from pycocotools import mask as coco_mask

from mmcare.sample_data.masks import (
    SUBPIXELS,
    encode_runs,
    fill_outline,
    find_box,
    find_polygons,
    measure_area,
    measure_coverage,
)

SQUARE = np.array([[4, 6], [14, 6], [14, 26], [4, 26]], float)


def test_a_filled_rectangle_is_measured_to_a_fraction_of_a_pixel():
    mask = fill_outline(SQUARE, 32, 40)
    assert mask.shape == (32 * SUBPIXELS, 40 * SUBPIXELS)
    assert measure_area(mask) == pytest.approx(200, rel=0.05)
    np.testing.assert_allclose(find_box(mask), [4, 6, 10, 20], atol=0.3)
    coverage = measure_coverage(mask)
    assert coverage.shape == (32, 40)
    assert (coverage[6:26, 4:14] == 1).all()
    assert coverage[:5].max() == coverage[:, 16:].max() == 0


def test_an_outline_may_reach_out_of_the_image():
    mask = fill_outline(SQUARE - [9, 16], 32, 40)
    np.testing.assert_allclose(find_box(mask), [0, 0, 5, 10], atol=0.3)


def test_each_part_gives_a_polygon():
    mask = fill_outline(SQUARE, 32, 40)
    mask[14 * SUBPIXELS : 16 * SUBPIXELS] = 0
    polygons = find_polygons(mask)
    boxes = sorted(cv2.boundingRect(np.float32(polygon).reshape(-1, 2)) for polygon in polygons)
    assert len(boxes) == 2
    np.testing.assert_allclose(boxes, [[4, 6, 10, 8], [4, 16, 10, 10]], atol=1)


def test_a_hole_has_no_polygon():
    mask = fill_outline(SQUARE, 32, 40)
    mask[15 * SUBPIXELS, 9 * SUBPIXELS] = 0
    assert find_polygons(mask) is None


@pytest.mark.parametrize('density', [0, 0.3, 1])
def test_run_lengths_decode(density):
    pixels = np.random.default_rng(0).uniform(size=(7, 5)) < density
    runs = encode_runs(pixels)
    assert sum(runs['counts']) == 35
    decoded = coco_mask.decode(coco_mask.frPyObjects(runs, 7, 5))
    np.testing.assert_array_equal(decoded, pixels)
