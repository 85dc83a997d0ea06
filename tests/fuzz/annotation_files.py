"""Annotation files: COCO's JSON and ADE20K's label maps, damaged, forged and nonsensical."""

import io
import json
import math
import random
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fuzz.harness import BYTE_DAMAGE, Kind, Made
from fuzz.models import QuietRunner
from mmengine.config import Config
from mmengine.model import BaseModel
from PIL import Image
from torch import nn

from mmcare.sample_data import make_ade20k, make_coco

CONFIGS = Path(__file__).parents[2] / 'configs' / '_base_' / 'datasets'
IMAGE_SIZE = 96
COCO_FILE = 'annotations/instances_train2017.json'
NAN = float('nan')


class Collector(BaseModel):
    """A model that keeps what it is given."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.head = nn.Module()
        self.head.num_classes = num_classes
        self.samples: list[Any] = []

    def forward(self, inputs: Any, data_samples: Any = None, mode: str = 'tensor') -> Any:
        self.samples += data_samples
        return dict(loss=self.weight * 0)


def collect(dataset: dict[str, Any], num_classes: int, work_dir: Path) -> list[Any]:
    """Train for an epoch with mmcare's runner and hook; return the samples that were seen."""
    model = Collector(num_classes)
    QuietRunner(
        model=model,
        work_dir=str(work_dir / 'work'),
        experiment_name='collect',
        train_dataloader=dict(
            dataset=dataset,
            batch_size=1,
            sampler=dict(type='DefaultSampler', shuffle=False),
            collate_fn=dict(type='pseudo_collate'),
        ),
        train_cfg=dict(by_epoch=True, max_epochs=1),
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.1)),
        default_hooks=dict(
            checkpoint=dict(type='CheckpointHook', interval=9, save_last=False),
            data_check=dict(type='mmcare.DataCheckHook'),
        ),
        default_scope=dict(CocoDataset='mmdet', ADE20KDataset='mmseg')[dataset['type']],
        log_level='WARNING',
    ).train()
    return model.samples


# ---------------------------------------------------------------- COCO


class CocoSource:
    """Generated scenes, and the annotation file of them."""

    def __init__(self, folder: Path) -> None:
        make_coco(folder / 'data', train=3, val=1, size=IMAGE_SIZE)
        self.folder = folder / 'data'
        self.file = self.folder / COCO_FILE
        self.content = json.loads(self.file.read_text())
        dataset = Config.fromfile(CONFIGS / 'coco_instance.py').train_dataloader.dataset
        self.dataset = dict(dataset, data_root='', filter_cfg=None)
        self.dataset['data_prefix'] = dict(img=str(self.folder / 'train2017'))
        kept = ('LoadImageFromFile', 'LoadAnnotations', 'PackDetInputs')
        self.dataset['pipeline'] = [step for step in dataset.pipeline if step.type in kept]

    def read(self, file: Path) -> dict[str, Any]:
        """Give boxes, labels and areas of masks by the name of the image."""
        samples = collect(dict(self.dataset, ann_file=str(file)), 80, file.parent)
        found = {}
        for sample in samples:
            objects = []
            for instances, ignored in ((sample.gt_instances, 0), (sample.ignored_instances, 1)):
                objects += [
                    [*box, label, ignored, int(mask.sum())]
                    for box, label, mask in zip(
                        instances.bboxes.tensor.tolist(),
                        instances.labels.tolist(),
                        instances.masks.masks,
                        strict=True,
                    )
                ]
            found[Path(sample.img_path).name] = objects
        return found

    def judge(self, made: Made, read: Callable[[Path], Any], found: dict[str, Any]) -> str | None:
        """Compare with a reading of the file that shares no code with mmdet or mmcare."""
        from mmdet.datasets import CocoDataset

        content = json.loads(made.file.read_bytes())
        names = {category['id']: category['name'] for category in content['categories']}
        classes = CocoDataset.METAINFO['classes']
        masks = {
            json.dumps(annotation['segmentation']) for annotation in self.content['annotations']
        }
        expected: dict[str, list] = {image['file_name']: [] for image in content['images']}
        files = {image['id']: image for image in content['images']}
        for annotation in content['annotations']:
            image = files.get(annotation['image_id'])
            if image is None:
                continue
            x, y, width, height = annotation['bbox']
            if min(width, height) < 1 or annotation['area'] <= 0:
                continue
            label = classes.index(names[annotation['category_id']])
            ignored = int(bool(annotation.get('iscrowd')))
            box = torch.tensor([x, y, x + width, y + height]).tolist()
            # A mask that was not touched must be as large as the generator says.
            known = json.dumps(annotation['segmentation']) in masks
            area = annotation['area'] if known else None
            expected[image['file_name']].append([*box, label, ignored, area])
        if {Path(name).name for name in expected} != set(found):
            return f'other images: {sorted(found)}'
        for name, objects in expected.items():
            given = sorted(found[Path(name).name])
            if len(given) != len(objects):
                return f'{name} has {len(given)} objects, not {len(objects)}'
            for one, other in zip(given, sorted(objects, key=lambda one: one[:6]), strict=True):
                if one[:6] != other[:6]:
                    return f'{name} has {one}, not {other}'
        return None


