"""Sample data: reproducible, and what the toolboxes expect."""

import cv2
import numpy as np
import pytest
from mmengine.config import Config
from mmengine.registry import DATASETS

from mmcare.sample_data import make_ade20k, make_coco, make_imagenet
from mmcare.shipped import shipped_config

MAKERS = [make_coco, make_ade20k, make_imagenet]


def read_files(directory):
    files = (path for path in directory.rglob('*') if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def read_images(directory):
    files = read_files(directory).items()
    return {content for name, content in files if name.endswith(('.jpg', '.JPEG'))}


@pytest.mark.parametrize('make', MAKERS)
def test_seed_and_number_alone_decide(make, tmp_path):
    for name, seed, train in (('first', 5, 2), ('again', 5, 2), ('other', 6, 2), ('larger', 5, 4)):
        make(tmp_path / name, seed=seed, train=train, val=2, size=64)
    first, larger = read_images(tmp_path / 'first'), read_images(tmp_path / 'larger')
    assert read_files(tmp_path / 'first') == read_files(tmp_path / 'again')
    assert not first & read_images(tmp_path / 'other')
    assert first < larger and len(larger) == 6, 'a scene occurs twice'


def test_coco_in_mmdet(tmp_path):
    make_coco(tmp_path, seed=1, train=24, val=1, size=128)
    config = Config.fromfile(shipped_config('mask_rcnn/care_s0_coco')).train_dataloader.dataset
    dataset = DATASETS.build(dict(config, data_root=str(tmp_path), _scope_='mmdet'))
    names = dataset.metainfo['classes']
    assert len(dataset) == 24 and len(names) == 80
    seen = set()
    for index in range(24):
        truth = dataset[index]['data_samples'].gt_instances
        assert 2 <= len(truth) <= 6
        seen |= {names[label] for label in truth.labels}
        height, width = truth.masks.height, truth.masks.width
        assert (height, width) == (800, 800)
        for box, mask in zip(truth.bboxes.tensor.numpy(), truth.masks.masks, strict=True):
            x, y, *extent = cv2.boundingRect(mask)
            np.testing.assert_allclose(box, (x, y, x + extent[0], y + extent[1]), atol=7)
    assert seen == {'airplane', 'sports ball', 'kite'}
