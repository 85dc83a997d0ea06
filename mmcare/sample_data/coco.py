"""Sample data in the layout of COCO 2017, for detection and instance segmentation."""

import json
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np

from .coco_categories import COCO_CATEGORIES
from .masks import (
    SUBPIXELS,
    encode_runs,
    fill_outline,
    find_box,
    find_polygons,
    measure_area,
    measure_coverage,
)
from .output import check_at_least, count_with_progress, new_directory, write_image
from .painting import paint
from .preview import SCALE, SCENES, enlarge, write_contact_sheet, write_text
from .shapes import draw_outline
from .textures import PATTERNS, colour_pattern, draw_colours

CATEGORY_SHAPES = {'airplane': 'cross', 'sports ball': 'disc', 'kite': 'kite'}

OBJECTS = (2, 6)
OBJECT_SIZES = (12, 80)
MIN_IMAGE_SIZE = 64
# A scene in which less of an object can be seen is arranged anew.
MIN_VISIBLE_SHARE = 0.75
MIN_PART_AREA = 6
# Detectors learn members of a crowd as ground, so that crowds have to be rare.
CROWD_EVERY = 25
CROWD_MEMBERS = (10, 18)
CROWD_MEMBER_SIZES = (10, 16)
TEXTURE_CONTRAST = (15, 35)
TILT = np.pi / 8  # things in photographs have an upright side, too

_IDS = {str(category['name']): category['id'] for category in COCO_CATEGORIES}
_NAMES = {number: name for name, number in _IDS.items()}


@dataclass
class Layer:
    """What becomes one annotation: an object, or a crowd of them.

    Attributes:
        category (str): COCO's name.
        outlines (list[np.ndarray]): The object's outline (N, 2), or those of a crowd's members.
        full_area (float): Area in pixels without occlusion, also of what lies out of the image.
        visible (np.ndarray): What later layers leave visible, on the fine grid of ``masks``.
        is_crowd (bool): Whether it is a crowd.
    """

    category: str
    outlines: list[np.ndarray]
    full_area: float
    visible: np.ndarray
    is_crowd: bool

    def is_recognisable(self) -> bool:
        """Whether enough can be seen to tell the category, and annotations can express it."""
        if measure_area(self.visible) < MIN_VISIBLE_SHARE * self.full_area:
            return False
        if self.is_crowd:
            return True
        polygons = find_polygons(self.visible)
        return polygons is not None and all(
            cv2.contourArea(_as_points(polygon)) >= MIN_PART_AREA for polygon in polygons
        )

    def annotate(self) -> dict:
        """Give the annotation as in COCO's files, without its own id and its image's."""
        if self.is_crowd:
            pixels = measure_coverage(self.visible) >= 0.5
            x, y, width, height = cv2.boundingRect(pixels.astype(np.uint8))
            shape = {
                'segmentation': encode_runs(pixels),
                'area': int(pixels.sum()),
                'bbox': [x, y, width, height],
            }
        else:
            shape = {
                'segmentation': find_polygons(self.visible),
                'area': measure_area(self.visible),
                'bbox': find_box(self.visible),
            }
        return {**shape, 'iscrowd': int(self.is_crowd), 'category_id': _IDS[self.category]}


def _as_points(polygon: list[float]) -> np.ndarray:
    return np.array(polygon, np.float32).reshape(-1, 2)


def _draw_crowd(rng: np.random.Generator, size: int) -> Layer:
    category = rng.choice(list(CATEGORY_SHAPES))
    centre = rng.uniform(0.25 * size, 0.75 * size, size=2)
    outlines = []
    for _ in range(rng.integers(*CROWD_MEMBERS, endpoint=True)):
        offset = rng.uniform(-1, 1, size=2) * min(26, 0.2 * size)
        outlines.append(
            draw_outline(
                rng,
                CATEGORY_SHAPES[category],
                rng.uniform(*CROWD_MEMBER_SIZES),
                centre + offset,
                TILT,
            )
        )
    region = np.zeros((size * SUBPIXELS, size * SUBPIXELS), np.uint8)
    for outline in outlines:
        region |= fill_outline(outline, size, size)
    # COCO outlines a crowd as a whole, with the small gaps between its members.
    closed = cv2.morphologyEx(
        region, cv2.MORPH_CLOSE, np.ones((6 * SUBPIXELS, 6 * SUBPIXELS), np.uint8)
    )
    return Layer(category, outlines, measure_area(closed), closed, is_crowd=True)


