"""Sample data: reproducible, and what the toolboxes expect."""

import cv2
import numpy as np
import pytest
from mmengine.config import Config

from mmcare.sample_data import make_ade20k, make_coco, make_imagenet
from mmcare.shipped import shipped_config

MAKERS = [make_coco, make_ade20k, make_imagenet]
ADE20K_NAMES = {'sky', 'floor', 'grass', 'curtain', 'rug', 'flower', 'airplane', 'ball'}


def read_files(directory):
    files = (path for path in directory.rglob('*') if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def read_images(directory):
    files = read_files(directory).items()
    return {content for name, content in files if name.endswith(('.jpg', '.JPEG'))}


def build_dataset(config, split, data_root, registry):
    dataset = dict(Config.fromfile(shipped_config(config))[f'{split}_dataloader'].dataset)
    return registry.build(dict(dataset, data_root=str(data_root), _scope_=registry.scope))


@pytest.fixture(scope='module')
def directories(tmp_path_factory):
    folder = tmp_path_factory.mktemp('sample_data')
    for make in MAKERS:
        make(folder / make.__name__, seed=1, train=24, val=8, size=128)
    return {make: folder / make.__name__ for make in MAKERS}


@pytest.mark.parametrize('make', MAKERS)
def test_seed_and_number_alone_decide(make, tmp_path):
    for name, seed, train in (('first', 5, 2), ('again', 5, 2), ('other', 6, 2), ('larger', 5, 4)):
        make(tmp_path / name, seed=seed, train=train, val=2, size=64)
    first, larger = read_images(tmp_path / 'first'), read_images(tmp_path / 'larger')
    assert read_files(tmp_path / 'first') == read_files(tmp_path / 'again')
    assert not first & read_images(tmp_path / 'other')
    assert first < larger and len(larger) == 6, 'a scene occurs twice'


def test_coco_in_mmdet(directories):
    from mmdet.registry import DATASETS

    directory = directories[make_coco]
    dataset = build_dataset('mask_rcnn/care_s0_coco', 'train', directory, DATASETS)
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


def test_ade20k_in_mmseg(directories):
    from mmseg.registry import DATASETS

    directory = directories[make_ade20k]
    dataset = build_dataset('fpn/care_s0_ade20k', 'val', directory, DATASETS)
    names = dataset.metainfo['classes']
    seen = set()
    assert len(dataset) == 8
    for index in range(8):
        labels = dataset[index]['data_samples'].gt_sem_seg.data[0].numpy()
        if index % 4 == 3:
            assert labels.shape[0] % 2 == labels.shape[1] % 2 == 1, 'photographs have odd sizes'
        assert 0 < (labels == 255).mean() < 0.3, 'a part is unlabelled'
        seen |= {names[label] for label in np.unique(labels) if label != 255}
    assert seen == ADE20K_NAMES
