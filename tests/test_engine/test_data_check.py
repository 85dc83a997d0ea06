"""Data that would spoil a run are named before training, in the layouts of three toolboxes."""

import json
import shutil

import numpy as np
import pytest
import torch
from mmengine.model import BaseModel
from mmengine.runner import Runner
from PIL import ExifTags, Image
from torch import nn

pytest.importorskip('mmdet')

CLASSES = ('ant', 'bee', 'cat')
IDS = (5, 9, 1203)
SIZE = (8, 6)


class Tiny(BaseModel):
    def __init__(self, num_classes, ignore_index):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.head = nn.Module()
        self.head.num_classes, self.head.ignore_index = num_classes, ignore_index

    def forward(self, inputs, data_samples=None, mode='tensor'):
        return dict(loss=self.weight * 0) if mode == 'loss' else data_samples


def make_coco(folder):
    for split in ('train', 'val'):
        (folder / split).mkdir(parents=True)
        for index in range(2):
            Image.new('RGB', SIZE).save(folder / split / f'{index}.jpg')
        # Numbers with gaps, an image without objects, and a category without objects.
        annotation = dict(image_id=0, iscrowd=0, bbox=[1, 1, 4, 4], area=16)
        content = dict(
            images=[dict(id=i, file_name=f'{i}.jpg', width=8, height=6) for i in range(2)],
            categories=[dict(id=number, name=name) for number, name in zip(IDS, CLASSES)],
            annotations=[dict(annotation, id=i, category_id=IDS[i]) for i in (0, 2)],
        )
        (folder / f'{split}.json').write_text(json.dumps(content))
    shutil.copy(folder / 'val.json', folder / 'other.json')
    (folder / 'unlabelled.json').write_text(json.dumps(dict(content, annotations=[])))


def make_panoptic(folder):
    """Add a map to each image, with a thing (the first class) above stuff (the last)."""
    make_coco(folder)
    for split in ('train', 'val'):
        content = json.loads((folder / f'{split}.json').read_text())
        for category in content['categories']:
            category['isthing'] = int(category['name'] != CLASSES[-1])
        boxes = dict(enumerate(([0, 0, 8, 3], [0, 3, 8, 3]), 1))
        segments = [
            dict(id=i, category_id=IDS[2 * i - 2], bbox=box, area=24, iscrowd=0)
            for i, box in boxes.items()
        ]
        content['annotations'] = [
            dict(image_id=i, file_name=f'{i}.png', segments_info=segments) for i in range(2)
        ]
        (folder / f'{split}.json').write_text(json.dumps(content))
        for index in range(2):
            labels = np.array([1, 0, 0]) * np.arange(1, 3).repeat(24).reshape(6, 8, 1)
            save_labels(folder / split / f'{index}.png', labels)


def make_voc(folder):
    for kind in ('JPEGImages', 'Annotations'):
        (folder / kind).mkdir(parents=True)
    for split in ('train', 'val'):
        (folder / f'{split}.txt').write_text(split)
        Image.new('RGB', SIZE).save(folder / f'JPEGImages/{split}.jpg')
        box = '<xmin>1</xmin><ymin>1</ymin><xmax>5</xmax><ymax>5</ymax>'
        (folder / f'Annotations/{split}.xml').write_text(
            '<annotation><size><width>8</width><height>6</height></size>'
            f'<object><name>ant</name><bndbox>{box}</bndbox></object></annotation>'
        )


def make_ade20k(folder):
    for split in ('train', 'val'):
        for kind in ('images', 'labels'):
            (folder / kind / split).mkdir(parents=True)
        for index in range(2):
            Image.new('RGB', SIZE).save(folder / 'images' / split / f'{index}.jpg')
            labels = np.random.default_rng(index).integers(0, 151, SIZE[::-1])
            save_labels(folder / 'labels' / split / f'{index}.png', labels)


def save_labels(path, labels, dtype=np.uint8, **options):
    Image.fromarray(np.asarray(labels).astype(dtype)).save(path, **options)


def make_imagenet(folder):
    for split in ('train', 'val'):
        for name in CLASSES:
            (folder / split / name).mkdir(parents=True)
            Image.new('RGB', SIZE).save(folder / split / name / '0.jpg')
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


def panoptic(folder, split):
    return dict(
        coco(folder, split),
        type='mmdet.CocoPanopticDataset',
        data_prefix=dict(img=split, seg=split),
        metainfo=dict(classes=CLASSES, thing_classes=CLASSES[:2], stuff_classes=CLASSES[2:]),
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
    ade20k=(make_ade20k, ade20k, 150),
    imagenet=(make_imagenet, imagenet, 3),
    listed=(make_imagenet, listed, 3),
    panoptic=(make_panoptic, panoptic, 3),
    voc=(make_voc, voc, 3),
)


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setattr(Runner, '_log_env', lambda *_: None)  # it looks for compilers, for a second
    return tmp_path / 'data'


