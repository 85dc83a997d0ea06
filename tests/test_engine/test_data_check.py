"""Crafted data in the layouts of three toolboxes: they stop, are warned of, or pass silently."""

import io
import json
import re
import shutil
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import mmcv
import numpy as np
import pytest
import torch
from helpers import THIN
from mmengine.dataset import BaseDataset
from mmengine.fileio import LocalBackend, register_backend
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, METRICS
from mmengine.runner import Runner
from mmengine.structures import PixelData
from PIL import ExifTags, Image, features
from torch import nn

from mmcare.engine.data_checks import CHECKS, coco_file
from mmcare.engine.data_checks.classes import (
    check_categories,
    check_class_key,
    check_class_pictures,
    check_evaluator,
    check_folder_names,
    check_num_classes,
)
from mmcare.engine.data_checks.coco import check_required_keys
from mmcare.engine.data_checks.coco_file import read_coco
from mmcare.engine.data_checks.findings import Run, Split, Stop, Warn
from mmcare.engine.data_checks.headers import read_headers
from mmcare.engine.data_checks.masks import check_class_weights, unwrap
from mmcare.engine.data_checks.pictures import check_sizes
from mmcare.engine.data_checks.weights import check_frozen, check_layer_scale
from mmcare.engine.hooks.data_check_hook import DataCheckHook
from mmcare.models import CARE

pytest.importorskip('mmdet')
from mmdet.datasets import CocoDataset
from mmdet.datasets.api_wrappers import COCO
from mmdet.models.losses import CrossEntropyLoss as MMDetCrossEntropyLoss
from mmseg.models.losses import CrossEntropyLoss, DiceLoss
from pycocotools import mask as run_lengths

CLASSES = ('ant', 'bee', 'cat')
IDS = (5, 9, 1203)
SIZE = (20, 16)


class Tiny(BaseModel):
    def __init__(self, num_classes, ignore_index=255):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.head = nn.Module()
        self.head.num_classes, self.head.ignore_index = num_classes, ignore_index

    def forward(self, inputs, data_samples=None, mode='tensor'):
        return dict(loss=self.weight * 0) if mode == 'loss' else data_samples


