"""The configs for public sets of pictures, on a few files drawn in the layouts of these sets."""

import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from helpers import ROOT, THIN, run_tool
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.registry import DATASETS, METRICS, MODELS, DefaultScope
from mmengine.runner import Runner
from pycocotools.coco import COCO

sys.path.insert(0, str(ROOT / 'benchmarks'))

from partition import use_fresh_splits

VOID = 11  # the label of pixels without a class
NUCLEI = dict(a='test', b='train', c='train', d='train', e='train', f='val')
SPLITS = ('train', 'val', 'test')
CELLS = [
    ('RBC', 10, 10, 40, 40),
    ('WBC', 50, 5, 110, 60),
    ('Platelets', 70, 70, 80, 82),
    ('RBC', 60, 60, 60, 60),  # flat, as one in the training and one in the validation split
]


def noise(height, width):
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def write(path, image):
    path.parent.mkdir(parents=True, exist_ok=True)
    assert cv2.imwrite(str(path), image)


def draw_nuclei(root):
    """Draw n + 1 squares of side 8 + 2n in image n, and a mask without a pixel in each."""
    for number, name in enumerate(NUCLEI):
        image = np.dstack([noise(80, 96), np.full((80, 96), 255, np.uint8)])
        side = 8 + 2 * number
        for square in range(number + 2):
            mask = np.zeros((80, 96), np.uint8)
            if square <= number:
                row, column = divmod(square, 4)
                mask[24 * row :, 24 * column :][:side, :side] = 255
            image[mask > 0, :3] = 255
            write(root / f'stage1_train/{name}/masks/{square}.png', mask)
        write(root / f'stage1_train/{name}/images/{name}.png', image)


def draw_cells(root):
    """Draw four images a split, each with a cell of each kind and a box without area."""
    objects = ''.join(
        f'<object><name>{kind}</name><bndbox><xmin>{left}</xmin><ymin>{top}</ymin>'
        f'<xmax>{right}</xmax><ymax>{bottom}</ymax></bndbox></object>'
        for kind, left, top, right, bottom in CELLS
    )
    xml = f'<annotation><size><width>128</width><height>96</height></size>{objects}</annotation>'
    (root / 'BCCD/ImageSets/Main').mkdir(parents=True)
    (root / 'BCCD/Annotations').mkdir()
    for split in SPLITS:
        names = [f'{split}_{index}' for index in range(4)]
        (root / f'BCCD/ImageSets/Main/{split}.txt').write_text('\n'.join(names))
        for name in names:
            write(root / f'BCCD/JPEGImages/{name}.jpg', noise(96, 128))
            (root / f'BCCD/Annotations/{name}.xml').write_text(xml)


def draw_streets(root):
    """Draw four images a split, with all classes and pixels without a class."""
    labels = np.tile(np.arange(12, dtype=np.uint8).repeat(8), (64, 1))
    for split in SPLITS:
        for index in range(4):
            write(root / f'CamVid/{split}/{index}.png', noise(*labels.shape))
            write(root / f'CamVid/{split}annot/{index}.png', labels)


CONFIGS = {
    'nuclei': ('mask_rcnn/care_s0_dsb2018', draw_nuclei, {'coco/segm_mAP', 'coco/bbox_mAP'}),
    'cells': ('retinanet/care_s0_bccd', draw_cells, {'coco/bbox_mAP', 'pascal_voc/AP50'}),
    'streets': ('fpn/care_s0_camvid', draw_streets, {'mIoU', 'aAcc'}),
}


@pytest.fixture
def read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def read(task):
        name, draw, _ = CONFIGS[task]
        draw(tmp_path / 'data' / task)
        if task == 'nuclei':
            run_tool(monkeypatch, 'nuclei_to_coco')
        return Config.fromfile(ROOT / f'configs/{name}.py')

    return read


