"""Data that do not fit are named before training, in the layouts of three toolboxes."""

import json
import multiprocessing
import os
import shutil

import numpy as np
import pytest
import torch
from mmengine.model import BaseModel
from mmengine.registry import DefaultScope
from mmengine.runner import Runner
from PIL import Image
from torch import nn

from mmcare.engine.hooks.data_check_hook import _check_label_map

CATEGORIES = {3: 'ant', 7: 'bee', 9: 'cat'}
SIZE = (8, 6)


class Tiny(BaseModel):
    """A model with a head and a weight, for which each batch is right."""

    def __init__(self, num_classes):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.head = nn.Module()
        self.head.num_classes = num_classes

    def forward(self, inputs, data_samples=None, mode='tensor'):
        return dict(loss=self.weight * 0) if mode == 'loss' else data_samples


def make_coco(folder):
    for split, number in (('train', 2), ('val', 1)):
        (folder / split).mkdir(parents=True)
        names = [f'{index}.jpg' for index in range(number)]
        for name in names:
            Image.new('RGB', SIZE).save(folder / split / name)
        content = dict(
            images=[
                dict(id=index, file_name=name, width=SIZE[0], height=SIZE[1])
                for index, name in enumerate(names)
            ],
            categories=[dict(id=number, name=name) for number, name in CATEGORIES.items()],
            annotations=[
                dict(id=index, image_id=index, category_id=7, bbox=[1, 1, 4, 4], area=16)
                for index in range(number)
            ],
        )
        (folder / f'{split}.json').write_text(json.dumps(content))


def make_ade20k(folder):
    for split, number in (('train', 2), ('val', 1)):
        for kind in ('images', 'labels'):
            (folder / kind / split).mkdir(parents=True)
        for index in range(number):
            Image.new('RGB', SIZE).save(folder / 'images' / split / f'{index}.jpg')
            labels = np.random.default_rng(index).integers(0, 151, SIZE[::-1])
            save_labels(folder / 'labels' / split / f'{index}.png', labels)


def save_labels(path, labels, dtype=np.uint8, **options):
    Image.fromarray(np.asarray(labels).astype(dtype)).save(path, **options)


def make_imagenet(folder):
    for split in ('train', 'val'):
        for name in CATEGORIES.values():
            (folder / split / name).mkdir(parents=True)
            Image.new('RGB', SIZE).save(folder / split / name / '0.jpg')
        lines = [f'{name}/0.jpg {label}\n' for label, name in enumerate(CATEGORIES.values())]
        (folder / f'{split}.txt').write_text(''.join(lines))


def coco(folder, split):
    return dict(
        type='mmdet.CocoDataset',
        data_root=str(folder),
        ann_file=f'{split}.json',
        data_prefix=dict(img=split),
        metainfo=dict(classes=tuple(CATEGORIES.values())),
        filter_cfg=None,
        test_mode=split == 'val',
        pipeline=[
            dict(type='LoadImageFromFile'),
            dict(type='mmdet.LoadAnnotations', with_bbox=True),
            dict(type='mmdet.PackDetInputs', meta_keys=('img_id', 'img_path')),
        ],
    )


def ade20k(folder, split):
    return dict(
        type='mmseg.ADE20KDataset',
        data_root=str(folder),
        data_prefix=dict(img_path=f'images/{split}', seg_map_path=f'labels/{split}'),
        pipeline=[
            dict(type='LoadImageFromFile'),
            dict(type='mmseg.LoadAnnotations'),
            dict(type='mmseg.PackSegInputs'),
        ],
    )


def imagenet(folder, split):
    return dict(
        type='mmpretrain.CustomDataset',
        data_root=str(folder),
        data_prefix=split,
        pipeline=[dict(type='LoadImageFromFile'), dict(type='mmpretrain.PackInputs')],
    )


def listed(folder, split):
    return dict(
        imagenet(folder, split),
        ann_file=f'{split}.txt',
        metainfo=dict(classes=tuple(CATEGORIES.values())),
    )


LAYOUTS = dict(
    coco=(make_coco, coco, 3),
    ade20k=(make_ade20k, ade20k, 150),
    imagenet=(make_imagenet, imagenet, 3),
    listed=(make_imagenet, listed, 3),
)


@pytest.fixture(autouse=True)
def no_trace(monkeypatch):
    monkeypatch.setattr(Runner, '_log_env', lambda *_: None)  # it looks for compilers, for a second
    yield
    DefaultScope._instance_dict.clear()


@pytest.fixture
def data(tmp_path):
    return tmp_path / 'data'