def save(path, size=SIZE, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new('RGB', size).save(path, **options)


def save_labels(path, labels, dtype=np.uint8, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(labels).astype(dtype)).save(path, **options)


def content():
    """A COCO file with gaps in ids, a crowd, a picture without objects, and polygons."""
    polygon = [3, 2, 11, 2, 11, 7, 3, 7]
    counts = [17, 3, SIZE[0] * SIZE[1] - 20]
    item = dict(image_id=0, bbox=[3, 2, 8, 5], area=40, iscrowd=0, segmentation=[polygon])
    crowd = dict(item, iscrowd=1, segmentation=dict(counts=counts, size=list(SIZE[::-1])))
    items = [dict(item, category_id=number) for number in IDS]
    items += [dict(crowd, category_id=IDS[0], image_id=7), dict(items[0], image_id=7)]
    return dict(
        info=dict(categories=[dict(of='another kind')]),
        images=[dict(id=i, file_name=f'{i}.jpg', width=20, height=16) for i in (0, 3, 7)],
        annotations=[dict(item, id=2 * i + 1) for i, item in enumerate(items)],
        categories=[dict(id=number, name=name) for number, name in zip(IDS, CLASSES)],
    )


def make_coco(folder):
    for split in ('train', 'val'):
        for index in (0, 3, 7):
            save(folder / split / f'{index}.jpg')
        (folder / f'{split}.json').write_text(json.dumps(content()))
    shutil.copy(folder / 'val.json', folder / 'other.json')
    (folder / 'unlabelled.json').write_text(json.dumps(dict(content(), annotations=[])))


def make_lvis(folder):
    """Files without iscrowd and names of files; a category has another name than in mmdet."""
    make_coco(folder)
    for split in ('train', 'val'):
        lvis = content()
        every(iscrowd=None, segmentation=[[3, 2, 11, 2, 11, 7, 3, 7]])(lvis)
        for image in lvis['images']:
            image.update(neg_category_ids=[9], not_exhaustive_category_ids=[5])
            name = image.pop('file_name')
            image['coco_url'] = f'http://images.cocodataset.org/{split}/{name}'
        lvis['categories'][1].update(name='bea', synonyms=['bea'], frequency='r')
        (folder / f'{split}.json').write_text(json.dumps(lvis))


def make_panoptic(folder):
    """Add a map to each picture, with a thing (the first class) above stuff (the last)."""
    make_coco(folder)
    for split in ('train', 'val'):
        panoptic = content()
        for category in panoptic['categories']:
            category['isthing'] = int(category['name'] != CLASSES[-1])
        boxes = ([0, 0, 20, 8], [0, 8, 20, 8])
        segments = [
            dict(id=i + 1, category_id=IDS[2 * i], bbox=box, area=160, iscrowd=0)
            for i, box in enumerate(boxes)
        ]
        panoptic['annotations'] = [
            dict(image_id=i, file_name=f'{i}.png', segments_info=segments) for i in (0, 3, 7)
        ]
        (folder / f'{split}.json').write_text(json.dumps(panoptic))
        for index in (0, 3, 7):
            labels = np.array([1, 0, 0]) * np.arange(1, 3).repeat(160).reshape(16, 20, 1)
            save_labels(folder / split / f'{index}.png', labels)


def make_voc(folder):
    box = '<xmin>1</xmin><ymin>1</ymin><xmax>5</xmax><ymax>5</ymax>'
    item = '<object><name>{}</name><difficult>{}</difficult><bndbox>' + box + '</bndbox></object>'
    (folder / 'Annotations').mkdir(parents=True)
    for split in ('train', 'val'):
        (folder / f'{split}.txt').write_text(split)
        save(folder / f'JPEGImages/{split}.jpg')
        items = ''.join(item.format(name, 0) for name in CLASSES)
        (folder / f'Annotations/{split}.xml').write_text(
            f'<annotation><size><width>20</width><height>16</height></size>{items}</annotation>'
        )


def make_ade20k(folder):
    for split in ('train', 'val'):
        for index in range(2):
            save(folder / 'images' / split / f'{index}.jpg')
            labels = np.random.default_rng(index).integers(0, 151, SIZE[::-1])
            save_labels(folder / 'labels' / split / f'{index}.png', labels)


def make_imagenet(folder):
    for split in ('train', 'val'):
        for name in CLASSES:
            save(folder / split / name / '0.jpg')
        lines = [f'{name}/0.jpg {label}\n' for label, name in enumerate(CLASSES)]
        (folder / f'{split}.txt').write_text(''.join(lines))


def steps(*names):
    return [dict(type=name) for name in ('LoadImageFromFile', *names)]


def coco(folder, split):
    return dict(
        type='mmdet.CocoDataset',
        data_root=str(folder),
        ann_file=f'{split}.json',
        data_prefix=dict(img=split),
        metainfo=dict(classes=CLASSES),
        pipeline=steps('mmdet.LoadAnnotations', 'mmdet.PackDetInputs'),
    )


def instances(folder, split):
    load = dict(type='mmdet.LoadAnnotations', with_bbox=True, with_mask=True)
    return dict(coco(folder, split), pipeline=[dict(type='LoadImageFromFile'), load])


def lvis(folder, split):
    kind = 'mmdet.LVISV1Dataset'
    return dict(instances(folder, split), type=kind, data_prefix=dict(img=''))


def panoptic(folder, split):
    return dict(
        coco(folder, split),
        type='mmdet.CocoPanopticDataset',
        data_prefix=dict(img=split, seg=split),
        metainfo=dict(classes=CLASSES, thing_classes=CLASSES[:1], stuff_classes=CLASSES[2:]),
        pipeline=steps('mmdet.PackDetInputs'),  # panopticapi is not installed
    )


def voc(folder, split):
    return dict(
        coco(folder, split),
        type='mmdet.VOCDataset',
        ann_file=f'{split}.txt',
        data_prefix=dict(sub_data_root=''),
    )


def ade20k(folder, split):
    return dict(
        type='mmseg.ADE20KDataset',
        data_root=str(folder),
        data_prefix=dict(img_path=f'images/{split}', seg_map_path=f'labels/{split}'),
        pipeline=steps('mmseg.LoadAnnotations', 'mmseg.PackSegInputs'),
    )


def imagenet(folder, split):
    return dict(
        type='mmpretrain.CustomDataset',
        data_root=str(folder),
        data_prefix=split,
        pipeline=steps('mmpretrain.PackInputs'),
    )


def listed(folder, split):
    return dict(imagenet(folder, split), ann_file=f'{split}.txt', metainfo=dict(classes=CLASSES))


LAYOUTS = dict(
    coco=(make_coco, coco, 3),
    instances=(make_coco, instances, 3),
    ade20k=(make_ade20k, ade20k, 150),
    imagenet=(make_imagenet, imagenet, 3),
    lvis=(make_lvis, lvis, 3),
    listed=(make_imagenet, listed, 3),
    panoptic=(make_panoptic, panoptic, 3),
    voc=(make_voc, voc, 3),
)


@DATASETS.register_module()
class Picky(CocoDataset):
    def parse_data_info(self, raw_data_info):
        info = super().parse_data_info(raw_data_info)
        info['instances'] = info['instances'][:2]
        return info


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setattr(Runner, '_log_env', lambda *_: None)  # it looks for compilers, for a second
    monkeypatch.setitem(
        sys.modules, 'lvis', SimpleNamespace(LVIS=COCO)
    )  # its methods that are used
    return tmp_path / 'data'


def find(
    layout,
    data,
    classes=None,
    ignores=255,
    wrap=dict,
    evaluated='val',
    pads=None,
    loss=None,
    classwise=False,
    **changes,
):
    """What all checks that run before a run find."""
    _, dataset, number = LAYOUTS[layout]
    splits = []
    for mode in ('train', 'val'):
        config = wrap(dict(dataset(data, mode), serialize_data=False, **changes))
        metrics, configs = [], []
        if layout in ('coco', 'instances'):
            kinds = ['bbox', 'segm'] if layout == 'instances' else 'bbox'
            configs = [dict(type='mmdet.CocoMetric', ann_file=f'{data}/{evaluated}.json')]
            configs[0].update(metric=kinds, classwise=classwise)
            findings = [*check_required_keys(str(data / f'{mode}.json'), read_coco)]
            if findings:  # the dataset cannot be built
                return [('required_keys', finding) for finding in findings]
        elif layout == 'ade20k':
            configs = [dict(type='mmseg.IoUMetric')]
        if mode == 'val':
            metrics = [METRICS.build(dict(config)) for config in configs]
        else:
            configs = []
        for part in unwrap(DATASETS.build(config)):
            splits.append(Split(mode, part, metrics, configs))
    model = Tiny(classes or number, ignores)
    if pads is not None:
        model.data_preprocessor.seg_pad_val = pads
    model.head.loss_decode = loss
    run = Run(model, splits, splits[0])
    return [(name, finding) for name, check in CHECKS.items() for finding in check(run)]


def remove(path):
    return lambda data: (data / path).unlink()


def link_val(data):
    for file in (data / 'val').iterdir():
        file.unlink()
        file.symlink_to(data / 'train' / file.name)


def count_from_1(data):
    lines = [f'{name}/0.jpg {label + 1}\n' for label, name in enumerate(CLASSES)]
    (data / 'val.txt').write_text(''.join(lines))


def write(path, content=b''):
    return lambda data: (data / path).write_bytes(content)


def cut(path, size, kind='JPEG'):
    """Write the first bytes of a picture of noise."""

    def change(data):
        file = io.BytesIO()
        noise = np.random.default_rng(0).integers(0, 256, (*SIZE[::-1], 3), np.uint8)
        Image.fromarray(noise).save(file, kind)
        (data / path).write_bytes(file.getvalue()[:size])

    return change


def edit(*changes, path='train.json'):
    """Change COCO files by functions of their contents."""

    def change(data):
        held = json.loads((data / path).read_text())
        for function in changes:
            function(held)
        (data / path).write_text(json.dumps(held))

    return change


def both(*changes):
    return together(edit(*changes), edit(*changes, path='val.json'))


def together(*plants):
    return lambda data: [plant(data) for plant in plants]


def every(**values):
    """Set keys of all objects; None removes a key."""

    def change(held):
        for item in held['annotations']:
            item.update(values)
            for key in [key for key, value in values.items() if value is None]:
                del item[key]

    return change


def item(index=0, **values):
    return lambda held: held['annotations'][index].update(values)


def picture(index=0, **values):
    return lambda held: held['images'][index].update(values)


def category(index=0, **values):
    return lambda held: held['categories'][index].update(values)


def lack(part, key, index=0):
    return edit(lambda held: held[part][index].pop(key))


def ids_of(*ids):
    """Give the categories other ids, and their objects with them."""

    def change(held):
        new = dict(zip(IDS, ids))
        for entry in held['categories']:
            entry['id'] = new[entry['id']]
        for entry in held['annotations']:
            entry['category_id'] = new[entry['category_id']]

    return change


def corners(held):
    for index, entry in enumerate(held['annotations']):
        x, y = 4 + index, 6
        entry['bbox'] = [x, y, x + 9, y + 8]


def shares(held):
    for entry in held['annotations']:
        entry['bbox'] = [0.2, 0.1, 0.4, 0.3]


def many(number, **values):
    """Add healthy objects, and one of them with these values."""

    def change(held):
        first = held['annotations'][0]
        held['annotations'] += [dict(first, id=100 + i) for i in range(number)]
        held['annotations'][-1].update(values)

    return change


def supercategory(held):
    """Put a category without objects first, as Roboflow does."""
    held['categories'].insert(0, dict(id=0, name='insects', supercategory='none'))


def strings(held):
    for entry in held['images']:
        entry['id'] = str(entry['id'])
    for entry in held['annotations']:
        entry['image_id'] = str(entry['image_id'])


def compress(held):
    for entry in held['annotations']:
        mask = np.zeros(SIZE[::-1], np.uint8)
        mask[2:7, 3:11] = 1
        runs = run_lengths.encode(np.asfortranarray(mask))
        entry['segmentation'] = dict(runs, counts=runs['counts'].decode())


def roboflow(held):
    """Boxes, a first category that has no objects, and keys of Roboflow's own."""
    supercategory(held)
    every(segmentation=[])(held)
    for entry in held['images']:
        entry.update(license=1, date_captured='2024-01-01T00:00:00', extra=dict(name='a.jpg'))


def cvat(held):
    """Polygons, a crowd as run lengths, and keys of CVAT's own."""
    every(attributes=dict(occluded=True, rotation=0.0, track_id=0, keyframe=True))(held)
    for entry in held['images']:
        entry.update(license=0, flickr_url='', coco_url='', date_captured=0)


def labelme(held):
    """Rectangles as polygons, floats, and keys of labelme2coco's own."""
    every(segmentation=[[3.0, 2.0, 11.0, 2.0, 11.0, 7.0, 3.0, 7.0]], area=40.0, group_id=None)(held)
    for entry in held['images']:
        entry.update(license=0, url=None, date_captured=None)


def label_studio(held):
    """Boxes, numbers from 0, and `ignore: 0`."""
    ids_of(0, 1, 2)(held)
    every(segmentation=[], ignore=0)(held)


def brush(held):
    """Make all objects what CVAT exports for masks drawn with a brush."""
    runs = dict(counts=[17, 3, 300], size=[16, 20])
    every(segmentation=runs, iscrowd=1, attributes=dict(occluded=False))(held)


def flip(data):
    file = data / 'labels/train/1.png'
    broken = bytearray(file.read_bytes())
    broken[-30] ^= 4
    file.write_bytes(broken)


def forget(*names):
    def change(data):
        for name in names:
            shutil.copy(data / 'unlabelled.json', data / f'{name}.json')

    return change


def named(*names):
    return dict(classes=len(names), metainfo=dict(classes=names))


def rename(data):
    (data / 'val/ant').rename(data / 'val/dog')


def label(
    value=1,
    dtype=np.uint8,
    mode=None,
    size=SIZE,
    turned=False,
    values=(1, 2, 255),
    suffix='.png',
    **options,
):
    """Replace the label maps of training, and turn their pictures by EXIF."""

    def change(data):
        labels = np.full(size[::-1], value, dtype)
        labels[0, :3] = values
        labels = Image.fromarray(labels)
        for name in ('0', '1'):
            (data / f'labels/train/{name}.png').unlink()
            for split in ('train', 'val') if suffix != '.png' else ('train',):
                file = data / f'labels/{split}/{name}{suffix}'
                labels.convert(mode or labels.mode).save(file, **options)
        turn('images/train', 6 if turned else 1, ('0', '1'))(data)

    return change


def turn(folder, orientation=6, names=('0', '3'), size=SIZE):
    """Replace pictures, and turn them by EXIF."""

    def change(data):
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = orientation
        for name in names:
            save(data / f'{folder}/{name}.jpg', size, exif=exif)

    return change


def deep(path):
    def change(data):
        values = np.full(SIZE[::-1], 3136, np.uint16)
        Image.fromarray(values).save(data / path, 'PNG')

    return change


def colours(first, second):
    def change(data):
        for name, palette in (('0', first), ('1', second)):
            labels = Image.fromarray(np.indices(SIZE[::-1])[1].astype(np.uint8) % 2, 'L')
            labels = labels.convert('P')
            labels.putpalette(palette)
            labels.save(data / f'labels/train/{name}.png')

    return change


def add(path, size=SIZE):
    return lambda data: save(data / path, size)


def wrap(kind, **options):
    return dict(wrap=lambda dataset: dict(type=kind, **options, dataset=dataset))


def concatenate(dataset):
    repeated = dict(type='RepeatDataset', times=2, dataset=dataset)
    unlabelled = dict(dataset, ann_file='unlabelled.json')
    return dict(type='ConcatDataset', datasets=[unlabelled, repeated])


def link(data):
    """Put a picture where only the system finds it: below a link, and up again."""
    save(data / 'elsewhere/far.jpg')
    (data / 'elsewhere/sub').mkdir()
    (data / 'train/link').symlink_to(data / 'elsewhere/sub')
    edit(picture(file_name='link/../far.jpg'))(data)


def extra(data):
    """Add a folder with pictures of one class."""
    save(data / 'extra/ant/0.jpg')
    for name in CLASSES[1:]:
        (data / 'extra' / name).mkdir()


def wrap_with_extra():
    def concatenate(dataset):
        more = dict(dataset, data_prefix='extra')
        return dict(
            type='ConcatDataset',
            datasets=[dataset, more][: 1 + (dataset['data_prefix'] == 'train')],
        )

    return dict(wrap=concatenate)


def xml(old, new):
    def change(data):
        file = data / 'Annotations/train.xml'
        file.write_text(file.read_text().replace(old, new))

    return change


YES_NO = dict(classes=('no', 'yes'), palette=[0, 1])
TWO = dict(type='mmseg.BaseSegDataset', classes=2, metainfo=YES_NO)
ONE = dict(TWO, classes=1, metainfo=dict(classes=('yes',)))
STEPS = [dict(type='mmdet.LoadAnnotations'), dict(type='mmdet.PackDetInputs')]
FILTERED = dict(filter_cfg=dict(filter_empty_gt=True))
FROM_0 = dict(TWO, reduce_zero_label=True)
AS_POLYGONS = [dict(type='mmdet.LoadAnnotations', with_mask=True, poly2mask=False), *STEPS[1:]]
LOAD, PACK = dict(type='LoadImageFromFile'), dict(type='mmpretrain.PackInputs')
AS_DRAWN = dict(LOAD, color_type='color_ignore_orientation')
AS_STORED = dict(type='LoadImageFromFile', color_type='unchanged')
NOT_AS_STORED = r'stop: labels/train/0\.\w+.* one channel of 8 bits'
BROKEN = 'stop: 1 pictures of the train dataset cannot be read'
WEB = b'<!DOCTYPE html><html><title>404</title></html>'
HEIC = b'\0\0\0\x18ftypheic\0\0\0\0mif1heic' + bytes(64)
TIFF = dict(seg_map_suffix='.tif')
BMP = dict(seg_map_suffix='.bmp')
WEBP = dict(seg_map_suffix='.webp')
RED, BLUE = (0, 0, 0, 255, 0, 0), (0, 0, 0, 0, 0, 255)
# Layout, what is done to the data, arguments of find, and what is found: None passes silently.
HEALTHY = dict(
    evaluated_by_a_copy=('coco', str, dict(evaluated='other')),
    # Datasets in a wrapper may be evaluated with one file for all.
    in_wrappers=('coco', str, dict(wrap=concatenate)),
    balanced=('coco', str, wrap('ClassBalancedDataset', oversample_thr=0.1)),
    mixed=('coco', str, wrap('mmdet.MultiImageMixDataset', pipeline=[])),
    filtered=('coco', str, FILTERED),
    roboflow=('coco', both(roboflow), {}),
    no_segmentation=('coco', both(every(segmentation=None)), {}),
    cvat=('instances', both(cvat), {}),
    label_studio=('coco', both(label_studio), {}),
    labelme=('instances', both(labelme), {}),
    ids_as_strings=('coco', both(strings), {}),
    categories_as_strings=('coco', both(ids_of('a', 'b', 'c')), {}),
    subset=('coco', str, named('ant', 'cat')),
    descending_without_names=('coco', both(ids_of(9, 5, 1203)), {}),
    faults_of_other_classes=(
        'instances',
        both(item(1, segmentation=[]), lambda c: c['annotations'][1].pop('iscrowd')),
        named('ant', 'cat'),
    ),
    through_a_link=('coco', link, {}),
    no_iscrowd_in_training=('coco', edit(every(iscrowd=None)), {}),
    over_the_border=('coco', both(item(bbox=[-2, 9, 8, 8])), {}),
    whole_pictures=('coco', both(every(bbox=[0, 0, 20, 16])), {}),
    few_flat=('coco', edit(many(2000, bbox=[3, 3, 0.5, 8])), {}),
    sub_folders=(
        'coco',
        together(edit(picture(file_name='a/b/0.jpg')), add('train/a/b/0.jpg')),
        {},
    ),
    integers_as_floats=('coco', both(every(area=40.0, bbox=[3.0, 2.0, 8.0, 5.0])), {}),
    compressed=('instances', both(compress), {}),
    run_lengths=('instances', both(brush, every(iscrowd=0)), {}),
    several_polygons=(
        'instances',
        both(item(segmentation=[[1, 1, 4, 1, 4, 4], [5, 5, 9, 5, 9, 9]])),
        {},
    ),
    turned_as_drawn=('coco', turn('train'), dict(pipeline=[AS_DRAWN, *STEPS])),
    orientation_1=('coco', turn('train', 1), {}),
    turned_and_annotated_so=(
        'coco',
        together(turn('train', 6, ('0',)), edit(picture(width=16, height=20))),
        {},
    ),
    bytes_behind_the_end=('coco', lambda d: (d / 'train/0.jpg').open('ab').write(bytes(90)), {}),
    png_as_jpg=('coco', cut('train/0.jpg', None, 'PNG'), {}),
    webp_as_jpg=('coco', cut('train/0.jpg', None, 'WEBP'), {}),
    bmp_as_jpg=('coco', cut('train/0.jpg', None, 'BMP'), {}),
    gray=('coco', lambda d: Image.new('L', SIZE).save(d / 'train/0.jpg'), {}),
    inks=('coco', lambda d: Image.new('CMYK', SIZE).save(d / 'train/0.jpg'), {}),
    bits_that_are_kept=('coco', deep('train/0.jpg'), dict(pipeline=[AS_STORED, *STEPS])),
    turned_and_classified=('imagenet', turn('train/ant', 3, ('0',)), {}),
    masks=('ade20k', label(0, values=(1, 0, 1)), TWO),
    masks_with_ignored=('ade20k', label(0, values=(1, 0, 255)), TWO),
    masks_in_tiff=('ade20k', label(suffix='.tif'), TIFF),
    masks_in_bmp=('ade20k', label(suffix='.bmp'), BMP),
    label_16_bits_of_8=('ade20k', label(150, np.uint16), {}),
    label_1_bit_of_2_classes=('ade20k', label(mode='1'), TWO),
    label_palette=('ade20k', label(mode='P', bits=2), {}),
    label_as_turned=('ade20k', label(size=SIZE[::-1], turned=True), {}),
    same_palettes=('ade20k', colours(RED, RED), TWO),
    longer_palettes=('ade20k', colours(RED, RED + BLUE), TWO),
    ignored_by_dataset=('ade20k', label(201), dict(ignore_index=200)),
    no_classes=('ade20k', label(201), dict(type='mmseg.BaseSegDataset')),
    padded_with_ignored=('ade20k', str, dict(pads=255)),
    masks_of_floats=('ade20k', label(dtype=np.float32, suffix='.tif'), TIFF),
    masks_of_integers=('ade20k', label(1, np.int32, values=(1, 2, -1), suffix='.tif'), TIFF),
    masks_that_nothing_loads=('ade20k', remove('labels/train/0.png'), dict(pipeline=[LOAD])),
    dice_without_background=(
        'ade20k',
        label(0, values=(1, 0, 1)),
        dict(TWO, loss=DiceLoss(ignore_index=0)),
    ),
    masks_in_npy=(
        'ade20k',
        lambda d: [np.save(p.with_suffix('.npy'), [[0]]) for p in d.glob('labels/*/*.png')],
        dict(seg_map_suffix='.npy', pipeline=steps('mmseg.LoadBiomedicalAnnotation')),
    ),
    part_of_one_class=('imagenet', extra, wrap_with_extra()),
    folders_in_order=('imagenet', str, named(*CLASSES)),
    folders_of_other_names=('imagenet', str, named('a', 'b', 'c')),
    more_extensions=('imagenet', add('train/ant/1.webp'), dict(extensions=('.jpg', '.webp'))),
    other_files=('imagenet', lambda d: (d / 'train/ant/notes.txt').write_text('x'), {}),
)
HEALTHY.update({f'good_{layout}': (layout, str, {}) for layout in LAYOUTS})
COCO_CASES = dict(
    crowds=('instances', edit(brush), {}, r'stop: all 5 objects in .*train\.json.* iscrowd.* CVAT'),
    crowds_of_val=('coco', edit(brush, path='val.json'), {}, r'stop: all 5 objects in .*val\.json'),
    ignored_run_lengths=(
        'instances',
        edit(brush, every(iscrowd=0)),
        dict(pipeline=AS_POLYGONS),
        r'stop: 5 of 5 objects in .* have run lengths.* object 1 .* poly2mask=True',
    ),
    an_ignored_run_length=(
        'instances',
        edit(item(1, segmentation=dict(counts=[17, 3, 300], size=[16, 20]))),
        dict(pipeline=AS_POLYGONS),
        'warn: 1 of 4 objects in .* have run lengths',
    ),
    crowds_of_a_class=(
        'coco',
        edit(item(1, iscrowd=1)),
        {},
        "warn: all objects of 'bee' in .* CVAT",
    ),
    descending=(
        'coco',
        both(ids_of(9, 5, 1203)),
        dict(classwise=True),
        r"stop: do not ascend: 9, 5, 1203.*as 5, 9, 1203.* to \('bee', 'ant', 'cat'\)",
    ),
    descending_strings=(
        'coco',
        both(ids_of('9', '10', '11')),
        dict(classwise=True),
        "stop: ascend: '9', '10', '11'",
    ),
    picture_id_twice=(
        'coco',
        edit(picture(1, id=0)),
        {},
        r"stop: such as 0 for '0\.jpg', '3\.jpg'",
    ),
    object_id_0=('coco', edit(item(id=0), path='val.json'), {}, r'warn: val\.json.* has id 0'),
    picture_twice=('coco', edit(picture(1, file_name='0.jpg')), {}, r"warn: once .*'0\.jpg'"),
    name_twice=(
        'coco',
        both(category(1, name='ant')),
        named('ant', 'cat'),
        'stop: labels of the f',
    ),
    other_name_twice=(
        'coco',
        both(supercategory, supercategory),
        {},
        "warn: 'insects' is the name",
    ),
    area_0=(
        'coco',
        edit(item(area=0)),
        {},
        r"warn: 1 of 5 objects .* area of 0.*object 1 of '0\.j",
    ),
    width_0=('coco', edit(item(bbox=[3, 3, 0, 4])), {}, 'warn: 1 of 5 .* width or height of 0'),
    height_below_0=('coco', edit(item(bbox=[3, 3, 4, -4])), {}, 'warn: 1 of 5 .* of 0 or less'),
    thin=('coco', edit(item(bbox=[3, 3, 0.4, 4])), {}, 'warn: 1 of 5 .* width or height below 1'),
    box_of_nan=('coco', edit(item(bbox=[float('nan'), 3, 4, 4])), {}, 'warn: 1 of 5 .* NaN'),
    outside=('coco', edit(item(bbox=[40, 3, 4, 4])), {}, 'warn: 1 of 5 .* outside the picture'),
    ignored=('coco', edit(item(ignore=1)), {}, 'warn: 1 of 5 .* ignore set'),
    category_unlisted=(
        'coco',
        edit(item(category_id=77)),
        {},
        'warn: 1 of 5 .* category_id that is',
    ),
    category_as_string=(
        'coco',
        edit(item(category_id='5')),
        {},
        r"warn: listed \('5', where 5 is\)",
    ),
    picture_unlisted=(
        'coco',
        edit(item(image_id=77)),
        {},
        'warn: 1 of 5 .* image_id that is not li',
    ),
    all_unlisted=(
        'coco',
        edit(every(category_id='5')),
        {},
        r'stop: no object is left of 5 .*where 5',
    ),
    all_of_area_0=('coco', edit(every(area=0)), {}, 'stop: no object is left of 5 .* area of 0'),
    too_small=(
        'coco',
        together(add('train/3.jpg', size=(10, 8)), edit(picture(1, width=10, height=8))),
        dict(filter_cfg=dict(min_size=12)),
        r"warn: 1 of 3 pictures .*min_size=12, such as '3\.jpg'",
    ),
    too_small_of_lvis=(
        'lvis',
        together(add('train/3.jpg', size=(10, 8)), edit(picture(1, width=10, height=8))),
        dict(filter_cfg=dict(min_size=12)),
        r"warn: 1 of 3 pictures .* such as 'http.*train/3\.jpg'",
    ),
    other_places_of_lvis=(
        'lvis',
        edit(lambda c: c['categories'].reverse()),
        {},
        r"stop: \['bee'\] are not among .* \('cat', 'bea', 'ant'\)",
    ),
    left_out_by_a_subclass=(
        'coco',
        str,
        dict(type='Picky'),
        'warn: 1 of 5 objects .* left out by Picky, for a reason of its own',
    ),
    corners=('coco', both(corners), {}, r'stop: far beyond .* not the right and lower sides'),
    shares=('coco', both(shares), {}, r'stop: are shares of width and height'),
    val_unlabelled=(
        'coco',
        forget('val'),
        {},
        r'stop: no object in the validation data .*val\.json',
    ),
    val_empty=(
        'coco',
        edit(lambda c: c.update(images=[], annotations=[]), path='val.json'),
        {},
        'stop: validation data in .* are empty',
    ),
    same_pictures=(
        'coco',
        str,
        dict(data_prefix=dict(img='train')),
        'warn: 3 of 3 pictures of val',
    ),
    links_to_the_same_pictures=('coco', link_val, {}, 'warn: 3 of 3 pictures of val'),
    labels_from_1=(
        'listed',
        count_from_1,
        {},
        r"stop: labels in '.*val\.txt' are 1 to 3, .* 3 classes 0 to 2\. Labels count from 0",
    ),
    no_iscrowd=(
        'coco',
        edit(every(iscrowd=None), path='val.json'),
        {},
        "stop: 5 of 5 .*'iscrowd'.*ct 1",
    ),
    no_area=(
        'coco',
        lack('annotations', 'area'),
        {},
        r"stop: 1 of 5 objects .* lack 'area'.*0\.jpg",
    ),
    no_box=('coco', lack('annotations', 'bbox', 2), {}, "stop: lack 'bbox', such as object 5 of"),
    no_id=('coco', lack('annotations', 'id', 1), {}, "stop: lack 'id', such as object None of"),
    no_image_id=('coco', lack('annotations', 'image_id', 1), {}, "stop: lack 'image_id'"),
    no_category_id=('coco', lack('annotations', 'category_id', 1), {}, "stop: lack 'category_id'"),
    no_height=('coco', lack('images', 'height', 1), {}, "stop: 1 of 3 pictures .* lack 'height'"),
    no_file_name=(
        'coco',
        lack('images', 'file_name', 1),
        {},
        "stop: 1 pictures .* lack 'file_name'",
    ),
    no_picture_id=('coco', lack('images', 'id', 1), {}, r"stop: lack 'id', such as .*3\.jpg"),
    no_name=('coco', lack('categories', 'name'), {}, "stop: 1 of 3 categories .* lack 'name'"),
    no_categories=('coco', edit(lambda c: c.pop('categories')), {}, "stop: no list 'categories'"),
    no_images=('coco', edit(lambda c: c.pop('images')), {}, "stop: no list 'images'"),
    area_null=('coco', edit(item(area=None)), {}, 'stop: have area=None'),
    box_null=('coco', edit(item(bbox=None)), {}, 'stop: have bbox=None'),
    box_of_strings=('coco', edit(item(bbox=['3', '3', '4', '4'])), {}, r"stop: have bbox=\['3'"),
    no_json=('coco', write('train.json', b'{"images": ['), {}, r"stop: train\.json' is not JSON"),
    a_list=('coco', write('train.json', b'[]'), {}, r'stop: is no COCO file: it holds a list'),
    short_runs=(
        'instances',
        edit(item(segmentation=dict(counts=[5, 9], size=[16, 20]))),
        {},
        r"stop: that do not fill the picture, such as object 1 of '0\.jpg'",
    ),
    short_string=(
        'instances',
        edit(compress, lambda c: c['annotations'][1]['segmentation'].update(counts='52')),
        {},
        'stop: 1 of 5 .* that do not fill the picture',
    ),
    runs_of_val=(
        'instances',
        edit(item(segmentation=dict(counts=[5, 9], size=[16, 20])), path='val.json'),
        {},
        r'stop: val\.json.* do not fill',
    ),
    runs_turned=(
        'instances',
        edit(item(segmentation=dict(counts=[320], size=[20, 16]))),
        {},
        'stop: another size',
    ),
    polygon_of_nan=(
        'instances',
        edit(item(segmentation=[[1, 1, 4, 1, float('nan'), 4]])),
        {},
        'stop: NaN',
    ),
    two_points=('instances', edit(item(segmentation=[[1, 1, 4, 4]])), {}, 'warn: fewer than three'),
    two_points_of_val=(
        'instances',
        edit(item(segmentation=[[1, 1, 4, 4]]), path='val.json'),
        {},
        'stop: fewer than three',
    ),
    flat_without_mask=(
        'instances',
        edit(item(bbox=[3, 3, 0, 4], segmentation=[])),
        {},
        'warn: 1 of 5 .* width or height of 0',
    ),
    no_counts=(
        'instances',
        edit(item(segmentation=dict(counts=None, size=[16, 20]))),
        {},
        'stop: without counts',
    ),
    pairs=('instances', edit(item(segmentation=[[[1, 1], [4, 1], [4, 4]]])), {}, 'stop: of pairs'),
    flat_polygon=(
        'instances',
        edit(item(segmentation=[1, 1, 4, 1, 4, 4])),
        {},
        'stop: in a list of p',
    ),
    points_in_dicts=(
        'instances',
        edit(item(segmentation=dict(x=1, y=2))),
        {},
        'stop: without counts',
    ),
    no_masks=('instances', both(every(segmentation=[])), {}, r'stop: none of 5 .*detector\.py'),
    one_mask_missing=(
        'instances',
        edit(item(segmentation=[])),
        {},
        'stop: 1 of 5 .* no segmentation',
    ),
    misspelt=(
        'coco',
        str,
        named('ant', 'dog'),
        r"stop: \['dog'\] are not among .*to some of \('ant',",
    ),
    evaluator=(
        'coco',
        str,
        dict(evaluated='unlabelled'),
        r"warn: val_evaluator\.ann_file='.*unlabelled\.json' lists other objects",
    ),
    evaluator_of_other_pictures=(
        'coco',
        edit(picture(id=99), path='other.json'),
        dict(evaluated='other'),
        r"stop: val_evaluator\.ann_file='.*other\.json' lists other pictures",
    ),
    order=(
        'coco',
        both(lambda c: c['categories'].reverse()),
        {},
        r"stop: train\.json.* to \('cat', 'b",
    ),
    order_of_val=(
        'coco',
        edit(lambda c: c['categories'].reverse(), path='val.json'),
        {},
        r'stop: set val_',
    ),
    order_of_subset=('coco', str, named('cat', 'ant'), r"stop: classes to \('ant', 'cat'\)"),
    category=(
        'coco',
        edit(lambda c: c['categories'].pop(0)),
        {},
        r"stop: to some of \('bee', 'cat'\)",
    ),
    no_objects=('coco', forget('train'), {}, r"stop: classes \['ant', 'bee', 'cat'\]$"),
    no_objects_left=('coco', forget('train'), FILTERED, 'stop: training data are empty'),
    no_object_of_a_class=('coco', edit(lambda c: c['annotations'].pop(1)), {}, r"warn: \['bee'\]"),
    last_category=(
        'coco',
        edit(lambda c: c['categories'].pop(), lambda c: c['annotations'].pop(2)),
        {},
        r"warn: \['cat'\]",
    ),
    classes=('coco', str, dict(classes=2), r'stop: 3 classes, but model\.head\.num_classes=2'),
    more_classes=('coco', str, dict(classes=4), r'warn: 3 classes, but model\.head\.num_classes=4'),
    misspelt_voc=('voc', str, named('Ant', 'dog'), r'stop: .* called \[.ant., .bee., .cat.\]'),
    voc_size=('voc', xml('<width>20', '<width>40'), {}, r'warn: 1 of 1 sizes .* Correct'),
    voc_turned=('voc', turn('JPEGImages', names=['train']), {}, 'stop: EXIF data turn it'),
    difficult=(
        'voc',
        xml('<difficult>0', '<difficult>1'),
        {},
        'stop: all 3 objects in .* are ignored',
    ),
)
PICTURE_CASES = dict(
    image=('coco', remove('train/3.jpg'), {}, r"stop: 1 files of the train .*train/3\.jpg'"),
    image_in_wrappers=(
        'coco',
        remove('train/3.jpg'),
        dict(wrap=concatenate),
        r'stop: train/3\.jpg',
    ),
    image_in_list=('listed', remove('val/bee/0.jpg'), {}, r'stop: bee/0\.jpg'),
    empty=('coco', write('train/0.jpg'), {}, BROKEN + r' \(it is empty\).*0\.jpg'),
    web_page=('coco', write('train/0.jpg', WEB), {}, BROKEN + '.* starts .*DOCTYPE'),
    heic=('coco', write('train/0.jpg', HEIC), {}, BROKEN + '.* starts .*ftypheic'),
    cut_jpeg=('coco', cut('train/0.jpg', -150), {}, BROKEN + '.* truncated'),
    cut_png=('coco', cut('train/0.jpg', -150, 'PNG'), {}, BROKEN),
    cut_of_class=('imagenet', cut('train/ant/0.jpg', -150), {}, BROKEN),
    cut_below_mask=('ade20k', cut('images/train/0.jpg', -150), {}, BROKEN),
    two_of_val=(
        'coco',
        together(write('val/0.jpg'), write('val/3.jpg', WEB)),
        {},
        r"stop: 2 pictures of the val .*0\.jpg', .*3\.jpg'\.",
    ),
    turned=(
        'coco',
        turn('train'),
        {},
        r"stop: 2 of 3 sizes .*0\.jpg' are for \(20, 16\) .* as \(16, 20\).*color_ignore_or",
    ),
    other_size=(
        'coco',
        lambda d: save(d / 'train/0.jpg', (40, 32)),
        {},
        r'stop: 1 of 3 sizes .* Correct the sizes',
    ),
    mirrored=('coco', turn('train', 2), {}, r'warn: mirror or turn 2 of 3 pictures .*train/0\.jpg'),
    upside_down=('coco', turn('train', 3), {}, 'warn: mirror or turn 2 of 3'),
    upside_down_mask=('ade20k', turn('images/train', 4, ('0', '1')), {}, 'warn: turn 2 of 2'),
    turned_square=(
        'coco',
        together(turn('train', 6, ('0',), (20, 20)), edit(picture(height=20))),
        {},
        'warn: mirror or turn 1 of 3',
    ),
    bits=(
        'coco',
        deep('train/0.jpg'),
        {},
        r'warn: 1 pictures .* uint16.* 3136 to 3136.* 8 bits, 12 to 12',
    ),
    bits_behind_a_bmp=(
        'coco',
        together(
            add('train/0.bmp', (533, 16)),
            edit(picture(file_name='0.bmp', width=533)),
            deep('train/3.jpg'),
        ),
        {},
        'warn: 1 pictures .* uint16',
    ),
    bits_of_masks=('ade20k', deep('images/train/0.jpg'), {}, 'warn: 1 pictures .* uint16'),
    folders=('imagenet', rename, {}, r"stop: only one of .*train', .*val' has 'ant', 'dog'"),
    folders_reversed=('imagenet', str, named('cat', 'bee', 'ant'), 'stop: not in the ord'),
    skipped=(
        'imagenet',
        together(add('train/ant/1.webp'), add('train/bee/1.tiff'), add('train/bee/2.gif')),
        {},
        r'warn: 3 pictures .* \(1 \.\w+, 1 \.\w+, 1 \.\w+\)',
    ),
    one_class=(
        'imagenet',
        lambda d: [shutil.rmtree(d / s / n) for s in ('train', 'val') for n in CLASSES[1:]],
        dict(classes=1),
        'stop: all 1 pictures .* of one class',
    ),
    empty_class=(
        'imagenet',
        remove('val/bee/0.jpg'),
        {},
        "warn: no picture in .*val' is of the classes 'bee'",
    ),
    empty_class_in_training=('imagenet', remove('train/bee/0.jpg'), {}, "warn: train' .* 'bee'"),
)
MASK_CASES = dict(
    masks_of_255=(
        'ade20k',
        label(0, values=(255, 0, 255)),
        TWO,
        r'stop: as \[0, 255\], and \{255\} are',
    ),
    a_mask_missing_and_others_of_255=(
        'ade20k',
        together(label(0, values=(255, 0, 255)), remove('labels/train/0.png')),
        TWO,
        r'stop: as \[0, 255\], and \{255\} are',
    ),
    masks_of_1=(
        'ade20k',
        label(1, values=(1, 1, 1)),
        TWO,
        r'stop: one class \(values are read as \[1\]',
    ),
    masks_from_0=('ade20k', label(0, values=(1, 0, 1)), FROM_0, r'stop: read as \[0, 255\]'),
    one_class_of_two=(
        'ade20k',
        label(0, values=(1, 0, 1)),
        ONE,
        r"stop: \['background', 'yes'\].*out_channels=1",
    ),
    label_map=('ade20k', remove('labels/val/0.png'), {}, r'stop: 1 files of the val .*val/0\.png'),
    label_bit=('ade20k', flip, {}, r'stop: labels/train/1\.png.* is damaged .* Get them again'),
    label_16_bits=('ade20k', label(300, np.uint16), {}, NOT_AS_STORED),
    label_1_bit=('ade20k', label(mode='1'), {}, NOT_AS_STORED),
    label_of_fractions=('ade20k', label(1.5, np.float32, suffix='.tif'), TIFF, NOT_AS_STORED),
    label_of_colours=('ade20k', label(mode='RGB'), {}, NOT_AS_STORED),
    tiff_of_colours=('ade20k', label(mode='RGB', suffix='.tif'), TIFF, NOT_AS_STORED),
    bmp_of_colours=('ade20k', label(mode='RGB', suffix='.bmp'), BMP, NOT_AS_STORED),
    webp_of_colours=('ade20k', label(mode='RGB', suffix='.webp'), WEBP, NOT_AS_STORED),
    label_with_alpha=('ade20k', label(mode='RGBA'), {}, NOT_AS_STORED),
    label_in_jpeg=(
        'ade20k',
        label(0, values=(255, 90, 1), suffix='.jpg'),
        dict(TWO, seg_map_suffix='.jpg'),
        'warn: values for 2 classes.* JPEG changes',
    ),
    label_size=(
        'ade20k',
        label(size=(20, 15)),
        {},
        r'stop: 2 of 2 masks .* for \(20, 15\) .* as \(20, 16\)\. .* nearest',
    ),
    label_turned=(
        'ade20k',
        label(turned=True),
        {},
        r'stop: for \(20, 16\).* loaded as \(16, 20\)\. EXIF',
    ),
    palettes=(
        'ade20k',
        colours(RED, BLUE),
        TWO,
        r'warn: palettes .* 1 is \(255, 0, 0\) and \(0, 0, 255\)',
    ),
    padded_with_background=(
        'ade20k',
        label(0, values=(1, 0, 255)),
        dict(TWO, pads=0),
        r'warn: padding is not ignored.* model\.data_preprocessor\.seg_pad_val=0',
    ),
    ignored_by_head=(
        'ade20k',
        str,
        dict(ignores=200),
        r'stop: model\.head\.ignore_index=200, val_evaluator\.ignore_index=255',
    ),
    padded_with_a_class=(
        'ade20k',
        str,
        dict(pads=0),
        r'stop: model\.data_preprocessor\.seg_pad_val=0',
    ),
)
CASES = {**COCO_CASES, **PICTURE_CASES, **MASK_CASES}


@pytest.mark.parametrize('case', CASES)
def test_fault(data, case):
    layout, plant, arguments, expected = CASES[case]
    kind, _, words = expected.partition(': ')
    LAYOUTS[layout][0](data)
    plant(data)
    findings = find(layout, data, **arguments)
    stops = [finding for _, finding in findings if isinstance(finding, Stop)]
    assert bool(stops) == (kind == 'stop'), findings
    assert any(re.search(words, text, re.DOTALL) for text in stops or dict(findings).values()), (
        findings
    )
    assert len(findings) <= 4  # a fault hides no other


@pytest.mark.parametrize('case', HEALTHY)
def test_healthy_data_pass_silently(data, case):
    layout, plant, arguments = HEALTHY[case]
    LAYOUTS[layout][0](data)
    plant(data)
    assert find(layout, data, **arguments) == []


@pytest.mark.parametrize(
    'case', ['good_coco', 'ids_as_strings', 'over_the_border', 'crowds', 'no_area']
)
def test_large_files_are_sampled(data, case, monkeypatch):
    monkeypatch.setattr(coco_file, 'WHOLE', 0)
    monkeypatch.setattr(coco_file, 'BLOCKS', 3)
    (test_fault if case in CASES else test_healthy_data_pass_silently)(data, case)


def test_a_sample_is_spread(tmp_path, monkeypatch):
    """In any order of lists, with text beyond ASCII, and lists of these names in other places."""
    whole = content()
    many(999)(whole)
    whole['images'][1]['file_name'] = '猫.jpg'
    for index, entry in enumerate(whole['annotations']):
        entry.update(id=index, attributes=dict(text='é', images=[dict(of='others')]))
    file = tmp_path / 'x.json'
    for order in (list(whole), list(whole)[::-1]):
        file.write_text(json.dumps({key: whole[key] for key in order}, ensure_ascii=False), 'utf-8')
        monkeypatch.setattr(coco_file, 'WHOLE', 0)
        monkeypatch.setattr(coco_file, 'BLOCKS', 20)
        monkeypatch.setattr(coco_file, 'BLOCK', 5)
        read = read_coco(str(file))
        assert (read.images, read.categories) == (whole['images'], whole['categories'])
        ids = [entry['id'] for entry in read.annotations]
        assert len(ids) == len({*ids}) >= 90 and ids[0] == 0 and ids[-1] > 900
        assert all(entry == whole['annotations'][entry['id']] for entry in read.annotations)


@pytest.mark.parametrize(
    ('folders', 'classes', 'words'),
    [
        (['ant', 'bee'], ['ant', 'bee'], None),
        (['ant', 'bee'], ['a', 'b'], None),
        (['ant', 'bee'], [], None),
        (['.ipynb_checkpoints', 'ant', 'bee'], [], "folders '.ipynb_checkpoints'"),
        (['__MACOSX', 'ant', 'bee'], ['ant', 'bee'], "folders '__MACOSX'"),
        (['ant'], ['ant', 'bee'], "no folder for the classes 'bee'"),
        (['ant', 'bee', 'cat'], ['ant', 'bee'], "not among the classes: 'cat'"),
    ],
)
def test_folders_of_classes(folders, classes, words):
    findings = [*check_folder_names(folders, classes, 'data')]
    assert len(findings) == (words is not None)
    assert words is None or words in findings[0]


def test_names_of_classes_in_a_file(data):
    """MMEngine reads the file; its name is no list of classes."""
    make_imagenet(data)
    (data / 'classes.txt').write_text('\n'.join(CLASSES))
    dataset = imagenet(data, 'train')
    dataset['metainfo'] = dict(classes=str(data / 'classes.txt'))
    DataCheckHook().before_build(dict(dataset=dataset))
    del dataset['metainfo']
    for named in (dict(metainfo=dict(classes=[*CLASSES, 'dog'])), dict(classes=[*CLASSES, 'dog'])):
        with pytest.raises(ValueError, match="no folder for the classes 'dog'"):
            DataCheckHook().before_build(dict(dataset=dict(dataset, **named)))


def test_one_class_of_proposals(data):
    """mmdet's RPN detector stores its head, which knows no classes, as bbox_head."""
    make_coco(data)
    dataset = DATASETS.build(dict(coco(data, 'train'), serialize_data=False))
    model = nn.Module()
    model.bbox_head = type('RPNHead', (nn.Module,), dict(num_classes=1))()
    run = Run(model, [Split('train', dataset, [], [])])
    assert not [*check_num_classes(run)]
    model.bbox_head = type('RetinaHead', (nn.Module,), dict(num_classes=1))()
    assert [*check_num_classes(run)]


def test_objects_of_a_panoptic_dataset(data):
    """Boxes and masks have a file of their own."""
    make_panoptic(data)
    dataset = DATASETS.build(dict(panoptic(data, 'val'), serialize_data=False))
    config = dict(type='mmdet.CocoMetric', ann_file=str(data / 'other.json'))
    assert not [*check_evaluator(Run(Tiny(3), [Split('val', dataset, [], [config])]))]


def test_sizes_that_nothing_takes(data):
    """In MMEngine's own files, as those of mmocr, wrong sizes change nothing."""
    make_coco(data)
    entries = [dict(img_path='train/0.jpg', width=40, height=16, instances=[])]
    (data / 'own.json').write_text(json.dumps(dict(metainfo={}, data_list=entries)))
    prefix = dict(img_path='')
    dataset = BaseDataset('own.json', data_root=str(data), data_prefix=prefix, pipeline=steps())
    (finding,) = check_sizes(Run(Tiny(3), [Split('train', dataset)]))
    assert isinstance(finding, Warn) and '1 of 1 sizes' in finding


def test_pictures_that_do_not_exist_are_not_shared(data):
    make_coco(data)
    names = [name for name, _ in find('coco', data, data_prefix=dict(img='nowhere'))]
    assert 'files' in names and 'pictures' not in names


def test_classes_under_their_former_key(data):
    """mmdet then has the classes of COCO."""
    make_coco(data)
    former = dict(coco(data, 'train'), metainfo=dict(CLASSES=CLASSES), serialize_data=False)
    (finding,) = check_class_key(Run(Tiny(3), [Split('train', DATASETS.build(former))]))
    assert re.search(
        "CLASSES is ignored, and the classes are 'person', .*metainfo.classes", finding
    )


def test_categories_that_a_data_set_keeps(data):
    """As mmpose's, which writes those of the file under the former key of classes."""
    make_coco(data)
    kept = dict(coco(data, 'train'), metainfo=dict(CLASSES=[dict(id=1)]), serialize_data=False)
    assert not [*check_class_key(Run(Tiny(3), [Split('train', DATASETS.build(kept))]))]


@pytest.mark.parametrize('config', [dict(classes=['dog']), {}])
def test_the_line_of_classes_is_named(data, config):
    """Configs for own data have one."""
    make_coco(data)
    dataset = dict(coco(data, 'train'), metainfo=dict(classes=['dog']), serialize_data=False)
    run = Run(Tiny(1), [Split('train', DATASETS.build(dataset))], config=config)
    (finding,) = check_categories(run)
    line = 'the line `classes` of the config'
    assert f'set {line if config else "train_dataloader.dataset.metainfo.classes"} to' in finding


def test_the_head_of_a_segmentor_is_named(data):
    """mmseg's segmentors repeat its number of classes."""
    make_ade20k(data)
    dataset = DATASETS.build(dict(ade20k(data, 'train'), serialize_data=False))
    model = Tiny(160)
    model.num_classes = 160
    (finding,) = check_num_classes(Run(model, [Split('train', dataset)]))
    assert 'model.head.num_classes=160' in finding


def test_video_datasets(data):
    """Those of tracking hold videos, and more classes than their detector."""
    make_coco(data)
    dataset = DATASETS.build(dict(coco(data, 'train'), serialize_data=False))
    run = Run(Tiny(1), [Split('train', dataset, [], [])])
    assert [*check_num_classes(run)]
    dataset.num_all_imgs = 9
    assert not [*check_num_classes(run)]


def test_datasets_with_different_metainfo():
    """mmdet's ConcatDataset then has a list of them."""
    loader = SimpleNamespace(dataset=SimpleNamespace(metainfo=[{}, {}]))
    DataCheckHook().before_train_iter(SimpleNamespace(train_dataloader=loader), 0)


@pytest.mark.parametrize(
    ('weights', 'value', 'size', 'fails'),
    [
        ([1.0, 5.0], 255, None, True),
        ([1.0, 5.0], 1, (32, 32), True),  # is padded
        ([1.0, 5.0], 1, (16, 20), False),
        (None, 255, None, False),
    ],
)
def test_class_weights_and_ignored_labels(weights, value, size, fails):
    """They fail in means alone."""
    model = Tiny(2)
    model.head.loss_decode = CrossEntropyLoss(class_weight=weights, avg_non_ignore=True)
    model.data_preprocessor.size = size
    sample = Sample(torch.full((1, 16, 20), value))
    assert len([*check_class_weights(model, None, [sample])]) == fails
    total = Tiny(2)
    total.head.loss_decode = CrossEntropyLoss(class_weight=weights, reduction='sum')
    assert not [*check_class_weights(total, None, [sample])]
    total.head.loss_decode(torch.rand(1, 2, 16, 20), sample.gt_sem_seg.data, ignore_index=255)
    mmdet_loss = MMDetCrossEntropyLoss(class_weight=weights)  # of queries, which are not ignored
    other = Tiny(2)
    other.head.loss_decode = mmdet_loss
    assert not [*check_class_weights(other, None, [sample])]
    if weights and value == 255:
        with pytest.raises(IndexError):
            model.head.loss_decode(
                torch.rand(1, 2, 16, 20), sample.gt_sem_seg.data, ignore_index=255
            )


class Sample(dict):
    def __init__(self, labels):
        super().__init__(gt_sem_seg=PixelData(data=labels))
        self.gt_sem_seg = self['gt_sem_seg']


def build(layout, data, hook=(), kind=Runner, **changes):
    """A runner for one iteration; `changes` go into the datasets."""
    _, dataset, number = LAYOUTS[layout]
    train, val = (
        dict(
            dataset=dict(dataset(data, split), serialize_data=False, **changes),
            batch_size=2,
            sampler=dict(type='DefaultSampler', shuffle=False),
            collate_fn=dict(type='pseudo_collate'),
        )
        for split in ('train', 'val')
    )
    evaluator = dict(type='DumpResults', out_file_path=str(data / 'results.pkl'))
    return kind(
        model=Tiny(number),
        work_dir=str(data / 'work'),
        experiment_name=f'{data}{hook}',
        train_dataloader=train,
        val_dataloader=val,
        test_dataloader=val,
        train_cfg=dict(by_epoch=False, max_iters=1, val_interval=9, val_begin=9),
        val_cfg=dict(),
        test_cfg=dict(),
        val_evaluator=[evaluator],
        test_evaluator=evaluator,
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.1)),
        default_hooks=dict(
            checkpoint=dict(type='CheckpointHook', interval=9, save_last=False),
            data_check=dict(type='mmcare.DataCheckHook', **dict(hook)),
        ),
        log_level='WARNING',
    )


