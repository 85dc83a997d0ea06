"""Detection data that is missing or does not fit is named before any work is done."""

import json
from pathlib import Path

import pytest
from mmengine.config import Config
from mmengine.registry import RUNNERS

from mmcare.engine.hooks.data_check_hook import _check_paths
from mmcare.sample_data import make_coco

CONFIG = Path(__file__).parents[2] / 'configs' / 'mask_rcnn' / 'care_s0_coco.py'


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp('coco') / 'data'
    make_coco(folder, train=4, val=2, size=64)
    return folder


def build(data, work_dir, **changes):
    """The runner of the shipped config on some data."""
    config = Config.fromfile(CONFIG)
    config.merge_from_dict(
        {
            'work_dir': str(work_dir),
            'experiment_name': str(work_dir),
            'model.backbone.init_cfg': None,
            **{
                f'{mode}_dataloader.dataset.data_root': f'{data}/'
                for mode in ('train', 'val', 'test')
            },
            **{f'{mode}_dataloader.num_workers': 0 for mode in ('train', 'val', 'test')},
            **{f'{mode}_dataloader.persistent_workers': False for mode in ('val', 'test')},
            **{
                f'{mode}_evaluator.ann_file': f'{data}/annotations/instances_val2017.json'
                for mode in ('val', 'test')
            },
            **changes,
        }
    )
    return RUNNERS.build(config)


@pytest.mark.parametrize(
    ('changes', 'mode', 'words'),
    [
        (
            {'train_dataloader.dataset.data_root': 'nowhere/'},
            'train',
            [
                'train_dataloader.dataset.ann_file',
                'nowhere/annotations/instances_train2017.json',
                '--cfg-options',
            ],
        ),
        (
            {'val_dataloader.dataset.ann_file': 'annotations/other.json'},
            'train',
            ["val_dataloader.dataset.ann_file='annotations/other.json'"],
        ),
        (
            {'test_dataloader.dataset.data_prefix.img': 'test2017/'},
            'test',
            ["test_dataloader.dataset.data_prefix.img='test2017/'", 'folder'],
        ),
    ],
)
def test_missing_paths(data, tmp_path, changes, mode, words):
    runner = build(data, tmp_path, **changes)
    with pytest.raises(FileNotFoundError) as error:
        getattr(runner, mode)()
    assert all(word in str(error.value) for word in words), error.value
    assert isinstance(runner._train_loop, dict)  # nothing was built


def test_stale_evaluator(data, tmp_path):
    runner = build(data, tmp_path, **{'val_evaluator.ann_file': 'data/coco/other.json'})
    with pytest.raises(ValueError, match=r'val_evaluator\.ann_file=.*data/coco/other\.json'):
        runner.train()


def test_missing_image(data, tmp_path):
    listed = json.loads((data / 'annotations' / 'instances_train2017.json').read_text())
    name = listed['images'][-1]['file_name']
    (tmp_path / 'annotations').mkdir()
    (tmp_path / 'annotations' / 'instances_train2017.json').write_text(json.dumps(listed))
    (tmp_path / 'train2017').mkdir()
    for image in listed['images'][:-1]:
        (tmp_path / 'train2017' / image['file_name']).symlink_to(
            data / 'train2017' / image['file_name']
        )
    runner = build(data, tmp_path, **{'train_dataloader.dataset.data_root': f'{tmp_path}/'})
    with pytest.raises(FileNotFoundError, match=name):
        runner.train()
    # Switched off, the run goes on to the reading of the image.
    runner = build(
        data,
        tmp_path,
        **{
            'train_dataloader.dataset.data_root': f'{tmp_path}/',
            'default_hooks.data_check.enabled': False,
            'experiment_name': 'unchecked',
        },
    )
    runner.call_hook('before_build', modes=('train', 'val'))
    runner.call_hook('before_run')


def test_empty_split(data, tmp_path):
    runner = build(data, tmp_path, **{'train_dataloader.dataset.filter_cfg.min_size': 1000})
    with pytest.raises(ValueError, match=r'CocoDataset with .*filter_cfg.* has no images'):
        runner.train()


def test_more_categories_than_the_model_has(data, tmp_path):
    runner = build(
        data,
        tmp_path,
        **{'model.roi_head.bbox_head.num_classes': 3, 'model.roi_head.mask_head.num_classes': 3},
    )
    with pytest.raises(ValueError, match=r'80 categories, but roi_head\.bbox_head .*=3'):
        runner.train()


@pytest.mark.parametrize(
    ('dataset', 'missing'),
    [
        (dict(data_root='.', data_prefix='nowhere'), 'data_prefix'),
        (dict(data_root='.', ann_file=['a.json', 'b.json']), None),
        (dict(data_root='nowhere', ann_file='a', backend_args=dict(backend='petrel')), None),
    ],
)
def test_other_forms_of_paths(dataset, missing):
    """mmpretrain's one folder as text, lists of annotation files, remote storage."""
    if missing:
        with pytest.raises(FileNotFoundError, match=f'train_dataloader.dataset.{missing}='):
            _check_paths('train_dataloader.dataset', dataset)
    else:
        assert _check_paths('train_dataloader.dataset', dataset) is None
