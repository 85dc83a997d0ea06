"""Seeded synthetic data sets in the folder layouts of COCO 2017, ADE20K and ImageNet.

Every shipped config trains, tests and resumes on them, without a download. An image depends only on
the seed, its split and its number, so a larger data set begins with the images of a smaller one.

Lengths are in pixels, angles in radians, colours from 0 to 255. Points are (x, y), from the top
left corner of the image. Pictures are float32 (H, W, 3).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cv2
import mmcv
import numpy as np
from mmengine.fileio import dump, put_text

from mmcare.files import moved_into_place

__all__ = ['make_ade20k', 'make_coco', 'make_imagenet']

PATTERNS = ('stripes', 'checks', 'dots', 'grain', 'clouds')
VISIBLE = 0.75  # least share of each object that stays visible
RIM_CONTRAST = 90  # least distance of an object's colour from the ground around its rim
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


def draw_pattern(
    rng: np.random.Generator, name: str, height: int, width: int, angles: Sequence = (0, np.pi)
) -> np.ndarray:
    """Draw one of ``PATTERNS`` as a float32 array (height, width) of values from 0 to 1.

    Its direction is in the range ``angles``; grain (fine noise) and clouds (soft changes over tens
    of pixels) have none.
    """
    if name == 'grain':
        noise = rng.standard_normal((height, width), dtype=np.float32)
        smooth = cv2.GaussianBlur(noise, (0, 0), rng.uniform(0.5, 0.9))
        return np.clip(0.5 + 0.25 * smooth / smooth.std(), 0, 1)
    if name == 'clouds':
        cell = rng.uniform(24, 40)
        coarse = rng.random((int(height / cell) + 4, int(width / cell) + 4), dtype=np.float32)
        full = cv2.resize(coarse, None, fx=cell, fy=cell, interpolation=cv2.INTER_CUBIC)
        # Without the outermost cells, which are flat: the border is repeated there.
        top, left = (int(cell * rng.uniform(0.5, 1.5)) for _ in range(2))
        return np.clip(full[top : top + height, left : left + width], 0, 1)
    angle, period = rng.uniform(*angles), rng.uniform(7, 14)
    y, x = np.mgrid[:height, :width].astype(np.float32)
    u = (x * np.cos(angle) + y * np.sin(angle)) / period + rng.random()
    v = (y * np.cos(angle) - x * np.sin(angle)) / period + rng.random()
    if name == 'stripes':
        wave = 0.5 + 1.5 * np.sin(2 * np.pi * u)
    elif name == 'checks':
        wave = 0.5 + 3 * np.sin(2 * np.pi * u) * np.sin(2 * np.pi * v)
    else:
        wave = (0.36 - np.hypot(u % 1 - 0.5, v % 1 - 0.5)) * 8
    return np.clip(wave, 0, 1).astype(np.float32)


def draw_colours(
    rng: np.random.Generator, contrast: tuple[float, float], chroma: float | None = None
) -> np.ndarray:
    """Draw two colours, float32 (2, 3); ``contrast`` is the range of their distance.

    ``chroma`` scales how far they are from grey: 0 gives greys. None: any colours.
    """
    middle, direction = rng.uniform(30, 225, size=3), rng.standard_normal(3)
    if chroma is not None:
        middle = rng.uniform(115, 140) + chroma * (middle - 127.5)
        direction = rng.choice([-1, 1]) + chroma * direction
    step = rng.uniform(*contrast) * direction / np.linalg.norm(direction)
    return np.clip([middle - step / 2, middle + step / 2], 0, 255).astype(np.float32)


def colour(pattern: np.ndarray, colours: np.ndarray) -> np.ndarray:
    """Mix two colours (2, 3) by a pattern (H, W) from 0 to 1."""
    return colours[0] + pattern[..., None] * (colours[1] - colours[0])


def draw_ground(rng: np.random.Generator, size: int, contrast: tuple[float, float]) -> np.ndarray:
    """Draw a square picture of any pattern in any two colours."""
    pattern = draw_pattern(rng, rng.choice(PATTERNS), size, size)
    return colour(pattern, draw_colours(rng, contrast))


def draw_outline(
    rng: np.random.Generator, shape: str, size: float, centre: np.ndarray, tilt: float
) -> np.ndarray:
    """Draw the outline of a shape with random proportions and rotation: corners (N, 2).

    Args:
        shape: ``'disc'``, ``'kite'``, ``'cross'`` (a Latin one), ``'star'`` (with five points) or
            ``'blob'`` (a smooth curve).
        size: Longer side of the upright box around the rotated shape.
        centre: Centre (x, y) of that box.
        tilt: Largest rotation to either side.
    """
    angles = np.linspace(0, 2 * np.pi, 10 if shape == 'star' else 72, endpoint=False)
    radii = np.ones(len(angles))
    if shape == 'star':
        radii[1::2] = rng.uniform(0.38, 0.46)
    elif shape == 'blob':
        for frequency in (2, 3, 4):
            phase = rng.uniform(0, 2 * np.pi)
            radii += rng.uniform(0.1, 0.25) * np.cos(frequency * angles + phase)
    points = radii[:, None] * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    if shape == 'kite':
        half, shoulder = rng.uniform(0.28, 0.36), rng.uniform(0.3, 0.42)
        points = np.array([[0, 0], [half, shoulder], [0, 1], [-half, shoulder]])
    elif shape == 'cross':
        arm, bar = rng.uniform(0.12, 0.15), rng.uniform(0.36, 0.46)
        top, bottom = bar - arm, bar + arm
        right = [[arm, 0], [arm, top], [0.5, top], [0.5, bottom], [arm, bottom], [arm, 1]]
        points = np.array(right + [[-x, y] for x, y in reversed(right)])
    angle = rng.uniform(-tilt, tilt)
    cosine, sine = np.cos(angle), np.sin(angle)
    points = points @ np.array([[cosine, sine], [-sine, cosine]])
    low, high = points.min(axis=0), points.max(axis=0)
    return (points - (low + high) / 2) * (size / (high - low).max()) + centre


def paint_objects(
    rng: np.random.Generator,
    picture: np.ndarray,
    shapes: Sequence[str],
    sizes: tuple[float, float],
    tilt: float,
    contrast: tuple[float, float],
) -> list[np.ndarray]:
    """Paint shapes over a picture, in place, from back to front, with soft edges.

    Three quarters of each object stay visible, also at the border of the picture, and its colours
    differ from the ground around its rim. ``sizes`` and ``contrast`` are ranges, of the objects'
    sizes and of the distance of an object's two colours; for shapes and tilt see
    :func:`draw_outline`.

    Returns:
        The visible part of each object, a boolean mask (H, W).
    """
    height, width = picture.shape[:2]
    areas: list[float] = []
    masks: list[np.ndarray] = []
    while len(masks) < len(shapes):
        # Larger objects are more frequent, since many shapes cover little of their box.
        size = rng.triangular(sizes[0], sizes[1], sizes[1])
        centre = rng.uniform(0.05, 0.95, size=2) * (width, height)
        outline = draw_outline(rng, shapes[len(masks)], size, centre, tilt)
        cover = np.zeros((height, width), np.uint8)
        # Fixed-point numbers, counted from the centre of the first pixel.
        corners = np.round((outline - 0.5) * 16).astype(np.int32)
        cv2.fillPoly(cover, [corners], 255, cv2.LINE_AA, shift=4)
        mask = cover > 127
        visible = [*(other & ~mask for other in masks), mask]
        wanted = [*areas, cv2.contourArea(outline.astype(np.float32))]
        if any(part.sum() < VISIBLE * area for part, area in zip(visible, wanted)):
            continue
        areas, masks = wanted, visible
        rim = picture[cv2.dilate(mask.astype(np.uint8), np.ones((5, 5), np.uint8)) > mask]
        colours = draw_colours(rng, contrast)
        while np.quantile(np.linalg.norm(rim - colours.mean(axis=0), axis=1), 0.1) < RIM_CONTRAST:
            colours = draw_colours(rng, contrast)
        pattern = draw_pattern(rng, rng.choice(PATTERNS), height, width)
        picture += cover[..., None] / np.float32(255) * (colour(pattern, colours) - picture)
    return masks


@contextmanager
def _new_directory(directory: str | Path, size: int) -> Iterator[Path]:
    """Yield an empty directory that becomes ``directory`` if the block succeeds."""
    directory = Path(directory).absolute()
    if size < 64:
        raise ValueError(f'size must be at least 64, got {size!r}')
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
                picture = draw_ground(rng, size, contrast)
                visible = paint_objects(rng, picture, shapes, sizes, SMALL_TILT, contrast)
                for name, mask in zip(shown, visible):
                    annotation_id += 1
                    numbers = dict(id=annotation_id, image_id=image_id, category_id=names[name])
                    annotations.append({**numbers, **describe_mask(mask)})
                mmcv.imwrite(np.uint8(picture.round()), root / split / str(image['file_name']))
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
                masks = paint_objects(rng, picture, shapes, sizes, 0.4, (0, 30))
                for shape, mask in zip(shapes, masks):
                    labels[mask] = ADE20K_SHAPES.get(shape, 0)
                name = f'{prefix}_{index + 1:08d}'
                mmcv.imwrite(np.uint8(picture.round()), root / 'images' / split / f'{name}.jpg')
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
        pattern = draw_pattern(rng, name, height, width, angles=(-0.2, 0.2))
        colours = draw_colours(rng, (90, 150), chroma=0.15)
        picture[regions == region] = colour(pattern, colours)[regions == region]
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
                picture = draw_ground(rng, size, contrast)
                sizes = (0.35 * size, 0.7 * size)
                paint_objects(rng, picture, [shape], sizes, np.pi, contrast)
                prefix = folder if split == 'train' else 'ILSVRC2012_val'
                file_name = f'{folder}/{prefix}_{index + 1:08d}.JPEG'
                mmcv.imwrite(np.uint8(picture.round()), root / split / file_name)
                lines.append(f'{file_name} {label}\n')
            put_text(''.join(lines), root / 'meta' / f'{split}.txt')