@pytest.mark.parametrize('task', CONFIGS)
def test_trains_and_evaluates(task, read):
    config = read(task)
    config.model.backbone.arch = THIN
    config.model.neck.in_channels = [16, 16, 32, 128]
    config.train_dataloader.batch_size = 2
    config.work_dir = 'run'
    for loader in (config.val_dataloader, config.test_dataloader):
        loader.update(num_workers=0, persistent_workers=False)
    if task == 'streets':
        config.train_cfg.update(max_iters=2, val_interval=2)
    else:
        config.train_cfg.update(max_epochs=1, val_interval=1)
        (config.model.test_cfg if task == 'cells' else config.model.test_cfg.rcnn).score_thr = 0.0
    runner = Runner.from_cfg(config)
    runner.train()
    assert runner.iter == 2
    assert all(value.isfinite().all() for value in runner.model.parameters())
    measured = runner.test()
    assert all(0 <= measured[metric] <= 100 for metric in CONFIGS[task][2])


def test_pixels_without_a_class_do_not_count(read):
    """Neither in training nor in evaluation, and padding is without a class."""
    config = read('streets')
    with DefaultScope.overwrite_default_scope('mmseg'):
        model, metric = MODELS.build(config.model), METRICS.build(config.test_evaluator)
        data = DATASETS.build(config.test_dataloader.dataset)
    batch = model.data_preprocessor(pseudo_collate([data[0]]), training=True)
    labels = batch['data_samples'][0].gt_sem_seg.data[0]
    assert labels.shape == config.crop_size
    assert set(labels[64:].unique().tolist()) == {VOID} == set(labels[:, 96:].unique().tolist())
    logits = torch.zeros(1, 11, *labels.shape, requires_grad=True)
    model.decode_head.loss_by_feat(logits, batch['data_samples'])['loss_ce'].backward()
    assert not logits.grad[0, :, labels == VOID].any() and logits.grad[0, :, labels < VOID].any()
    metric.dataset_meta = data.metainfo
    right = data[0]['data_samples'].gt_sem_seg
    wrong_outside = dict(data=torch.where(right.data == VOID, 0, right.data))
    metric.process({}, [dict(pred_sem_seg=wrong_outside, gt_sem_seg=dict(data=right.data))])
    assert metric.evaluate(1)['mIoU'] == 100


def test_nuclei_in_coco(read):
    """Counts and areas are those of the masks; the split is the same for ever."""
    read('nuclei')
    found = {}
    for split in SPLITS:
        coco = COCO(f'data/nuclei/annotations/{split}.json')
        for index, image in coco.imgs.items():
            name, number = image['file_name'][0], 'abcdef'.index(image['file_name'][0])
            assert image['file_name'] == f'{name}/images/{name}.png'
            found[name], side = split, 8 + 2 * number
            nuclei = coco.loadAnns(coco.getAnnIds(index))
            assert [nucleus['area'] for nucleus in nuclei] == [side**2] * (number + 1)
            assert nuclei[0]['bbox'] == [0, 0, side, side]
    assert found == NUCLEI


@pytest.mark.parametrize('task', CONFIGS)
def test_fresh_splits_do_not_overlap(task, read, tmp_path):
    """They have the pictures, objects and sizes of the usual ones, and are the same each time."""
    name = CONFIGS[task][0].rpartition('care_s0_')[2]
    found = []
    for fresh in (False, True, True):
        config = (
            read(task) if not found else Config.fromfile(ROOT / f'configs/{CONFIGS[task][0]}.py')
        )
        if fresh:
            use_fresh_splits(config, name, tmp_path / 'fresh')
        parts = {}
        with DefaultScope.overwrite_default_scope(config.default_scope):
            for split in SPLITS:
                data = DATASETS.build(config[f'{split}_dataloader'].dataset)
                infos = [data.get_data_info(index) for index in range(len(data))]
                parts[split] = {describe_info(info) for info in infos}
                assert len(parts[split]) == len(infos)
        found.append(parts)
    usual, fresh, again = found
    assert {split: len(part) for split, part in fresh.items()} == {
        split: len(part) for split, part in usual.items()
    }
    assert set().union(*fresh.values()) == set().union(*usual.values())
    assert sum(map(len, fresh.values())) == len(set().union(*fresh.values()))
    assert fresh == again != usual


def describe_info(info):
    """The picture, the mask, and the objects' boxes."""
    boxes = tuple(tuple(item['bbox']) for item in info.get('instances', ()))
    mask = info.get('seg_map_path')
    return str(Path(info['img_path']).resolve()), mask and str(Path(mask).resolve()), boxes