def build(
    layout, data, classes=None, ignores=255, wrap=dict, enabled=True, evaluated='val', **changes
):
    """A runner for one iteration; `wrap` goes around the datasets, `changes` into them."""
    make, dataset, number = LAYOUTS[layout]
    if not data.exists():
        make(data)
    changes['serialize_data'] = False  # or mmengine collects garbage, for a second
    train, val = (
        dict(
            dataset=wrap(dict(dataset(data, split), **changes)),
            batch_size=2,
            sampler=dict(type='DefaultSampler', shuffle=False),
            collate_fn=dict(type='pseudo_collate'),
        )
        for split in ('train', 'val')
    )
    evaluator = dict(type='mmdet.CocoMetric', ann_file=f'{data}/{evaluated}.json')
    if layout != 'coco':
        evaluator = dict(type='DumpResults', out_file_path=str(data / 'results.pkl'))
    return Runner(
        model=Tiny(classes or number, ignores),
        work_dir=str(data / 'work'),
        experiment_name=f'{data}{enabled}',
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
            data_check=dict(type='mmcare.DataCheckHook', enabled=enabled),
        ),
        log_level='WARNING',
    )


def remove(path):
    return lambda data: (data / path).unlink()


def edit(path, method, *arguments):
    def change(data):
        content = json.loads((data / path).read_text())
        getattr(content['categories'], method)(*arguments)
        content['info'] = dict(categories=[dict(of='another kind')])
        (data / path).write_text(json.dumps(content))

    return change


def flip(data):
    content = bytearray((data / 'labels/train/1.png').read_bytes())
    content[-30] ^= 4
    (data / 'labels/train/1.png').write_bytes(content)


def forget(data):
    shutil.copy(data / 'unlabelled.json', data / 'train.json')


def named(*names):
    return dict(classes=len(names), metainfo=dict(classes=names))


def rename(data):
    (data / 'val/ant').rename(data / 'val/dog')


def label(
    value=1, dtype=np.uint8, mode=None, size=SIZE, turned=False, values=(1, 2, 255), **options
):
    """Replace the label maps of training, and turn their images by EXIF."""

    def change(data):
        labels = np.full(size[::-1], value, dtype)
        labels[0, :3] = values
        labels = Image.fromarray(labels)
        for name in ('0', '1'):
            labels.convert(mode or labels.mode).save(data / f'labels/train/{name}.png', **options)
        turn('images/train', turned)(data)

    return change


def turn(folder, turned=True):
    """Replace images, and turn them by EXIF."""

    def change(data):
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = 6 if turned else 1
        for name in ('0', '1'):
            Image.new('RGB', SIZE).save(data / f'{folder}/{name}.jpg', exif=exif)

    return change


def wrap(kind, **options):
    return dict(wrap=lambda dataset: dict(type=kind, **options, dataset=dataset))


def concatenate(dataset):
    repeated = dict(type='RepeatDataset', times=2, dataset=dataset)
    unlabelled = dict(dataset, ann_file='unlabelled.json')
    return dict(type='ConcatDataset', datasets=[unlabelled, repeated])


