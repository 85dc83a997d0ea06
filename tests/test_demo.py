"""The demos leave what they promise; at toy size, where no figure is worth anything."""

import json

import cv2
import numpy as np
import pytest

from mmcare.demo import detection, report, segmentation


@pytest.mark.parametrize('demo', [detection, segmentation])
def test_leaves_figures_and_pictures(demo, tmp_path, monkeypatch):
    work_dir = tmp_path / 'demo'
    if demo is detection:
        monkeypatch.setattr(demo, 'EPOCHS', 2)
    else:
        monkeypatch.setattr(demo, 'ITERATIONS', 36)
    monkeypatch.setattr(demo, 'SCENES', (4, 2))
    monkeypatch.setattr(demo, 'IMAGE_SIZE', 96)
    monkeypatch.setattr(demo, 'BATCH_SIZE', 2)
    if demo is segmentation:
        monkeypatch.setattr(demo, 'CROP_SIZE', 64)
    draw = demo._draw_predictions
    monkeypatch.setattr(demo, '_draw_predictions', lambda *arguments: draw(*arguments, number=2))

    results = demo.run(work_dir)

    assert json.loads((work_dir / 'results.json').read_text()) == results
    assert results['goal']['metric'] in demo.METRICS and results['goal']['above'] == 0.5
    for stage in ('untrained', 'trained'):
        assert set(results[stage]) == set(demo.METRICS)
        assert all(-1 <= value <= 1 for value in results[stage].values())
    for name in ('curves.png', 'predictions.png'):
        picture = cv2.imread(str(work_dir / name))
        assert picture.std() > 10, f'{name} is empty'
    if demo is segmentation:  # image, annotation, prediction: each fills its place
        for column in range(3):
            panel = picture[4:196, 200 * column + 4 : 200 * column + 196]
            assert not (panel == 255).all(axis=(0, 2)).any(), f'column {column} is cut'
    checkpoints = {path.name for path in work_dir.glob('*.pth')}
    assert checkpoints & {'epoch_2.pth', 'iter_36.pth'}


def test_grid_of_unequal_pictures(tmp_path):
    pictures = [np.zeros((*size, 3), np.uint8) for size in ((4, 9), (7, 3), (5, 5))]
    report.write_grid(pictures, 2, tmp_path / 'grid.png')
    grid = cv2.imread(str(tmp_path / 'grid.png'))
    assert grid.shape == (2 * (7 + 8), 2 * (9 + 8), 3)
    assert [path.name for path in tmp_path.iterdir()] == ['grid.png']


@pytest.mark.parametrize('demo', [detection, segmentation])
def test_foreign_data_is_not_replaced(demo, tmp_path):
    kept = tmp_path / 'sample_data' / 'annotations.json'
    kept.parent.mkdir()
    kept.write_text('{}')
    with pytest.raises(FileExistsError, match='was not made by a demo'):
        demo.run(tmp_path)
    assert kept.read_text() == '{}'
