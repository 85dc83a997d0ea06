"""Sample data in the layout of ImageNet-1K, for classification."""

from pathlib import Path

import cv2
import numpy as np

from .masks import fill_outline
from .output import check_at_least, count_with_progress, new_directory, write_image
from .painting import paint
from .preview import SCENES, enlarge, write_contact_sheet, write_text
from .shapes import draw_outline
from .textures import PATTERNS, colour_pattern, draw_colours

# Folder: (label among the 1000 of ImageNet-1K, name, shape).
CLASSES = {
    'n01608432': (21, 'kite', 'kite'),
    'n02317335': (327, 'starfish', 'star'),
    'n02690373': (404, 'airliner', 'cross'),
    'n02799071': (429, 'baseball', 'disc'),
}

MIN_IMAGE_SIZE = 64
OBJECT_SIZES = (0.35, 0.7)  # in shares of the image's shorter side
TEXTURE_CONTRAST = (15, 50)
IRREGULAR_EVERY = 4


def _draw_image(rng: np.random.Generator, height: int, width: int, shape: str) -> np.ndarray:
    """Draw a uint8 picture (H, W, 3) of one object, wholly inside, on a textured ground."""
    ground = PATTERNS[rng.choice(list(PATTERNS))](rng, height, width)
    picture = colour_pattern(ground, draw_colours(rng, TEXTURE_CONTRAST))
    object_size = rng.uniform(*OBJECT_SIZES) * min(height, width)
    margin = object_size / 2
    centre = rng.uniform((margin, margin), (width - margin, height - margin))
    outline = draw_outline(rng, shape, object_size, centre)
    paint(rng, picture, fill_outline(outline, height, width), TEXTURE_CONTRAST)
    return picture.round().astype(np.uint8)


def _draw_preview(picture: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    plain = enlarge(picture)
    annotated = cv2.convertScaleAbs(plain, alpha=0.5)
    write_text(annotated, name, (6, 16))
    return plain, annotated


def make_imagenet(
    directory: str | Path, seed: int = 0, train: int = 240, val: int = 60, size: int = 96
) -> dict[str, dict[str, int]]:
    """Make a small data set in the layout of ImageNet-1K, with four of its classes.

    Each image shows one object on a textured ground: a kite, a starfish (a star), an airliner (a
    cross) or a baseball (a disc). Only the shape tells the class; colours and textures of objects
    and grounds come from one distribution. Classes take turns. Every fourth image of a class in
    the validation split is not square. An image depends on the seed, its split and its number
    only, so a larger data set begins with the images of a smaller one.

    Args:
        directory (str or Path): The directory to make: ``{train,val}/<WordNet id>/*.JPEG``,
            ``meta/{train,val}.txt`` with each image's label among the 1000, and ``preview.png``.
        seed (int): Seed, at least 0. Equal seeds give equal files.
        train (int): Number of training images, at least 1; below 4 some classes have none.
        val (int): Number of validation images, at least 1; below 4 some classes have none.
        size (int): Height and width of the square images, at least 64.

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
        (root / 'meta').mkdir()
        for stream, (split, count) in enumerate({'train': train, 'val': val}.items()):
            lines = []
            for folder in CLASSES:
                (root / split / folder).mkdir(parents=True)
            for index in count_with_progress(count, split):
                rng = np.random.default_rng([seed, stream, index])
                folder = list(CLASSES)[index % len(CLASSES)]
                label, name, shape = CLASSES[folder]
                height = width = size
                if split == 'val' and index // len(CLASSES) % IRREGULAR_EVERY == 3:
                    height, width = (
                        size - rng.choice(np.arange(1, size // 3), 2, replace=False)
                    ).tolist()
                picture = _draw_image(rng, height, width, shape)
                prefix = folder if split == 'train' else 'ILSVRC2012_val'
                file_name = f'{folder}/{prefix}_{index + 1:08d}.JPEG'
                write_image(root / split / file_name, picture)
                lines.append(f'{file_name} {label}\n')
                if len(previews) < SCENES and height == width == size:
                    previews.append(_draw_preview(picture, name))
            (root / 'meta' / f'{split}.txt').write_text(''.join(lines))
            summary[split] = {'images': count}
        write_contact_sheet(root / 'preview.png', previews)
    return summary
