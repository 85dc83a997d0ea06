"""Write a data set in COCO's layout in the forms in which people have theirs.

``python tests/data_forms.py COCO OUT`` reads ``COCO/annotations/instances_*.json``
and the pictures, and makes ``OUT/{roboflow,voc,yolo,labelme,masks_255,masks_1,folders}``.
"""

import json
import sys
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


def write_voc(out, split, names, pictures):
    (out / 'voc/ImageSets/Main').mkdir(parents=True, exist_ok=True)
    (out / 'voc/Annotations').mkdir(exist_ok=True)
    for name, picture, objects in pictures:
        write(out / f'voc/JPEGImages/{name}.jpg', picture)
        height, width, depth = picture.shape
        size = f'<width>{width}</width><height>{height}</height><depth>{depth}</depth>'
        text = f'<annotation><filename>{name}.jpg</filename><size>{size}</size>'
        for kind, _, given in objects:
            left, top, across, down = (round(side) for side in given['bbox'])
            corners = dict(xmin=left + 1, ymin=top + 1, xmax=left + across, ymax=top + down)
            box = ''.join(f'<{key}>{value}</{key}>' for key, value in corners.items())
            text += f'<object><name>{names[kind]}</name><bndbox>{box}</bndbox></object>'
        (out / f'voc/Annotations/{name}.xml').write_text(f'{text}</annotation>')
    listed = '\n'.join(name for name, *_ in pictures)
    (out / f'voc/ImageSets/Main/{split}.txt').write_text(listed)


def write_yolo(out, split, names, pictures):
    (out / f'yolo/labels/{split}').mkdir(parents=True)
    (out / 'yolo/classes.txt').write_text('\n'.join(names))
    for name, picture, objects in pictures:
        write(out / f'yolo/images/{split}/{name}.jpg', picture)
        height, width = picture.shape[:2]
        lines = []
        for kind, _, given in objects:
            left, top, across, down = given['bbox']
            centre = ((left + across / 2) / width, (top + down / 2) / height)
            lines.append(' '.join(map(str, (kind, *centre, across / width, down / height))))
        (out / f'yolo/labels/{split}/{name}.txt').write_text('\n'.join(lines))


def write_labelme(out, split, names, pictures):
    """One file for each picture, polygons around the pieces of each object."""
    for name, picture, objects in pictures:
        write(out / f'labelme/{name}.jpg', picture)
        shapes = []
        for group, (kind, mask, _) in enumerate(objects):
            outlines, _ = cv2.findContours(mask, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE)
            given = dict(label=names[kind], group_id=group, shape_type='polygon', flags={})
            points = [outline[:, 0].tolist() for outline in outlines if len(outline) > 2]
            shapes += [dict(given, points=each) for each in points]
        height, width = picture.shape[:2]
        content = dict(version='5.5.0', flags={}, shapes=shapes, imagePath=f'{name}.jpg')
        content.update(imageData=None, imageHeight=height, imageWidth=width)
        (out / f'labelme/{name}.json').write_text(json.dumps(content))


def write_masks(out, split, names, pictures):
    """Objects of all kinds against the ground, as 255 and as 1."""
    for value in (255, 1):
        for name, picture, objects in pictures:
            labels = np.zeros(picture.shape[:2], np.uint8)
            for _, mask, _ in objects:
                labels[mask > 0] = value
            write(out / f'masks_{value}/images/{name}.jpg', picture)
            write(out / f'masks_{value}/masks/{name}.png', labels)


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


FORMS = (write_roboflow, write_voc, write_yolo, write_labelme, write_masks, write_folders)


def write_forms(coco, out, forms=FORMS):
    """Write all forms of the data in a folder of COCO's layout."""
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


if __name__ == '__main__':
    write_forms(*map(Path, sys.argv[1:]))