@pytest.mark.parametrize('layout', ['coco', 'ade20k', 'imagenet'])
def test_healthy_data_are_trained_on(data, layout):
    LAYOUTS[layout][0](data)
    runner = build(layout, data)
    runner.train()
    assert runner.iter == 1


@pytest.mark.parametrize(
    ('arguments', 'pictures', 'warnings'),
    [
        (dict(), 664, 1),
        (dict(), 118_287, 0),  # COCO
        (dict(from_scratch=True), 664, 0),
        (dict(layer_scale_init_value=1e-3), 664, 0),  # weights that were trained have more
    ],
)
def test_published_start_on_few_pictures(arguments, pictures, warnings):
    model = nn.Sequential(CARE(THIN, **arguments), nn.Linear(1, 1))
    assert len([*check_layer_scale(model, [None] * pictures)]) == warnings


FILE = dict(type='Pretrained', checkpoint='file.pth')


@pytest.mark.parametrize(
    ('arguments', 'around', 'warnings'),
    [
        (dict(frozen_stages=0), None, 1),
        (dict(frozen_stages=2, from_scratch=True), None, 1),
        (dict(frozen_stages=2, init_cfg=FILE), None, 0),
        (dict(frozen_stages=2), FILE, 0),  # the whole model's
        (dict(from_scratch=True), None, 0),
    ],
)
def test_frozen_random_weights(arguments, around, warnings):
    model = nn.Sequential(nn.Sequential(CARE(THIN, **arguments)))
    model.init_cfg = around
    findings = [*check_frozen(model)]
    assert len(findings) == warnings
    assert all('0.0 has frozen_stages=' in finding for finding in findings)


