"""Segmentation data that is missing or does not fit is named before any work, or as it is read."""

import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
from mmengine.config import Config
from mmengine.registry import RUNNERS

from mmcare.sample_data import make_ade20k

CONFIGS = Path(__file__).parents[2] / 'configs'
MODES = ('train', 'val', 'test')
LABELS = Path('annotations') / 'training' / 'ADE_train_00000002.png'


@pytest.fixture(scope='module')
def shared_data(tmp_path_factory):
    folder = tmp_path_factory.mktemp('ade20k') / 'data'
    make_ade20k(folder, train=2, val=1, size=96)
    return folder


@pytest.fixture
def data(shared_data, tmp_path):
    """A copy to spoil."""
    return shutil.copytree(shared_data, tmp_path / 'data')


def build(data, head='fpn', **changes):
    """The runner of a shipped config on some data, on small images."""
    config = Config.fromfile(CONFIGS / head / 'care_s0_ade20k.py')
    config.merge_from_dict(
        {
            'work_dir': str(data.parent / 'work'),
            'experiment_name': f'{data.parent.name}_{len(changes)}',
            'model.backbone.init_cfg': None,
            'model.data_preprocessor.size': (64, 64),
            'train_dataloader.dataset.pipeline.3.scale': (256, 64),
            'train_dataloader.dataset.pipeline.4.crop_size': (64, 64),
            'train_cfg.max_iters': 1,
            **{f'{mode}_dataloader.dataset.data_root': str(data) for mode in MODES},
            **{f'{mode}_dataloader.num_workers': 0 for mode in MODES},
            **{f'{mode}_dataloader.persistent_workers': False for mode in ('val', 'test')},
            **changes,
        }
    )
    return RUNNERS.build(config)


@pytest.mark.parametrize('mode', MODES)
@pytest.mark.parametrize(
    ('folder', 'argument'), [('annotations', 'seg_map_path'), ('images', 'img_path')]
)
def test_missing_folder(data, mode, folder, argument):
    shutil.rmtree(data / folder)
    runner = build(data)
    with pytest.raises(FileNotFoundError) as error:
        getattr(runner, mode)()
    split = 'training' if mode == 'train' else 'validation'
    for words in (
        f'{mode}_dataloader.dataset.data_prefix.{argument}',
        str(data / folder / split),
        f'--cfg-options {mode}_dataloader.dataset.data_root',
    ):
        assert words in str(error.value)
    assert isinstance(getattr(runner, f'_{mode}_loop'), dict)  # nothing was built


@pytest.mark.parametrize(
    ('split', 'mode'), [('training', 'train'), ('validation', 'train'), ('validation', 'test')]
)
def test_missing_label_file(data, split, mode):
    missing = sorted((data / 'annotations' / split).iterdir())[-1]
    missing.unlink()
    loop = 'train' if split == 'training' else 'test' if mode == 'test' else 'val'
    with pytest.raises(FileNotFoundError) as error:
        getattr(build(data), mode)()
    assert f'{loop}_dataloader.dataset: seg_map_path {str(missing)!r}' in str(error.value)


def test_missing_label_file_unchecked(data):
    """Without the hook it takes until the file is read, by when others may have been trained on."""
    (data / LABELS).unlink()
    runner = build(data, **{'default_hooks.data_check.enabled': False})
    runner.call_hook('before_build', modes=('train', 'val'))
    dataset = runner.train_loop.dataloader.dataset
    runner.call_hook('before_run')
    with pytest.raises(FileNotFoundError):
        for index in range(len(dataset)):
            dataset[index]


def test_image_listed_but_missing(data):
    (data / 'training.txt').write_text('ADE_train_00000001\nADE_train_00000009\n')
    runner = build(data, **{'train_dataloader.dataset.ann_file': 'training.txt'})
    with pytest.raises(FileNotFoundError, match=r'img_path .*ADE_train_00000009\.jpg'):
        runner.train()


@pytest.mark.parametrize(('split', 'mode'), [('training', 'train'), ('validation', 'test')])
def test_empty_split(data, split, mode):
    for image in (data / 'images' / split).iterdir():
        image.unlink()
    with pytest.raises(ValueError, match=f'ADE20KDataset with .*images/{split}.* has no images'):
        getattr(build(data), mode)()


@pytest.mark.parametrize('head', ['decode_head', 'auxiliary_head'])
def test_more_classes_than_a_head_has(data, head):
    runner = build(data, 'upernet', **{f'model.{head}.num_classes': 19})
    with pytest.raises(ValueError, match=rf'150 categories, but {head} has num_classes=19'):
        runner.train()


def test_fewer_classes(data):
    """A selection of ADE20K's classes: heads and CheckLabels must know."""
    changes = {
        f'{mode}_dataloader.dataset.metainfo': dict(classes=('sky', 'floor', 'ball'))
        for mode in MODES
    }
    head = {'model.decode_head.num_classes': 3}
    with pytest.raises(ValueError, match=r'3 categories, but CheckLabels .* num_classes=150'):
        build(data, **changes, **head).train()
    checks = {
        f'{mode}_dataloader.dataset.pipeline.{index}.num_classes': 3
        for mode, index in (('train', 2), ('val', 3), ('test', 3))
    }
    runner = build(data, **changes, **head, **checks)
    runner.train()
    assert runner.iter == 1


@pytest.mark.parametrize('workers', [0, 1])
@pytest.mark.parametrize(
    ('labels', 'words'),
    [
        (np.full((96, 97), 4, np.uint8), 'is 97 x 96, its image'),
        (np.full((96, 96), 151, np.uint8), r'has the label 150 \(151 in the file'),
        (np.full((96, 96), 260, np.uint16), 'has the label 260'),
    ],
)
def test_annotation_that_does_not_fit(data, labels, words, workers):
    for number in (1, 2):
        path = data / LABELS.with_name(f'ADE_train_0000000{number}.png')
        cv2.imwrite(str(path), labels)
    runner = build(data, **{'train_dataloader.num_workers': workers})
    with pytest.raises(ValueError, match=rf'ADE_train_0000000[12]\.png.*{words}'):
        runner.train()
    assert runner.iter == 0


def test_annotation_that_does_not_fit_at_test_time(data):
    labels = np.full((48, 96), 4, np.uint8)
    cv2.imwrite(str(data / 'annotations/validation/ADE_val_00000001.png'), labels)
    with pytest.raises(ValueError, match=r'ADE_val_00000001\.png.* is 96 x 48, its image'):
        build(data).test()


def test_labels_unchecked(data):
    """CheckLabels is switched off by itself."""
    labels = np.full((96, 96), 151, np.uint8)
    cv2.imwrite(str(data / LABELS), labels)
    dataset = build(data, **{'train_dataloader.dataset.pipeline.2.enabled': False})
    loader = dataset.build_dataloader(dataset.cfg.train_dataloader)
    assert loader.dataset[1]['data_samples'].gt_sem_seg.data.max() == 150
