"""Write small data sets in the layouts of COCO 2017, ADE20K and ImageNet, drawn from a seed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cv2
import mmcv
import numpy as np
from mmengine.fileio import dump, put_text

from mmcare.files import moved_into_place
from mmcare.models.arguments import check
from mmcare.sample_data import painter

SMALL_TILT = np.pi / 8  # things in photographs have an upright side

COCO_SHAPES = {'airplane': 'cross', 'sports ball': 'disc', 'kite': 'kite'}
# The numbers from 1 to 90 that no category of COCO has.
COCO_GAPS = (12, 26, 29, 30, 45, 66, 68, 69, 71, 83)

# ADE20K's annotation files count classes from 1; 0 is "other".
ADE20K_GROUNDS = {'clouds': 3, 'checks': 4, 'grain': 10, 'stripes': 19, 'dots': 29}
ADE20K_SHAPES = {'star': 67, 'cross': 91, 'disc': 120}

# Folder: label among the 1000 of ImageNet-1K, shape.
IMAGENET_CLASSES = {
    'n01608432': (21, 'kite'),
    'n02317335': (327, 'star'),
    'n02690373': (404, 'cross'),
    'n02799071': (429, 'disc'),
}


@contextmanager
def _new_directory(directory: str | Path, size: int) -> Iterator[Path]:
    """Yield an empty directory that becomes ``directory`` if the block succeeds."""
    directory = Path(directory).absolute()
    check('size', size, 'at least 64', size >= 64)
    if directory.is_file() or (directory.is_dir() and any(directory.iterdir())):
        raise FileExistsError(f'{directory} exists: remove it first, or give another directory')
    with moved_into_place(directory) as temporary:
        temporary.mkdir()
        yield temporary


def describe_mask(mask: np.ndarray) -> dict[str, Any]:
    """Describe a boolean mask (H, W) by COCO's run lengths, box (x, y, w, h) and area in pixels."""
    from pycocotools import mask as masks

    runs = masks.encode(np.asfortranarray(mask, np.uint8))
    return dict(
        iscrowd=0,
        area=float(masks.area(runs)),
        bbox=masks.toBbox(runs).tolist(),
        segmentation=dict(size=runs['size'], counts=runs['counts'].decode()),
    )


def make_coco(
    directory: str | Path, seed: int = 0, train: int = 600, val: int = 60, size: int = 160
) -> None:
    """Make a small data set in the layout of COCO 2017, for detection and instance segmentation.

    Each scene shows 2 to 6 objects of 12 to 80 pixels, at most half the image, on a textured
    ground: airplanes (crosses), sports balls (discs) and kites. Categories differ only in shape:
    colours and textures of objects and grounds come from one distribution. Masks, boxes and areas
    are those of the visible part, at least three quarters. The file lists all 80 categories, so
    that configs for COCO work as they are. This needs mmdet.

    Args:
        directory: The directory to make, with ``{train,val}2017/*.jpg`` and
            ``annotations/instances_{train,val}2017.json``.
        seed: At least 0. Equal seeds give equal files.
        train, val: Numbers of images.
        size: Height and width of the images, at least 64.

    Raises:
        ValueError: If ``size`` is too small.
        FileExistsError: If ``directory`` is a file or not empty.
        OSError: If it cannot be written.
    """
    from mmdet.datasets import CocoDataset

    ids = sorted(set(range(1, 91)) - set(COCO_GAPS))
    names = dict(zip(CocoDataset.METAINFO['classes'], ids))
    categories = [dict(id=number, name=name) for name, number in names.items()]
    contrast = (15.0, 35.0)
    image_id = annotation_id = 0
    with _new_directory(directory, size) as root:
        for stream, (split, number) in enumerate({'train2017': train, 'val2017': val}.items()):
            images, annotations = [], []
            for index in range(number):
                rng = np.random.default_rng([seed, stream, index])
                image_id += 1
                image = dict(id=image_id, file_name=f'{image_id:012d}.jpg', height=size, width=size)
                shown = rng.choice(list(COCO_SHAPES), rng.integers(2, 6, endpoint=True))
                shapes = [COCO_SHAPES[name] for name in shown]
                sizes = (12, min(80, size / 2))
                picture = painter.draw_ground(rng, size, contrast)
                visible = painter.paint_objects(rng, picture, shapes, sizes, SMALL_TILT, contrast)
                for name, mask in zip(shown, visible):
                    annotation_id += 1
                    numbers = dict(id=annotation_id, image_id=image_id, category_id=names[name])
                    annotations.append({**numbers, **describe_mask(mask)})
                mmcv.imwrite(picture, root / split / str(image['file_name']))
                images.append(image)
            content = dict(images=images, annotations=annotations, categories=categories)
            dump(content, root / f'annotations/instances_{split}.json')