def build(layout, data, num_classes=None, wrap=dict, enabled=True, evaluated='val.json', **changes):
    """A runner for one iteration; `wrap` goes around the datasets, `changes` into them."""
    make, dataset, classes = LAYOUTS[layout]
    if not data.exists():
        make(data)
    loaders = {
        mode: dict(
            dataset=wrap(dict(dataset(data, 'train' if mode == 'train' else 'val'), **changes)),
            batch_size=2 if mode == 'train' else 1,
            sampler=dict(type='DefaultSampler', shuffle=False),
            collate_fn=dict(type='pseudo_collate'),
        )
        for mode in ('train', 'val', 'test')
    }
    evaluator = dict(type='mmdet.CocoMetric', ann_file=f'{data}/{evaluated}')
    if layout != 'coco':
        evaluator = dict(type='DumpResults', out_file_path=str(data / 'results.pkl'))
    return Runner(
        model=Tiny(num_classes or classes),
        work_dir=str(data / 'work'),
        experiment_name=f'{data}{enabled}',
        train_dataloader=loaders['train'],
        val_dataloader=loaders['val'],
        test_dataloader=loaders['test'],
        train_cfg=dict(by_epoch=False, max_iters=1, val_interval=9, val_begin=9),
        val_cfg=dict(),
        test_cfg=dict(),
        val_evaluator=[evaluator],
        test_evaluator=evaluator,
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.1)),
        default_hooks=dict(
            checkpoint=dict(type='CheckpointHook', interval=9, save_last=False),
            data_check=dict(type='mmcare.DataCheckHook', enabled=enabled),
        ),
        log_level='WARNING',
    )


def edit(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)


def hang(path):
    path.unlink()
    path.symlink_to('nowhere')


def wrap_twice(dataset):
    return dict(
        type='ConcatDataset', datasets=[dict(type='RepeatDataset', times=2, dataset=dataset)]
    )


def reverse(content):
    content['categories'].reverse()


# Layout, what is done to the data, arguments of build, and what the message says.
FAULTS = dict(
    image=(
        'coco',
        lambda data: (data / 'train/1.jpg').unlink(),
        {},
        r"1 files of the train .* '.*train/1\.jpg': .* set train_dataloader\.dataset\.data_root",
    ),
    image_of_val=('coco', lambda data: (data / 'val/0.jpg').unlink(), {}, r'val/0\.jpg'),
    image_folder=('coco', lambda data: shutil.rmtree(data / 'train'), {}, '2 files of the train'),
    image_link=('coco', lambda data: hang(data / 'train/1.jpg'), {}, r'train/1\.jpg'),
    image_in_wrappers=(
        'coco',
        lambda data: (data / 'train/1.jpg').unlink(),
        dict(wrap=wrap_twice),
        r'train/1\.jpg',
    ),
    image_in_list=('listed', lambda data: (data / 'val/bee/0.jpg').unlink(), {}, r'bee/0\.jpg'),
    categories=(
        'coco',
        lambda data: edit(data / 'train.json', reverse),
        {},
        r"train\.json' .* set train_.*classes to \('cat', 'bee', 'ant'\)",
    ),
    categories_of_val=('coco', lambda data: edit(data / 'val.json', reverse), {}, r'val\.json'),
    category=(
        'coco',
        lambda data: edit(data / 'train.json', lambda content: content['categories'].pop(0)),
        {},
        r"classes to \('bee', 'cat'\)",
    ),
    evaluator=(
        'coco',
        lambda data: shutil.copy(data / 'val.json', data / 'old.json'),
        dict(evaluated='old.json'),
        r'val_evaluator\.ann_file=.*old\.json.* set val_evaluator\.ann_file=.*val\.json',
    ),
    classes=('coco', None, dict(num_classes=2), r'3 classes, but model\.head\.num_classes=2'),
    classes_of_labels=('ade20k', None, dict(num_classes=19), '150 classes, .*num_classes=19'),
    classes_of_folders=('imagenet', None, dict(num_classes=2), '3 classes, .*num_classes=2'),
    label_map=('ade20k', lambda data: (data / 'labels/val/0.png').unlink(), {}, r'val/0\.png'),
    label_bit=('ade20k', lambda data: flip(data / 'labels/train/1.png', -30), {}, 'damaged.*anew'),
    label_text=(
        'ade20k',
        lambda data: (data / 'labels/train/1.png').write_text('404'),
        {},
        r'labels/train/1\.png.* is damaged',
    ),
    label_16_bits=(
        'ade20k',
        lambda data: save_labels(data / 'labels/train/1.png', [[300]], np.uint16),
        {},
        r'labels/train/1\.png.* in 8 bits',
    ),
    folders=(
        'imagenet',
        lambda data: (data / 'val/ant').rename(data / 'val/dog'),
        {},
        r"data/train' \(train\) and '.*data/val' \(val\), .* ant, dog: give both",
    ),
)