def _draw_object(rng: np.random.Generator, size: int, below: list[Layer]) -> Layer:
    category = rng.choice(list(CATEGORY_SHAPES))
    # Larger ones are more frequent, as many shapes cover little of their box.
    largest = min(OBJECT_SIZES[1], size / 2)
    object_size = rng.triangular(OBJECT_SIZES[0], largest, largest)
    centre = rng.uniform(0.05 * size, 0.95 * size, size=2)
    if below and rng.uniform() < 0.6:
        # Beside an earlier object and partly over it.
        neighbour = below[rng.integers(len(below))].outlines[0]
        low, high = neighbour.min(axis=0), neighbour.max(axis=0)
        reach = rng.uniform(0.3, 0.5) * (object_size + (high - low).max())
        angle = rng.uniform(0, 2 * np.pi)
        centre = (low + high) / 2 + reach * np.array([np.cos(angle), np.sin(angle)])
    outline = draw_outline(rng, CATEGORY_SHAPES[category], object_size, centre, TILT)
    full_area = cv2.contourArea(outline.astype(np.float32))
    return Layer(category, [outline], full_area, fill_outline(outline, size, size), is_crowd=False)


def arrange(rng: np.random.Generator, size: int, crowd: bool) -> list[Layer]:
    """Choose and place what a scene shows.

    Args:
        rng (np.random.Generator): Source of all choices.
        size (int): Height and width of the image, in pixels.
        crowd (bool): Whether there is a crowd, behind everything else.

    Returns:
        list[Layer]: Crowd and objects, from back to front.
    """
    layers = [_draw_crowd(rng, size)] if crowd else []
    wanted = len(layers) + rng.integers(*OBJECTS, endpoint=True)
    rejected = 0
    while len(layers) < wanted:
        layer = _draw_object(rng, size, layers)
        before = [other.visible for other in layers]
        for other in layers:
            other.visible = other.visible & ~layer.visible
        if all(other.is_recognisable() for other in [*layers, layer]):
            layers.append(layer)
            continue
        for other, visible in zip(layers, before, strict=True):
            other.visible = visible
        rejected += 1
        if rejected > 100:
            # Too crowded for one more object: begin again.
            return arrange(rng, size, crowd)
    return layers


def _draw_scene(rng: np.random.Generator, size: int, crowd: bool) -> tuple[np.ndarray, list[dict]]:
    """Draw a uint8 picture (size, size, 3) and its annotations without ids."""
    layers = arrange(rng, size, crowd)
    ground = PATTERNS[rng.choice(list(PATTERNS))](rng, size, size)
    picture = colour_pattern(ground, draw_colours(rng, TEXTURE_CONTRAST))
    for layer in layers:
        for outline in layer.outlines:
            paint(rng, picture, fill_outline(outline, size, size), TEXTURE_CONTRAST)
    return picture.round().astype(np.uint8), [layer.annotate() for layer in layers]