@pytest.mark.parametrize(
    ('case', 'name', 'error'),
    [('no_area', 'required_keys', KeyError), ('crowds_of_val', 'crowds', None)],
)
def test_named_before_training_and_switched_off(data, case, name, error):
    """Files are checked before datasets are built from them, where mmdet raises KeyErrors."""
    _, plant, _, words = CASES[case]
    make_coco(data)
    plant(data)
    runner = build('coco', data)
    with pytest.raises(ValueError, match=rf'(?s){words[6:]}.* \[{name}\]$'):
        runner.train()
    for hook in (dict(enabled=False), dict(skip=[name]), dict(skip=name)):
        runner = build('coco', data, hook)
        if error is None:
            runner.train()
            assert runner.iter == 1
        else:
            with pytest.raises(error):
                runner.train()


def test_unknown_names_of_checks():
    with pytest.raises(ValueError, match=r"no checks \['crowd'\] to skip"):
        DataCheckHook(skip=['crowd', 'sizes'])


def test_checked_once(data, monkeypatch):
    make_imagenet(data)
    runs = []
    monkeypatch.setitem(CHECKS, 'files', lambda run: runs.append(len(run.splits)) or [])
    runner = build('imagenet', data)
    runner.train()
    runner.call_hook('before_run')
    runner.test()
    assert runs == [2, 1]