def damage_coco_bytes(name: str, source: CocoSource) -> Callable[[Path, random.Random], Made]:
    """A family: one kind of damage to the bytes of the file."""

    def make(folder: Path, rng: random.Random) -> Made:
        content, what = BYTE_DAMAGE[name](source.file.read_bytes(), rng)
        file = folder / 'instances.json'
        file.write_bytes(content)
        return Made(file, what)

    return make


ODD_JSON: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2.5, 10**6, 10**30, 1e300, NAN, math.inf, -math.inf),
    *('', 'text', '1', [], [1], [[]], {}, {'a': 1}, [None], ['x'], [NAN] * 6, [1e9] * 6),
    *([[0, 0, 5, 5]], [[1, 2, 3, 4, 5, 6, 7]], [1, 2, 3], [-5, -5, 1, 1], [500, 500, 9, 9]),
    *([0, 0, 0, 0], [1, 1, -5, 5], [1, 1, 1e30, 1], ['1', '1', '5', '5'], [1, 1, None, 4]),
    *({'size': [IMAGE_SIZE] * 2, 'counts': [9]}, {'size': [1, 1], 'counts': [1]}),
    *({'size': [IMAGE_SIZE] * 2, 'counts': text} for text in ('', 'zzz', '0' * 50, '\x00', 'é')),
    {'size': [IMAGE_SIZE] * 2, 'counts': [0, IMAGE_SIZE**2]},
    {'size': [IMAGE_SIZE] * 2, 'counts': [IMAGE_SIZE**2 + 5, -5]},
    {'size': [10**9] * 2, 'counts': [10**18]},
)


def make_coco_tree(source: CocoSource) -> Callable[[Path, random.Random], Made]:
    """A family: a part of the tree is another, gone, or there twice."""

    def make(folder: Path, rng: random.Random) -> Made:
        content = json.loads(json.dumps(source.content))
        where = rng.choice(['top', 'entry', 'field', 'field', 'field', 'field', 'inner', 'order'])
        table = rng.choice(['images', 'annotations', 'annotations', 'categories'])
        entries = content[table]
        index = rng.randrange(len(entries))
        parent: Any = content
        key: Any = table
        if where == 'entry':
            parent, key = entries, index
        elif where in ('field', 'inner'):
            parent = entries[index]
            used = [key for key in parent if key not in ('license', 'supercategory')]
            key = rng.choice(used)
        if where == 'inner':
            while isinstance(parent[key], list | dict) and parent[key]:
                parent = parent[key]
                key = rng.choice(range(len(parent)) if isinstance(parent, list) else list(parent))
        if where == 'order':
            how = 'shuffled'
            rng.shuffle(entries)
        else:
            how = rng.choice(['odd', 'odd', 'odd', 'odd', 'gone', 'twice', 'of another'])
        value: Any = ''
        if how == 'odd':
            value = parent[key] = rng.choice(ODD_JSON)
        elif how == 'gone':
            del parent[key]
        elif how == 'twice' and isinstance(parent, list):
            parent.insert(key, parent[key])
        elif how == 'of another' and where == 'field':
            value = parent[key] = rng.choice(entries).get(key)
        file = folder / 'instances.json'
        file.write_text(json.dumps(content))
        return Made(file, f'{table}, {where} {key!r} {how} {value!r}'[:200])

    return make


def coco_kind(folder: Path) -> Kind:
    """The kind, with scenes drawn into a folder."""
    source = CocoSource(folder)
    families = {name: damage_coco_bytes(name, source) for name in BYTE_DAMAGE}
    families['tree'] = make_coco_tree(source)
    return Kind('COCO', families, {'training': source.read}, source.judge)


# ---------------------------------------------------------------- ADE20K


class Ade20kSource:
    """A generated scene and its label map."""

    def __init__(self, folder: Path) -> None:
        make_ade20k(folder / 'data', train=1, val=1, size=IMAGE_SIZE)
        self.image = next((folder / 'data' / 'images' / 'training').iterdir())
        self.file = next((folder / 'data' / 'annotations' / 'training').iterdir())
        self.labels = np.array(Image.open(self.file))
        dataset = Config.fromfile(CONFIGS / 'ade20k.py').train_dataloader.dataset
        self.dataset = dict(dataset, data_root='')
        kept = ('LoadImageFromFile', 'LoadAnnotations', 'mmcare.CheckLabels', 'PackSegInputs')
        self.dataset['pipeline'] = [step for step in dataset.pipeline if step.type in kept]

    def read(self, file: Path) -> list[np.ndarray]:
        """Give the label maps that training sees."""
        prefix = dict(img_path=str(self.image.parent), seg_map_path=str(file.parent))
        samples = collect(dict(self.dataset, data_prefix=prefix), 150, file.parent)
        return [sample.gt_sem_seg.data.numpy()[0] for sample in samples]

    def judge(self, made: Made, read: Callable[[Path], Any], found: list) -> str | None:
        """Compare with the labels of the reference; labels in the file begin at 1."""
        if made.reference is None:
            return 'accepted'
        labels = np.array(Image.open(made.reference)).astype(int)
        expected = np.where(labels == 0, 255, labels - 1)
        expected[expected == 254] = 255  # 255 is ignored, too
        return None if np.array_equal(found, [expected]) else 'other labels'

    def place(self, folder: Path) -> Path:
        """Where the label map of the image must be, alone in its folder."""
        (folder / 'maps').mkdir()
        return folder / 'maps' / self.file.name