def make_ade20k(
    directory: str | Path, seed: int = 0, train: int = 1000, val: int = 40, size: int = 160
) -> None:
    """Make a small data set in the layout of ADE20K (ADEChallengeData2016), for segmentation.

    Greyish regions (sky, floor, grass, curtain, rug) differ only in texture, and the objects on
    them (flowers, airplanes, balls) only in shape. Every image has a blob of "other" (0). Every
    fourth validation image is not square and has odd sides.

    It makes ``images/{training,validation}/*.jpg`` and ``annotations/{training,validation}/*.png``.
    Arguments and errors are those of :func:`make_coco`.
    """
    with _new_directory(directory, size) as root:
        splits = (('training', 'ADE_train', train), ('validation', 'ADE_val', val))
        for stream, (split, prefix, number) in enumerate(splits):
            for index in range(number):
                rng = np.random.default_rng([seed, stream, index])
                sides = [size, size]
                if split == 'validation' and index % 4 == 3:
                    halves = np.arange(size // 3, size // 2)
                    sides = (2 * rng.choice(halves, 2, replace=False) + 1).tolist()
                picture, labels = _draw_regions(rng, *sides)
                shapes = rng.choice(list(ADE20K_SHAPES), rng.integers(2, 4, endpoint=True)).tolist()
                sizes = (0.2 * min(sides), 0.4 * min(sides))
                shapes.append('blob')  # in front, so that no scene lacks pixels of "other"
                masks = painter.paint_objects(rng, picture, shapes, sizes, 0.4, (0, 30))
                for shape, mask in zip(shapes, masks):
                    labels[mask] = ADE20K_SHAPES.get(shape, 0)
                name = f'{prefix}_{index + 1:08d}'
                mmcv.imwrite(picture, root / 'images' / split / f'{name}.jpg')
                mmcv.imwrite(labels, root / 'annotations' / split / f'{name}.png')


def _draw_regions(
    rng: np.random.Generator, height: int, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Draw two to four grounds with smooth borders, (H, W, 3), and their labels, (H, W).

    Grounds vary around one middle grey, so that they differ only in texture.
    """
    names = rng.permutation(list(ADE20K_GROUNDS))[: rng.integers(2, 4, endpoint=True)]
    fields = [
        cv2.resize(rng.standard_normal((4, 4)), (width, height), interpolation=cv2.INTER_CUBIC)
        for _ in names
    ]
    regions = np.argmax(fields, axis=0)
    picture = np.empty((height, width, 3), np.float32)
    for region, name in enumerate(names):
        # Curtains hang and floors are level, give or take some degrees.
        pattern = painter.draw_pattern(rng, name, height, width, angles=(-0.2, 0.2))
        colours = painter.draw_colours(rng, (90, 150), chroma=0.15)
        picture[regions == region] = painter.colour(pattern, colours)[regions == region]
    return picture, np.array([ADE20K_GROUNDS[name] for name in names], np.uint8)[regions]


def make_imagenet(
    directory: str | Path, seed: int = 0, train: int = 240, val: int = 60, size: int = 96
) -> None:
    """Make a small data set in the layout of ImageNet-1K, with four of its classes.

    Each image shows one object on a textured ground: a kite, a starfish (a star), an airliner (a
    cross) or a baseball (a disc). Classes differ only in shape, and take turns.

    It makes ``{train,val}/<WordNet id>/*.JPEG``, with each image's label among the 1000 in
    ``meta/{train,val}.txt``. Arguments and errors are those of :func:`make_coco`; fewer than 4
    images leave classes empty.
    """
    contrast = (15.0, 50.0)
    with _new_directory(directory, size) as root:
        for stream, (split, number) in enumerate({'train': train, 'val': val}.items()):
            lines = []
            for index in range(number):
                rng = np.random.default_rng([seed, stream, index])
                folder = list(IMAGENET_CLASSES)[index % len(IMAGENET_CLASSES)]
                label, shape = IMAGENET_CLASSES[folder]
                picture = painter.draw_ground(rng, size, contrast)
                sizes = (0.35 * size, 0.7 * size)
                painter.paint_objects(rng, picture, [shape], sizes, np.pi, contrast)
                prefix = folder if split == 'train' else 'ILSVRC2012_val'
                file_name = f'{folder}/{prefix}_{index + 1:08d}.JPEG'
                mmcv.imwrite(picture, root / split / file_name)
                lines.append(f'{file_name} {label}\n')
            put_text(''.join(lines), root / 'meta' / f'{split}.txt')