def test_flexible_runner(data):
    FlexibleRunner = pytest.importorskip('mmengine.runner').FlexibleRunner
    make_coco(data)
    runner = build('coco', data, kind=FlexibleRunner)
    runner.train()
    assert runner.iter == 1
    edit(brush)(data)
    with pytest.raises(ValueError, match=r'iscrowd=1.* \[crowds\]'):
        build('coco', data, kind=FlexibleRunner).train()


def test_classes_as_types(data):
    """In place of names, configs can have classes, and dotted names."""
    make_coco(data)
    lack('annotations', 'area')(data)
    for kind in (CocoDataset, 'mmdet.datasets.CocoDataset'):
        with pytest.raises(ValueError, match="lack 'area'"):
            build('coco', data, type=kind).train()


def test_what_may_be_meant_is_a_warning(data, capfd):
    """Words of a prompt, as mmdet's MM-Grounding-DINO has them, 256 for the 1203 of LVIS."""
    make_coco(data)
    edit(lambda held: held['annotations'].pop(1))(data)
    runner = build('coco', data)
    runner.model.language_model = nn.Identity()
    runner.model.head.num_classes = 2
    runner.model.other = nn.Identity()
    runner.model.other.num_classes = 80
    runner.model.backbone = CARE(THIN, frozen_stages=1)
    gone = dict(runner._test_dataloader['dataset'], ann_file='gone.json')
    runner._test_dataloader = dict(runner._test_dataloader, dataset=gone)
    runner.train()
    warned = ''.join(capfd.readouterr())
    assert runner.iter == 1 and "is one of the classes ['bee']" in warned
    assert 'backbone has random weights and layer scales of 1e-06' in warned
    assert 'backbone has frozen_stages=1, and no file has been loaded' in warned
    assert 'model.head.num_classes=2' in warned and 'model.other.num_classes=80' in warned
    assert f"the test split needs '{data}/gone.json'" in warned


