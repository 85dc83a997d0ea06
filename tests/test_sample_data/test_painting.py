import numpy as np
import pytest

from mmcare.sample_data.masks import fill_outline, measure_coverage
from mmcare.sample_data.painting import RIM_CONTRAST, paint
from mmcare.sample_data.shapes import draw_outline


@pytest.mark.parametrize('grey', [40, 128, 215])
def test_objects_stand_out_and_the_rest_is_left_alone(grey):
    rng = np.random.default_rng(0)
    for _ in range(20):
        picture = np.full((40, 50, 3), grey, np.float32)
        # Some of these reach out of the picture.
        mask = fill_outline(draw_outline(rng, 'disc', 24, rng.uniform(0, 40, size=2)), 40, 50)
        coverage = measure_coverage(mask)
        paint(rng, picture, mask, contrast=(15, 30))
        assert (picture[coverage == 0] == grey).all()
        difference = np.linalg.norm(picture[coverage == 1] - grey, axis=1)
        # A texture's two colours lie at most 15 to either side of their mean.
        assert difference.min() > RIM_CONTRAST - 15.1
        assert picture.min() >= 0
        assert picture.max() <= 255
