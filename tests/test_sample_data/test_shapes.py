import numpy as np
import pytest

from mmcare.sample_data.shapes import SHAPES, draw_outline


@pytest.mark.parametrize('shape', SHAPES)
def test_size_and_centre_are_those_of_the_upright_box(shape):
    rng = np.random.default_rng(0)
    outlines = [draw_outline(rng, shape, 30, np.array([50, 20])) for _ in range(10)]
    for outline in outlines:
        low, high = outline.min(axis=0), outline.max(axis=0)
        assert (high - low).max() == pytest.approx(30)
        np.testing.assert_allclose((low + high) / 2, [50, 20])
    # Each one is turned another way.
    assert len({outline.round(3).tobytes() for outline in outlines}) == 10