@pytest.mark.parametrize(
    ('layout', 'changes'),
    [
        ('coco', dict(backend_args=dict(backend='remote'))),
        ('coco', dict(data_prefix=dict(img='https://example.org/'))),
        ('ade20k', dict(data_prefix=dict(img_path='images/train', seg_map_path='s3://labels/'))),
        ('listed', dict(pipeline=[dict(LOAD, backend_args=dict(backend='remote')), PACK])),
    ],
)
def test_remote_data_pass(data, layout, changes):
    register_backend('remote', type('Remote', (LocalBackend,), {}), force=True)
    LAYOUTS[layout][0](data)
    for name in ['train/3.jpg', 'val/0.jpg', 'labels/train/1.png', 'train/ant/0.jpg']:
        file = data / name
        file.unlink(missing_ok=True)
    if 'backend_args' in changes:
        forget('val')(data)
    runner = build(layout, data, **changes)
    assert runner.train_loop
    runner.call_hook('before_run')


def test_local_data_with_a_named_backend(data):
    make_coco(data)
    (data / 'train/3.jpg').unlink()
    runner = build('coco', data, backend_args=dict(backend='local'))
    assert runner.train_loop
    with pytest.raises(ValueError, match='1 files of the train dataset do not exist'):
        runner.call_hook('before_run')