def damage_png_bytes(name: str, source: Ade20kSource) -> Callable[[Path, random.Random], Made]:
    """A family: one kind of damage to the bytes of the file."""

    def make(folder: Path, rng: random.Random) -> Made:
        content, what = BYTE_DAMAGE[name](source.file.read_bytes(), rng)
        file = source.place(folder)
        file.write_bytes(content)
        return Made(file, what, source.file)

    return make


def _png(*chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG with right checksums, whatever its chunks hold."""
    parts = [b'\x89PNG\r\n\x1a\n']
    for name, data in (*chunks, (b'IEND', b'')):
        parts += [struct.pack('>I', len(data)), name, data]
        parts.append(struct.pack('>I', zlib.crc32(name + data)))
    return b''.join(parts)


def make_png_content(source: Ade20kSource) -> Callable[[Path, random.Random], Made]:
    """A family: whole files that hold something else than labels of the image's size."""

    def make(folder: Path, rng: random.Random) -> Made:
        file = source.place(folder)
        labels = source.labels
        reference: Path | None = None
        how = rng.choice(
            ['mode', 'size', 'labels', 'bits', 'header', 'data', '16 bits', 'format', 'few', 'more']
        )
        what: Any = ''
        image = Image.fromarray(labels)
        if how == 'mode':
            what = rng.choice(['RGB', 'RGBA', 'LA', 'P'])
            converted = image.convert(what)
            if what == 'P':  # other places in the palette, the same numbers
                converted = Image.fromarray(labels, 'P')
                converted.putpalette([rng.randrange(256) for _ in range(768)])
            converted.save(file)
            reference = source.file if what == 'P' else None
        elif how == 'size':
            what = rng.choice([(96, 95), (95, 96), (48, 48), (192, 192), (1, 1), (96, 1)])
            image.resize(what, Image.Resampling.NEAREST).save(file)
        elif how == 'labels':
            what = rng.randint(151, 254)
            spoiled = labels.copy()
            spoiled[rng.randrange(IMAGE_SIZE), rng.randrange(IMAGE_SIZE)] = what
            Image.fromarray(spoiled).save(file)
        elif how == 'few':
            what = rng.randint(0, 150)
            Image.fromarray(np.full_like(labels, what)).save(file)
            reference = file
        elif how in ('bits', 'header', 'data', 'more'):
            header = [IMAGE_SIZE, IMAGE_SIZE, 8, 0, 0, 0, 0]
            data = b''.join(b'\x00' + row.tobytes() for row in labels)
            if how == 'bits':
                header[2] = what = rng.choice([1, 2, 4])
                data = (b'\x00' + rng.randbytes(IMAGE_SIZE * what // 8)) * IMAGE_SIZE
            elif how == 'header':
                field = rng.randrange(7)
                sizes, others = (0, 1 << 15, 1 << 30), (0, 1, 3, 7, 255)
                what = field, rng.choice(sizes if field < 2 else others)
                reference = source.file  # what readers do not look at changes no label
                header[field] = what[1]
            elif how == 'data':
                what = rng.randrange(len(data))
                data = data[:what]
            packed = zlib.compress(data)
            more = [(b'gAMA', b'\x00\x00\x00\x01'), (b'tRNS', b'\x00\x05')] * (how == 'more')
            if how == 'more':
                reference = source.file  # transparency and gamma are no labels
            file.write_bytes(
                _png((b'IHDR', struct.pack('>IIBBBBB', *header)), *more, (b'IDAT', packed))
            )
        elif how == '16 bits':
            what = rng.choice([0, 256, 300, 65535])
            Image.fromarray(labels.astype(np.uint16) + what).save(file)
            reference = source.file if what == 0 else None
        else:
            what = rng.choice(['JPEG', 'BMP', 'GIF', 'TIFF', 'WEBP'])
            stream = io.BytesIO()
            image.save(stream, what)
            file.write_bytes(stream.getvalue())
        return Made(file, f'{how} {what!r}', reference)

    return make


def ade20k_kind(folder: Path) -> Kind:
    """The kind, with a scene drawn into a folder."""
    source = Ade20kSource(folder)
    families = {name: damage_png_bytes(name, source) for name in BYTE_DAMAGE}
    families['content'] = make_png_content(source)
    return Kind('ADE20K', families, {'training': source.read}, source.judge)
