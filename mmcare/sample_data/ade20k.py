"""Sample data in the layout of the ADE20K challenge, for semantic segmentation."""

from pathlib import Path

import cv2
import numpy as np

from .masks import fill_outline, measure_coverage
from .output import check_at_least, count_with_progress, new_directory, write_image
from .painting import paint
from .preview import SCENES, enlarge, write_contact_sheet, write_text
from .shapes import draw_outline
from .textures import DIRECTED, PATTERNS, colour_pattern, draw_colours

# Labels of ADE20K's annotation files: 0 is "other", classes count from 1.
TEXTURE_CLASSES = {
    'clouds': (3, 'sky'),
    'checks': (4, 'floor'),
    'grain': (10, 'grass'),
    'stripes': (19, 'curtain'),
    'dots': (29, 'rug'),
}
SHAPE_CLASSES = {
    'star': (67, 'flower'),
    'cross': (91, 'airplane'),
    'disc': (120, 'ball'),
}
OTHER = 0

MIN_IMAGE_SIZE = 96
REGIONS = (2, 4)
OBJECTS = (2, 4)
# In shares of the image's shorter side.
OBJECT_SIZES = (0.2, 0.4)
OTHER_SIZES = (0.2, 0.35)
MAX_OVERLAP = 0.2
# Grounds are greyish, light and dark around the same middle grey: nothing but texture tells them.
GROUND_CONTRAST = (90, 150)
GROUND_CHROMA = 0.15
GROUND_ANGLES = (-0.2, 0.2)  # curtains hang and floors are level, give or take some degrees
TILT = 0.4  # of objects, radians to either side
OBJECT_CONTRAST = (0, 30)
IRREGULAR_EVERY = 4


def _split_ground(rng: np.random.Generator, height: int, width: int, count: int) -> np.ndarray:
    """Number each pixel (H, W) with one of ``count`` regions that have smooth borders."""
    fields = []
    for _ in range(count):
        coarse = rng.standard_normal((4, 4)).astype(np.float32)
        fields.append(cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC))
    return np.argmax(fields, axis=0)


def _draw_scene(rng: np.random.Generator, height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw a uint8 picture (H, W, 3) and its uint8 labels (H, W)."""
    regions = _split_ground(rng, height, width, int(rng.integers(*REGIONS, endpoint=True)))
    picture = np.empty((height, width, 3), np.float32)
    labels = np.empty((height, width), np.uint8)
    names = rng.permutation(list(TEXTURE_CLASSES))
    for region, name in enumerate(names[: regions.max() + 1]):
        options = {'angles': GROUND_ANGLES} if name in DIRECTED else {}
        pattern = PATTERNS[name](rng, height, width, **options)
        texture = colour_pattern(pattern, draw_colours(rng, GROUND_CONTRAST, GROUND_CHROMA))
        picture[regions == region] = texture[regions == region]
        labels[regions == region] = TEXTURE_CLASSES[name][0]

    short = min(height, width)
    taken = np.zeros((height, width), bool)
    wanted = rng.integers(*OBJECTS, endpoint=True)
    while wanted:
        shape = rng.choice(list(SHAPE_CLASSES))
        centre = rng.uniform(0.1, 0.9, size=2) * (width, height)
        outline = draw_outline(rng, shape, rng.uniform(*OBJECT_SIZES) * short, centre, TILT)
        mask = fill_outline(outline, height, width)
        pixels = measure_coverage(mask) >= 0.5
        if (taken & pixels).sum() > MAX_OVERLAP * pixels.sum():
            continue
        paint(rng, picture, mask, OBJECT_CONTRAST)
        labels[pixels] = SHAPE_CLASSES[shape][0]
        taken |= pixels
        wanted -= 1

    # Last, so that no scene lacks unlabelled pixels.
    centre = rng.uniform(0.1, 0.9, size=2) * (width, height)
    outline = draw_outline(rng, 'blob', rng.uniform(*OTHER_SIZES) * short, centre)
    mask = fill_outline(outline, height, width)
    paint(rng, picture, mask, GROUND_CONTRAST)
    labels[measure_coverage(mask) >= 0.5] = OTHER
    return picture.round().astype(np.uint8), labels


def _draw_preview(picture: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    plain = enlarge(picture)
    grey = cv2.cvtColor(plain, cv2.COLOR_BGR2GRAY)
    annotated = np.repeat(grey[..., None] // 2, 3, axis=2)
    classes = sorted([*TEXTURE_CLASSES.values(), *SHAPE_CLASSES.values()])
    for rank, (label, _) in enumerate(classes):
        hue = np.array([[[rank * 180 // len(classes), 255, 255]]], np.uint8)
        annotated[enlarge(labels) == label] += cv2.cvtColor(hue, cv2.COLOR_HSV2BGR)[0, 0] // 2
    for label, name in [*classes, (OTHER, 'other')]:
        count, _, stats, centres = cv2.connectedComponentsWithStats(
            (enlarge(labels) == label).astype(np.uint8)
        )
        for part in range(1, count):
            if stats[part, cv2.CC_STAT_AREA] > 400:
                x, y = centres[part].astype(int)
                write_text(annotated, name, (x - 4 * len(name), y + 4))
    return plain, annotated


def make_ade20k(
    directory: str | Path, seed: int = 0, train: int = 240, val: int = 40, size: int = 160
) -> dict[str, dict[str, int]]:
    """Make a small data set in the layout of the ADE20K challenge (ADEChallengeData2016).

    Greyish regions of sky, floor, grass, curtain and rug are told by their texture; flowers,
    airplanes and balls on them by their shape; colours do not tell them apart. Every image has
    unlabelled pixels (0). Every fourth validation image is not square, with odd sides. A scene
    depends on the seed, its split and its number only, so a larger data set begins with the scenes
    of a smaller one.

    Args:
        directory (str or Path): The directory to make: ``images/{training,validation}/*.jpg``,
            ``annotations/{training,validation}/*.png`` and ``preview.png``.
        seed (int): Seed, at least 0. Equal seeds give equal files.
        train (int): Number of training images, at least 1.
        val (int): Number of validation images, at least 1.
        size (int): Height and width of the square images, at least 96.

    Returns:
        dict[str, dict[str, int]]: Number of images in each split.

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
    with new_directory(directory) as root:
        for stream, (split, prefix, count) in enumerate(
            (('training', 'ADE_train', train), ('validation', 'ADE_val', val))
        ):
            (root / 'images' / split).mkdir(parents=True)
            (root / 'annotations' / split).mkdir(parents=True)
            for index in count_with_progress(count, split):
                rng = np.random.default_rng([seed, stream, index])
                height = width = size
                if split == 'validation' and index % IRREGULAR_EVERY == IRREGULAR_EVERY - 1:
                    halves = np.arange(size // 3, 2 * size // 3)
                    height, width = (2 * rng.choice(halves, 2, replace=False) + 1).tolist()
                picture, labels = _draw_scene(rng, height, width)
                name = f'{prefix}_{index + 1:08d}'
                write_image(root / 'images' / split / f'{name}.jpg', picture)
                write_image(root / 'annotations' / split / f'{name}.png', labels)
                if len(previews) < SCENES and height == width == size:
                    previews.append(_draw_preview(picture, labels))
            summary[split] = {'images': count}
        write_contact_sheet(root / 'preview.png', previews)
    return summary