def _draw_preview(picture: np.ndarray, annotations: list[dict]) -> tuple[np.ndarray, np.ndarray]:
    plain = enlarge(picture)
    annotated = plain.copy()
    colours = dict(
        zip(CATEGORY_SHAPES, ((60, 60, 255), (60, 255, 60), (255, 120, 60)), strict=True)
    )
    for annotation in annotations:
        name = _NAMES[annotation['category_id']]
        if annotation['iscrowd']:
            runs = annotation['segmentation']
            values = np.arange(len(runs['counts'])) % 2
            pixels = np.repeat(values, runs['counts']).reshape(runs['size'], order='F')
            region = enlarge(pixels.astype(np.uint8)) > 0
            annotated[region] = annotated[region] // 2 + 127
        else:
            # Drawing counts from pixel centres, annotations from the image's corner.
            polygons = [
                np.round((_as_points(polygon) * SCALE - 0.5) * 16).astype(np.int32)
                for polygon in annotation['segmentation']
            ]
            cv2.polylines(annotated, polygons, True, colours[name], 1, cv2.LINE_AA, shift=4)
        x, y, width, height = (round(value * SCALE) for value in annotation['bbox'])
        cv2.rectangle(annotated, (x, y), (x + width - 1, y + height - 1), colours[name], 1)
        write_text(annotated, name + ' (crowd)' * annotation['iscrowd'], (x, max(y - 3, 10)))
    return plain, annotated


def make_coco(
    directory: str | Path, seed: int = 0, train: int = 300, val: int = 60, size: int = 192
) -> dict[str, dict[str, int]]:
    """Make a small data set in the layout of COCO 2017.

    Each scene shows 2 to 6 overlapping objects of 12 to 80 pixels (and of at most half the image)
    on a textured ground: airplanes (crosses), sports balls (discs) and kites. Only the shape tells
    the category; colours and textures of objects and grounds come from one distribution. Objects
    are tilted by 22.5 degrees at most, and three quarters of each can be seen. Polygons, boxes and
    areas describe the visible part. One scene in 25 also has a crowd region. A scene depends on
    the seed, its split and its number only, so a larger data set begins with the scenes of a
    smaller one.

    Args:
        directory (str or Path): The directory to make: ``train2017/``, ``val2017/``,
            ``annotations/instances_{train,val}2017.json`` and ``preview.png``.
        seed (int): Seed, at least 0. Equal seeds give equal files.
        train (int): Number of training images, at least 1.
        val (int): Number of validation images, at least 1.
        size (int): Height and width of the images, at least 64.

    Returns:
        dict[str, dict[str, int]]: Numbers of images, objects and crowds in each split.

    Raises:
        TypeError: If a number is not an integer.
        ValueError: If a number is too small.
        FileExistsError: If ``directory`` is a file or not empty.
    """
    check_at_least('seed', seed, 0)
    check_at_least('train', train, 1)
    check_at_least('val', val, 1)
    check_at_least('size', size, MIN_IMAGE_SIZE)
    summary = {}
    previews: list[tuple[np.ndarray, np.ndarray]] = []
    image_id = annotation_id = 0
    with new_directory(directory) as root:
        (root / 'annotations').mkdir()
        for stream, (split, count) in enumerate({'train2017': train, 'val2017': val}.items()):
            (root / split).mkdir()
            images, annotations = [], []
            for index in count_with_progress(count, split):
                picture, scene = _draw_scene(
                    np.random.default_rng([seed, stream, index]),
                    size,
                    crowd=index % CROWD_EVERY == 1,
                )
                image_id += 1
                file_name = f'{image_id:012d}.jpg'
                write_image(root / split / file_name, picture)
                images.append(
                    {'id': image_id, 'file_name': file_name, 'height': size, 'width': size}
                )
                for annotation in scene:
                    annotation_id += 1
                    annotations.append({'id': annotation_id, 'image_id': image_id, **annotation})
                if len(previews) < SCENES:
                    previews.append(_draw_preview(picture, scene))
            content = {
                'info': {'description': f'mmcare sample data in COCO format, seed {seed}'},
                'licenses': [],
                'images': images,
                'annotations': annotations,
                'categories': COCO_CATEGORIES,
            }
            (root / 'annotations' / f'instances_{split}.json').write_text(json.dumps(content))
            crowds = sum(annotation['iscrowd'] for annotation in annotations)
            summary[split] = {
                'images': count,
                'objects': len(annotations) - crowds,
                'crowds': crowds,
            }
        write_contact_sheet(root / 'preview.png', previews)
    return summary
