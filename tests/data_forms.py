"""Write a data set in COCO's layout in the forms in which people have theirs."""

import json
from pathlib import Path

import cv2
import numpy as np
from pycocotools.coco import COCO


def write_roboflow(out, split, names, pictures):
    """Pictures next to their annotations, numbers from 3, and a category without objects."""
    folder = out / 'roboflow' / dict(val='valid').get(split, split)
    categories = [dict(id=i, name=name) for i, name in enumerate(['things', *names], 3)]
    images, annotations = [], []
    for name, picture, objects in pictures:
        write(folder / f'{name}.jpg', picture)
        height, width = picture.shape[:2]
        images.append(dict(id=len(images), file_name=f'{name}.jpg', width=width, height=height))
        for kind, _, given in objects:
            numbers = dict(id=len(annotations), image_id=images[-1]['id'], category_id=4 + kind)
            annotations.append(dict(given, **numbers))
    content = dict(images=images, annotations=annotations, categories=categories)
    (folder / '_annotations.coco.json').write_text(json.dumps(content))


def write_masks(out, split, names, pictures):
    """Objects of all kinds, as 255, against the ground."""
    for name, picture, objects in pictures:
        labels = np.zeros(picture.shape[:2], np.uint8)
        for _, mask, _ in objects:
            labels[mask > 0] = 255
        write(out / f'masks_255/images/{name}.jpg', picture)
        write(out / f'masks_255/masks/{name}.png', labels)


def write_folders(out, split, names, pictures):
    """A picture for each object, and pieces of the ground between them."""
    for name, picture, objects in pictures:
        free = np.ones(picture.shape[:2], bool)
        for number, (kind, _, given) in enumerate(objects):
            left, top, across, down = (int(side) for side in given['bbox'])
            box = slice(top, top + down + 1), slice(left, left + across + 1)
            free[box] = False
            write(out / f'folders/{names[kind]}/{name}_{number}.jpg', picture[box])
        side = min(free.shape) // 4
        for row in range(0, len(free) - side, side):
            for column in range(0, free.shape[1] - side, 2 * side):
                piece = slice(row, row + side), slice(column, column + side)
                if free[piece].all():
                    write(out / f'folders/background/{name}_{row}_{column}.jpg', picture[piece])


def write(path, picture):
    path.parent.mkdir(parents=True, exist_ok=True)
    assert cv2.imwrite(str(path), picture)


def write_forms(coco, out, forms):
    for split in ('train', 'val'):
        file = COCO(str(coco / f'annotations/instances_{split}2017.json'))
        used = sorted({one['category_id'] for one in file.anns.values()})
        names = [file.cats[one]['name'] for one in used]
        pictures = [
            (
                Path(image['file_name']).stem,
                cv2.imread(str(coco / f'{split}2017' / image['file_name'])),
                [
                    (used.index(one['category_id']), file.annToMask(one), one)
                    for one in file.imgToAnns[image['id']]
                ],
            )
            for image in file.imgs.values()
        ]
        for form in forms:
            form(out, split, names, pictures)