@pytest.mark.parametrize('fault', FAULTS)
def test_named_before_training(data, fault):
    layout, plant, arguments, words = FAULTS[fault]
    LAYOUTS[layout][0](data)
    if plant:
        plant(data)
    runner = build(layout, data, **arguments)
    with pytest.raises(ValueError, match=words):
        runner.train()
    assert runner.iter == 0
    unchecked = build(layout, data, enabled=False, **arguments)
    assert unchecked.train_loop and unchecked.val_loop
    unchecked.call_hook('before_run')


@pytest.mark.parametrize('wrap', [dict, wrap_twice])
@pytest.mark.parametrize('layout', LAYOUTS)
def test_good_data_pass(data, layout, wrap):
    runner = build(layout, data, wrap=wrap)
    runner.train()
    assert runner.iter == 1
    if layout == 'ade20k':
        build(layout, data, wrap=wrap).test()


def test_evaluator_of_a_test(data):
    make_coco(data)
    shutil.copy(data / 'val.json', data / 'old.json')
    with pytest.raises(ValueError, match=r'test_evaluator\.ann_file=.*old\.json'):
        build('coco', data, evaluated='old.json').test()


@pytest.mark.parametrize(
    ('layout', 'changes'),
    [
        ('coco', dict(backend_args=dict(backend='local'))),  # any other is not installed
        ('coco', dict(data_prefix=dict(img='https://example.org/'))),
        ('ade20k', dict(data_prefix=dict(img_path='images/train', seg_map_path='s3://labels/'))),
    ],
)
def test_remote_data_pass(data, layout, changes):
    LAYOUTS[layout][0](data)
    for file in [data / 'train/1.jpg', data / 'val/0.jpg', data / 'labels/train/1.png']:
        file.unlink(missing_ok=True)
    runner = build(layout, data, **changes)
    assert runner.train_loop
    runner.call_hook('before_run')


def test_what_needs_fewer_classes_passes(data):
    runner = build('coco', data)
    runner.model.rpn_head, runner.model.backbone, runner.model.edge_head = Tiny(1), Tiny(2), Tiny(3)
    runner.model.edge_head.boundary_threshold = 0.1
    runner.model.edge_head.head.num_classes = 3
    runner.model.edge_head.num_classes = 2
    assert runner.train_loop
    runner.call_hook('before_run')
    runner.model.head.num_classes, runner.model.fusion = 2, nn.Module()
    runner.model.fusion.num_stuff_classes = 1
    runner.call_hook('before_run')


@pytest.mark.parametrize('mode', ['train', 'val', 'test'])
@pytest.mark.parametrize('reduced', [True, False])
def test_label_beyond_the_classes(data, mode, reduced):
    make_ade20k(data)
    labels = np.full(SIZE[::-1], 255)
    labels[2, 3] = 150 + reduced
    path = data / 'labels' / ('train' if mode == 'train' else 'val') / '0.png'
    save_labels(path, labels)
    runner = build('ade20k', data, reduce_zero_label=reduced)
    words = rf"'{path}' has the label {150 + reduced}, the last class has {149 + reduced}"
    with pytest.raises(ValueError, match=words):
        getattr(runner, mode)()
    assert runner.iter == 0
    getattr(build('ade20k', data, reduce_zero_label=reduced, enabled=False), mode)()


def test_each_flipped_bit_is_found_or_harmless(tmp_path):
    path = tmp_path / 'labels.png'
    save_labels(path, np.random.default_rng(0).integers(0, 150, (5, 7)))
    content, labels = path.read_bytes(), np.asarray(Image.open(path))
    assert not list(_check_label_map(str(path)))
    for bit in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        if not list(_check_label_map(str(path))):
            assert np.array_equal(np.asarray(Image.open(path)), labels)


@pytest.mark.parametrize(('bits', 'wrong'), [(1, False), (2, True), (4, True), (8, False)])
def test_grey_values_of_few_bits(tmp_path, bits, wrong):
    """Pillow reads a 3 of 4 bits as 51."""
    path = tmp_path / 'labels.png'
    save_labels(path, np.eye(6), bits=bits)
    assert bool(list(_check_label_map(str(path)))) == wrong


def stop_on_every_rank(rank, store, runner, results):
    os.environ.update(RANK=str(rank), WORLD_SIZE='2')
    torch.distributed.init_process_group('gloo', f'file://{store}', rank=rank, world_size=2)
    try:
        runner.call_hook('before_run')
    except ValueError as error:
        results.put((rank, str(error)))


def test_all_ranks_stop(data, tmp_path):
    make_coco(data)
    (data / 'train/1.jpg').unlink()
    runner = build('coco', data)
    assert runner.train_loop
    context = multiprocessing.get_context('fork')
    results = context.Queue()
    processes = [
        context.Process(target=stop_on_every_rank, args=(rank, tmp_path / 'store', runner, results))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    found = dict(results.get(timeout=60) for _ in processes)
    for process in processes:
        process.join()
    assert found[0] == found[1] and 'train/1.jpg' in found[0]