@pytest.mark.parametrize('orientation', range(1, 9))
def test_sizes_of_turned_pictures_in_tiff(tmp_path, orientation):
    """They are turned even if the loader is told not to."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    path = str(tmp_path / 'a.tif')
    Image.new('RGB', SIZE).save(path, exif=exif)
    header = read_headers([path], mmcv.imread)[path]
    for flag in ('color', 'color_ignore_orientation', 'unchanged'):
        assert header.size == mmcv.imread(path, flag).shape[1::-1] and header.turn == 1


@pytest.mark.skipif(not features.check('avif'), reason='Pillow has no AVIF')
def test_sizes_of_turned_pictures_in_avif(tmp_path):
    """Whether they are turned depends on the decoder, so they have no header."""
    exif = Image.Exif()
    for orientation in (1, 6):
        exif[ExifTags.Base.Orientation] = orientation
        path = str(tmp_path / f'{orientation}.avif')
        Image.new('RGB', SIZE).save(path, exif=exif)
        assert (read_headers([path], mmcv.imread)[path] is None) is (orientation == 6)


@pytest.mark.parametrize(('mode', 'reduced'), [('train', True), ('val', False), ('test', True)])
def test_label_beyond_the_classes(data, mode, reduced):
    make_ade20k(data)
    labels = np.full(SIZE[::-1], 255)
    labels[2, 3] = 150 + reduced
    labels[3, 3:9] = range(6)
    path = data / 'labels' / ('train' if mode == 'train' else 'val') / '0.png'
    save_labels(path, labels)
    runner = build('ade20k', data, reduce_zero_label=reduced)
    words = rf"'{path}' has the label {150 + reduced}, the last class has {149 + reduced}"
    with pytest.raises(ValueError, match=words):
        getattr(runner, mode)()
    assert runner.iter == 0
    off = dict(skip=['label_values'])
    getattr(build('ade20k', data, off, reduce_zero_label=reduced), mode)()


class Clips(BaseDataset):
    """As mmaction2's VideoDataset: a file of lines, each a video and its label."""

    def __init__(self, labels, key='label'):
        self.labels, self.key = labels, key
        super().__init__(serialize_data=False)

    def load_data_list(self):
        return [{'filename': 'a.mp4', self.key: label} for label in self.labels]


