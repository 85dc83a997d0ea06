"""Folders of classes that do not fit are named before training."""

import shutil
from pathlib import Path

import pytest
from mmengine.config import Config
from mmengine.registry import RUNNERS, DefaultScope

from mmcare.sample_data import make_imagenet

pytest.importorskip('mmpretrain')

CONFIG = Path(__file__).parents[2] / 'configs' / 'imagenet' / 'care_s0_in1k.py'
MODES = ('train', 'val', 'test')
CLASSES = ['n01608432', 'n02317335', 'n02690373', 'n02799071']


@pytest.fixture(scope='module')
def shared_data(tmp_path_factory):
    folder = tmp_path_factory.mktemp('imagenet') / 'data'
    make_imagenet(folder, train=8, val=4, size=64)
    return folder


@pytest.fixture
def data(shared_data, tmp_path):
    """A copy to spoil."""
    yield shutil.copytree(shared_data, tmp_path / 'data')
    DefaultScope._instance_dict.clear()


def build(data, folders=True, **changes):
    """The runner of the shipped config; with folders as classes, or with lists."""
    config = Config.fromfile(CONFIG)
    if folders:
        shutil.rmtree(data / 'meta', ignore_errors=True)
        changes = {
            **{f'{mode}_dataloader.dataset.classes': CLASSES for mode in MODES},
            'model.head.num_classes': 4,
            'model.data_preprocessor.num_classes': 4,
            **{f'{mode}_evaluator.topk': 1 for mode in ('val', 'test')},
            **changes,
        }
    config.merge_from_dict(
        {
            'work_dir': str(data.parent / 'work'),
            'experiment_name': f'{data.parent.name}_{len(changes)}',
            **{f'{mode}_dataloader.dataset.data_root': str(data) for mode in MODES},
            **{f'{mode}_dataloader.num_workers': 0 for mode in MODES},
            **{f'{mode}_dataloader.persistent_workers': False for mode in ('val', 'test')},
            **{f'{mode}_dataloader.batch_size': 4 for mode in MODES},
            'train_dataloader.dataset.pipeline.1.scale': 32,
            **{f'{mode}_dataloader.dataset.pipeline.2.crop_size': 32 for mode in ('val', 'test')},
            'train_cfg.max_epochs': 1,
            **changes,
        }
    )
    return RUNNERS.build(config)


@pytest.mark.parametrize('folders', [True, False])
def test_good_data_passes(data, folders):
    runner = build(data, folders)
    runner.train()
    assert runner.iter == 2


@pytest.mark.parametrize(('split', 'mode'), [('train', 'train'), ('val', 'train'), ('val', 'test')])
def test_empty_class_folder(data, split, mode):
    folder = data / split / CLASSES[2]
    for image in folder.iterdir():
        image.rename(image.with_suffix('.txt'))  # no image to mmpretrain
    runner = build(data)
    with pytest.raises(ValueError) as error:
        getattr(runner, mode)()
    loop = 'train' if split == 'train' else 'test' if mode == 'test' else 'val'
    for words in (f'{loop}_dataloader.dataset: the class folder', str(folder), 'holds no image'):
        assert words in str(error.value)
    assert mode == 'test' or runner.iter == 0


def test_empty_class_folder_unchecked_or_in_a_part_of_the_data(data):
    for image in (data / 'train' / CLASSES[2]).iterdir():
        image.unlink()
    unchecked = {'default_hooks.data_check.enabled': False}
    part = {'train_dataloader.dataset.indices': 4}
    for changes in (unchecked, part):
        runner = build(data, **changes)
        runner.train()
        assert runner.iter > 0


def test_splits_with_other_folders(data):
    """Both have four, which is all that mmpretrain looks at."""
    (data / 'val' / CLASSES[0]).rename(data / 'val' / 'n09999999')
    runner = build(data)
    with pytest.raises(ValueError, match=r'not have the same class folders: n01608432, n09999999'):
        runner.train()
    assert runner.iter == 0


@pytest.mark.parametrize(('split', 'mode'), [('train', 'train'), ('val', 'train'), ('val', 'test')])
def test_missing_folder(data, split, mode):
    shutil.rmtree(data / split)
    runner = build(data)
    with pytest.raises(FileNotFoundError, match=rf"dataset\.data_prefix='{split}' .* not exist"):
        getattr(runner, mode)()


@pytest.mark.parametrize('part', ['head', 'data_preprocessor'])
def test_more_classes_than_the_model_has(data, part):
    runner = build(data, **{f'model.{part}.num_classes': 3})
    with pytest.raises(ValueError, match=rf'has 4 categories, but {part} has num_classes=3'):
        runner.train()


def test_missing_image_of_a_list(data):
    missing = sorted((data / 'train' / CLASSES[1]).iterdir())[0]
    missing.unlink()
    with pytest.raises(FileNotFoundError, match=missing.name):
        build(data, folders=False).train()
