"""Divide a public data set anew into training, validation and test pictures.

The recipe of CARE-S0 was tuned with the figures of the usual test splits in sight. A division that
nobody has looked at lets figures be read once. It is random, by a seed that was fixed before the
first run, and its parts are as large as the usual ones.
"""

import json
import random
from collections.abc import Hashable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from mmengine.config import Config

SEED = 20261127
SPLITS = ('train', 'val', 'test')
Picture = TypeVar('Picture', bound=Hashable)


def divide(splits: Mapping[str, Sequence[Picture]]) -> dict[str, list[Picture]]:
    """Divide the pictures of all splits at random into splits of the same sizes."""
    pictures = sorted(chain(*splits.values()))
    if len(set(pictures)) < len(pictures):
        raise ValueError('a picture is in two splits, or twice in one')
    random.Random(SEED).shuffle(pictures)
    parts = iter(pictures)
    return {split: [next(parts) for _ in splits[split]] for split in SPLITS}


def write_list(path: Path, names: Sequence[str]) -> str:
    """Write a list of names; return its absolute path, which configs do not join with a root."""
    path.write_text(''.join(f'{name}\n' for name in names), encoding='utf-8')
    return str(path)


def divide_bccd(config: Config, folder: Path) -> None:
    """Give BCCD's data sets lists of names."""
    loaders = {split: config[f'{split}_dataloader'] for split in SPLITS}
    root = Path(loaders['train'].dataset.data_root)
    lists = {split: root / loader.dataset.ann_file for split, loader in loaders.items()}
    divided = divide({split: path.read_text().split() for split, path in lists.items()})
    for split, names in divided.items():
        loaders[split].dataset.ann_file = write_list(folder / f'{split}.txt', names)


def divide_camvid(config: Config, folder: Path) -> None:
    """Link CamVid's pictures into one folder and its masks into another, and list the names."""
    root = Path(config.train_dataloader.dataset.data_root).absolute()
    names: dict[str, list[str]] = {}
    for kind, suffix in dict(images='', masks='annot').items():
        (folder / kind).mkdir(exist_ok=True)
        for split in SPLITS:
            files = sorted((root / f'{split}{suffix}').glob('*.png'))
            names[split] = [f'{split}_{file.stem}' for file in files]
            for name, file in zip(names[split], files, strict=True):
                if not (link := folder / kind / f'{name}.png').exists():
                    link.symlink_to(file)
    prefix = dict(img_path=str(folder / 'images'), seg_map_path=str(folder / 'masks'))
    for split, part in divide(names).items():
        config[f'{split}_dataloader'].dataset.update(
            data_prefix=prefix, ann_file=write_list(folder / f'{split}.txt', part)
        )


def divide_dsb2018(config: Config, folder: Path) -> None:
    """Write COCO files of the nuclei of new splits."""
    root = Path(config.train_dataloader.dataset.data_root)
    contents = {s: json.loads((root / f'annotations/{s}.json').read_text()) for s in SPLITS}
    images = {image['id']: image for part in contents.values() for image in part['images']}
    nuclei: dict[int, list[dict[str, Any]]] = {index: [] for index in images}
    for nucleus in chain(*(part['annotations'] for part in contents.values())):
        nuclei[nucleus['image_id']].append(nucleus)
    old = {split: [image['id'] for image in part['images']] for split, part in contents.items()}
    for split, indices in divide(old).items():
        found = list(chain(*(nuclei[index] for index in indices)))
        content = dict(
            images=[images[index] for index in indices],
            annotations=[nucleus | dict(id=number) for number, nucleus in enumerate(found, 1)],
            categories=contents[split]['categories'],
        )
        file = folder / f'{split}.json'
        file.write_text(json.dumps(content), encoding='utf-8')
        config[f'{split}_dataloader'].dataset.ann_file = str(file)
        if split != 'train':
            config[f'{split}_evaluator'].ann_file = str(file)


DIVIDE = dict(bccd=divide_bccd, camvid=divide_camvid, dsb2018=divide_dsb2018)


def use_fresh_splits(config: Config, name: str, folder: Path) -> None:
    """Let a shipped config for a public set read the new splits.

    Args:
        config: Changed in place.
        name: Of the set: bccd, camvid or dsb2018.
        folder: Where lists, links and annotations go, the same ones in each call.
    """
    folder.mkdir(parents=True, exist_ok=True)
    DIVIDE[name](config, folder.absolute())