YES_NO = dict(classes=('no', 'yes'), palette=[0, 1])
TWO = dict(type='mmseg.BaseSegDataset', classes=2, metainfo=YES_NO)
STEPS = [dict(type='mmdet.LoadAnnotations'), dict(type='mmdet.PackDetInputs')]
FILTERED = dict(filter_cfg=dict(filter_empty_gt=True))
FROM_0 = dict(TWO, reduce_zero_label=True)
AS_DRAWN = dict(type='LoadImageFromFile', color_type='color_ignore_orientation')
NOT_AS_STORED = r'labels/train/1\.png.* one channel of 8 bits'
# Layout, what is done to the data, arguments of build, and what the message says: None passes.
CASES = {f'good_{layout}': (layout, str, {}, None) for layout in LAYOUTS}
CASES.update(
    # Datasets in a wrapper may be evaluated with one file for all.
    good_in_wrappers=('coco', str, dict(wrap=concatenate, evaluated='other'), None),
    good_and_balanced=('coco', str, wrap('ClassBalancedDataset', oversample_thr=0.1), None),
    good_and_mixed=('coco', str, wrap('mmdet.MultiImageMixDataset', pipeline=[]), None),
    masks=('ade20k', label(0, values=(1, 0, 1)), TWO, None),
    masks_with_ignored=('ade20k', label(0, values=(1, 0, 255)), TWO, None),
    masks_of_255=('ade20k', label(0, values=(255, 0, 255)), TWO, r'as \[0, 255\], and \{255\} are'),
    masks_of_1=('ade20k', label(1, values=(1, 1, 1)), TWO, r'one class \(values are read as \[1\]'),
    masks_from_0=('ade20k', label(0, values=(1, 0, 1)), FROM_0, r'read as \[0, 255\]'),
    misspelt=('coco', str, named('ant', 'dog'), r"\['dog'\] are not among .*to some of \('ant', '"),
    misspelt_voc=('voc', str, named('Ant', 'dog'), r"\['Ant', 'dog'\], .* files call \['ant'\]"),
    no_objects=('coco', forget, {}, r"classes \['ant', 'bee', 'cat'\]$"),
    no_objects_left=('coco', forget, FILTERED, 'training data are empty'),
    turned=('coco', turn('train'), {}, r"train/0\.jpg' are for \(8, 6\) .* loaded as \(6, 8\)"),
    turned_as_drawn=('coco', turn('train'), dict(pipeline=[AS_DRAWN, *STEPS]), None),
    folders_in_order=('imagenet', str, named(*CLASSES), None),
    folders_of_other_names=('imagenet', str, named('a', 'b', 'c'), None),
    folders_reversed=('imagenet', str, named('cat', 'bee', 'ant'), 'not in the ord'),
    evaluator=('coco', str, dict(evaluated='other'), r"val_evaluator\.ann_file='.*other\.json' is"),
    image=('coco', remove('train/1.jpg'), {}, r"1 files of the train .*train/1\.jpg'"),
    image_in_wrappers=('coco', remove('train/1.jpg'), dict(wrap=concatenate), r'train/1\.jpg'),
    image_in_list=('listed', remove('val/bee/0.jpg'), {}, r'bee/0\.jpg'),
    order=('coco', edit('train.json', 'reverse'), {}, r"train\.json.* to \('cat', 'bee', 'ant'\)"),
    order_of_val=('coco', edit('val.json', 'reverse'), {}, r'val\.json.* set val_'),
    order_of_subset=('coco', str, named('cat', 'ant'), r"classes to \('ant', 'cat'\)"),
    subset=('coco', str, named('ant', 'cat'), None),
    category=('coco', edit('train.json', 'pop', 0), {}, r"classes to some of \('bee', 'cat'\)"),
    last_category=('coco', edit('train.json', 'pop'), {}, None),
    classes=('coco', str, dict(classes=2), r'3 classes, but model\.head\.num_classes=2'),
    classes_of_labels=('ade20k', str, dict(classes=19), '150 classes, .*num_classes=19'),
    folders=('imagenet', rename, {}, r"only one of .*train', .*val' has ant, dog"),
    label_map=('ade20k', remove('labels/val/0.png'), {}, r'1 files of the val .*val/0\.png'),
    label_bit=('ade20k', flip, {}, r'labels/train/1\.png.* is damaged .* get it again'),
    label_16_bits=('ade20k', label(300, np.uint16), {}, NOT_AS_STORED),
    label_16_bits_of_8=('ade20k', label(150, np.uint16), {}, None),
    label_1_bit=('ade20k', label(mode='1'), {}, NOT_AS_STORED),
    label_1_bit_of_2_classes=('ade20k', label(mode='1'), TWO, None),
    label_palette=('ade20k', label(mode='P', bits=2), {}, None),
    label_size=('ade20k', label(size=(8, 5)), {}, r'png.* for \(8, 5\).* loaded as \(8, 6\)'),
    label_turned=('ade20k', label(turned=True), {}, r'for \(8, 6\).* loaded as \(6, 8\)'),
    label_as_turned=('ade20k', label(size=SIZE[::-1], turned=True), {}, None),
    ignored_by_dataset=('ade20k', label(201), dict(ignore_index=200), None),
    ignored_by_head=('ade20k', label(201), dict(ignores=200), None),
    no_classes=('ade20k', label(201), dict(type='mmseg.BaseSegDataset'), None),
)


@pytest.mark.parametrize('case', CASES)
def test_named_before_training_or_passed(data, case):
    layout, plant, arguments, words = CASES[case]
    LAYOUTS[layout][0](data)
    plant(data)
    runner = build(layout, data, **arguments)
    if words is None:
        runner.train()
        assert runner.iter == 1
        return
    with pytest.raises(ValueError, match=words):
        runner.train()
    assert runner.iter == 0
    unchecked = build(layout, data, enabled=False, **arguments)
    assert unchecked.train_loop and unchecked.val_loop
    unchecked.call_hook('before_run')


def test_what_may_be_meant_is_a_warning(data, capfd):
    """Words of a prompt, as mmdet's MM-Grounding-DINO has them, 256 for the 1203 of LVIS."""
    runner = build('coco', data, classes=2)
    runner.model.language_model = nn.Identity()
    runner.model.other = nn.Identity()
    runner.model.other.num_classes = 80
    gone = dict(runner._test_dataloader['dataset'], ann_file='gone.json')
    runner._test_dataloader = dict(runner._test_dataloader, dataset=gone)
    runner.train()
    warned = ''.join(capfd.readouterr())
    assert runner.iter == 1 and "is one of the classes ['bee']" in warned
    assert 'model.head.num_classes=2' in warned and 'model.other.num_classes=80' in warned
    assert f"the test split needs '{data}/gone.json'" in warned


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
