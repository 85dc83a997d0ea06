"""Pictures to calibrate with."""

import mmcv
import pytest


@pytest.fixture(scope='session')
def pictures(tmp_path_factory):
    """A folder with four pictures, in a deeper folder, and another file."""
    from export_helpers import (
        smooth,
    )  # here, since pytest imports this file where exports cannot run

    folder = tmp_path_factory.mktemp('pictures')
    (folder / 'notes.txt').write_text('no picture')
    for seed in range(4):
        pixels = (smooth(seed, (80, 120))[0].permute(1, 2, 0) * 50 + 120).clamp(0, 255)
        mmcv.imwrite(pixels.byte().numpy(), str(folder / f'deeper/{seed}.PNG'))
    return folder
