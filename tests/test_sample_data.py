"""Sample data: reproducible, written whole or not at all, and what the toolboxes expect."""

import json
import runpy

import cv2
import numpy as np
import pytest
from helpers import ROOT
from mmengine.config import Config

from mmcare.sample_data import make_ade20k, make_coco, make_imagenet, painter, writers
from mmcare.shipped import shipped_config

MAKERS = [make_coco, make_ade20k, make_imagenet]
# Each follows one or two numbers that COCO leaves out.
COCO_IDS = {
    'stop sign': 13,
    'backpack': 27,
    'handbag': 31,
    'wine glass': 46,
    'dining table': 67,
    'toilet': 70,
    'tv': 72,
    'book': 84,
}
ADE20K_NAMES = {'sky', 'floor', 'grass', 'curtain', 'rug', 'flower', 'airplane', 'ball'}


def read_files(directory):
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob('*')
        if path.is_file()
    }


def read_images(directory):
    return {
        name: data
        for name, data in read_files(directory).items()
        if name.endswith(('.jpg', '.JPEG'))
    }


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
    assert not set(first.values()) & set(read_images(tmp_path / 'other').values())
    assert set(first.values()) < set(larger.values())
    assert len(set(larger.values())) == 6, 'a scene occurs twice'


@pytest.mark.parametrize('make', MAKERS)
def test_what_is_there_stays(make, tmp_path):
    kept = tmp_path / 'data' / 'kept.txt'
    kept.parent.mkdir()
    kept.write_text('mine')
    for directory in (kept.parent, kept):
        with pytest.raises(FileExistsError, match='remove it first'):
            make(directory, train=1, val=1)
    assert read_files(tmp_path) == {'data/kept.txt': b'mine'}


def test_an_interrupted_run_leaves_nothing(tmp_path, monkeypatch):
    written = []

    def interrupt(path, content):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(path)

    monkeypatch.setattr(writers, '_write', interrupt)
    with pytest.raises(KeyboardInterrupt):
        make_ade20k(tmp_path / 'data', train=2, val=1, size=64)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('size', [64, 160])
def test_objects_are_visible_apart_and_stand_out(size):
    for seed in range(20):
        rng = np.random.default_rng(seed)
        picture = painter.draw_ground(rng, size, size, (15, 35))
        ground = picture.copy()
        shapes = rng.choice(['disc', 'kite', 'cross', 'star', 'blob'], 4)
        masks = painter.paint_objects(rng, picture, shapes, (12, size / 2), np.pi, (15, 35))
        changed = (picture != ground).any(axis=2)
        assert sum(mask.sum() for mask in masks) == np.any(masks, axis=0).sum()
        assert not (np.any(masks, axis=0) & ~changed).any()
        assert (changed & ~np.any(masks, axis=0)).mean() < 0.1, 'soft edges only'
        assert picture.min() >= 0 and picture.max() <= 255
        front = masks[-1].astype(np.uint8)
        inside = picture[cv2.erode(front, np.ones((3, 3))) > 0]
        rim = ground[(cv2.dilate(front, np.ones((5, 5))) > front) & ~changed]
        if len(inside) > 20 and len(rim) > 20:
            assert np.linalg.norm(inside.mean(axis=0) - rim.mean(axis=0)) > 50


def test_coco_in_mmdet(directories):
    from mmdet.registry import DATASETS

    directory = directories[make_coco]
    dataset = build_dataset('mask_rcnn/care_s0_coco', 'train', directory, DATASETS)
    names = dataset.metainfo['classes']
    assert len(dataset) == 24 and len(names) == 80
    content = json.loads((directory / 'annotations/instances_train2017.json').read_text())
    assert [category['name'] for category in content['categories']] == list(names)
    assert COCO_IDS.items() <= {one['name']: one['id'] for one in content['categories']}.items()
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
    seen, roughness = set(), {'grass': [], 'sky': []}
    for index in range(8):
        sample = dataset[index]['data_samples']
        labels = sample.gt_sem_seg.data[0].numpy()
        height, width = labels.shape
        if index % 4 == 3:
            assert height % 2 == width % 2 == 1 and height != width
        else:
            assert (height, width) == (128, 128)
        assert 0 < (labels == 255).mean() < 0.3, 'a part is unlabelled'
        seen |= {names[label] for label in np.unique(labels) if label != 255}
        detail = np.abs(cv2.Laplacian(cv2.imread(sample.img_path), cv2.CV_32F)).mean(axis=2)
        for name, values in roughness.items():
            inside = cv2.erode(np.uint8(labels == names.index(name)), np.ones((7, 7))) > 0
            if inside.sum() > 100:
                values.append(detail[inside].mean())
    assert seen == ADE20K_NAMES
    assert len(dataset) == 8
    assert min(roughness['grass']) > max(roughness['sky']), 'the textures are those of the labels'


@pytest.mark.parametrize('listed', [True, False])
def test_imagenet_in_mmpretrain(listed, directories):
    from mmpretrain.datasets import ImageNet
    from mmpretrain.datasets.categories import IMAGENET_CATEGORIES

    directory = directories[make_imagenet]
    for split, count in (('train', 24), ('val', 8)):
        ann_file = f'meta/{split}.txt' if listed else ''
        dataset = ImageNet(str(directory), split, data_prefix=split, ann_file=ann_file)
        assert len(dataset) == count
        items = [dataset.get_data_info(index) for index in range(count)]
        folders = {item['img_path'].split('/')[-2]: item['gt_label'] for item in items}
        expected = ['airliner', 'baseball', 'kite', 'starfish, sea star']
        if listed:
            assert sorted(IMAGENET_CATEGORIES[label] for label in folders.values()) == expected
        shapes = {cv2.imread(item['img_path']).shape[:2] for item in items}
        assert shapes == {(128, 128)}
        assert len(folders) == 4


def test_tool(tmp_path, monkeypatch, capsys):
    def type_in(*options):
        tool = ROOT / 'tools/make_sample_data.py'
        monkeypatch.setattr('sys.argv', [str(tool), 'imagenet', str(tmp_path / 'data'), *options])
        runpy.run_path(str(tool), run_name='__main__')
        return capsys.readouterr().out

    done = type_in('--seed=3', '--train=4', '--val=4', '--size=64')
    assert f'Written to {tmp_path / "data"}' in done
    make_imagenet(tmp_path / 'same', seed=3, train=4, val=4, size=64)
    assert read_files(tmp_path / 'data') == read_files(tmp_path / 'same')
    for options, message in (((), 'remove it first'), (('--size=8',), 'at least 64')):
        with pytest.raises(SystemExit, match='2'):
            type_in(*options)
        assert message in capsys.readouterr().err