def test_one_class_of_pictures():
    """Is a fault of classifiers alone: self-supervised training reads no labels."""
    splits = [Split('train', Clips([0, 0, 0]))]
    assert [*check_class_pictures(Run(Tiny(3), splits))]
    assert not [*check_class_pictures(Run(nn.Module(), splits))]


@pytest.mark.parametrize(
    ('key', 'labels', 'words'),
    [
        ('label', [0, 7], 'labels in .* are 0 to 7, and those of the 2 classes 0 to 1'),
        ('label', [0, 1], 'does not check pictures of Clips (train)'),
        ('other', [0, 7], 'does not check pictures and labels of Clips (train)'),
    ],
)
def test_labels_of_other_toolboxes(data, logged, key, labels, words):
    """Labels are found where the dataset gives them; the log says what is not checked."""
    hook, model = DataCheckHook(), Tiny(2)
    model.backbone = nn.Module()
    model.backbone.num_classes = -1  # as mmpretrain's VGG
    hook._find_splits = lambda _: [Split('train', Clips(labels, key))]
    loops = dict.fromkeys(('_train_loop', '_val_loop', '_test_loop', '_test_dataloader'))
    runner = SimpleNamespace(model=model, cfg={}, **loops)
    refused = pytest.raises(ValueError, match=words) if words.startswith('labels') else None
    with refused or nullcontext():
        hook.before_run(runner)
    assert refused or any(words in text for _, text in logged)
