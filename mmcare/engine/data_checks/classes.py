"""Checks of classes: whether model, files and folders agree, and each class has examples."""

from __future__ import annotations

import os
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from mmcare.engine.data_checks.findings import Run, Split, Stop, Warn, examples
from mmcare_runtime.suffixes import OTHER_PICTURES, PICTURES, walk

FOREIGN = ('__MACOSX', 'System Volume Information', '$RECYCLE.BIN')


def check_num_classes(run: Run) -> Iterator[Stop | Warn]:
    """Find heads for fewer classes than the dataset has; in training, warn of heads for more."""
    model = run.model
    if any(hasattr(module, 'num_stuff_classes') for module in model.modules()):
        return  # panoptic models count things and stuff separately
    named = any(hasattr(module, 'language_model') for module in model.modules())
    for split in run.splits:
        if hasattr(split.dataset, 'num_all_imgs') or 'LoadDepthAnnotation' in split.steps:
            continue  # videos for tracking have other classes; depth has none
        number = len(split.classes)
        heads = {n: m for n, m in model.named_modules() if hasattr(m, 'num_classes')}
        if len(heads) > 1:
            heads.pop('', None)  # a segmentor repeats what its head says
        for name, module in heads.items():
            outputs = module.num_classes
            # Proposals are class-agnostic, and STDC has a head for borders.
            place = f'{name} {type(module).__name__}'.lower()
            other = 'backbone' in name or 'rpn' in place or hasattr(module, 'boundary_threshold')
            if isinstance(outputs, int) and outputs != number and not other:
                fault = f'the {split.mode} dataset has {number} classes, but '
                fault += f'{".".join(filter(None, ("model", name)))}.num_classes={outputs}'
                if outputs < number and not named:  # otherwise a prompt names the classes
                    yield Stop(fault)
                elif number and split.mode == 'train':
                    yield Warn(fault)


def check_class_key(run: Run) -> Iterator[Stop]:
    """Find classes under the key of MMEngine's predecessors, which datasets ignore."""
    for split in run.splits:
        ignored = split.dataset.metainfo.get('CLASSES')
        if ignored is None or any(isinstance(entry, dict) for entry in ignored):
            continue  # mmpose itself writes the categories of a COCO file there
        if [*ignored] != split.classes:
            yield Stop(
                f'{split.mode}_dataloader.dataset.metainfo.CLASSES is ignored, and the classes are '
                f'{examples(split.classes) or "none"}: the key is now metainfo.classes'
            )


def check_labels(run: Run) -> Iterator[Stop]:
    """Find labels of pictures that no class has, such as labels that count from 1."""
    outputs: list[Any] = [getattr(m, 'num_classes', None) for m in run.model.modules()]
    outputs = [n for n in outputs if isinstance(n, int) and n > 0]  # -1: no classifier, as in VGG
    for split in run.splits:
        labels = [picture.label for picture in split.pictures if isinstance(picture.label, int)]
        number = len(split.classes) or min(outputs, default=0)
        if labels and number and not 0 <= min(labels) <= max(labels) < number:
            advice = '. Labels count from 0: subtract 1 from each' if min(labels) == 1 else ''
            yield Stop(
                f'the labels in {split.name} are {min(labels)} to {max(labels)}, and those of the '
                f'{number} classes 0 to {number - 1}{advice}'
            )


def check_evaluator(run: Run) -> Iterator[Stop | Warn]:
    """Find evaluators whose annotation file has other pictures or objects than the dataset's."""
    for split in run.splits:
        coco = split.coco
        if coco is None or len(run.of_mode(split.mode)) > 1:
            continue  # one file may be for all parts of a ConcatDataset
        for metric in split.configs:
            file = metric.get('ann_file') if isinstance(metric, dict) else None
            if not file or metric.get('format_only') or file == split.dataset.ann_file:
                continue
            try:
                other = split.read(file)
            except (OSError, ValueError):  # of another format
                continue
            pictures = [{image.get('id') for image in part.images or ()} for part in (coco, other)]
            text = f'{split.mode}_evaluator.ann_file={file!r} lists other '
            source = f"than the dataset's, {split.dataset.ann_file!r}"
            if pictures[0] != pictures[1]:
                yield Stop(f'{text}pictures {source}')
            elif other.is_panoptic == coco.is_panoptic and other.annotations != coco.annotations:
                yield Warn(f'{text}objects {source}')  # such as those of all classes as one


def check_folder_names(folders: list[str], classes: list[str], root: str) -> Iterator[Stop]:
    """Find folders that are not classes: mmpretrain makes every folder a class, sorted by name."""
    foreign = [name for name in folders if name.startswith('.') or name in FOREIGN]
    if foreign:
        yield Stop(
            f'{root!r} has the folders {examples(foreign)}, which mmpretrain takes as classes: '
            'delete them'
        )
    elif classes and len(classes) != len(folders):
        without = [name for name in classes if name not in folders]
        unknown = [name for name in folders if name not in classes]
        if without:
            yield Stop(
                f'{root!r} has no folder for the classes {examples(without)}: labels are the '
                'places of folders in alphabetical order, so a missing folder shifts the other '
                'labels. Make a folder for each class, and put pictures into it'
            )
        else:
            yield Stop(f'{root!r} has folders that are not among the classes: {examples(unknown)}')


def check_class_folders(run: Run) -> Iterator[Stop]:
    """Find folders that shift labels: not the first dataset's, or not in the order of classes."""
    for split in run.splits:
        dataset, first = split.dataset, (run.first or split).dataset
        folders, wanted = (getattr(part, 'folder_to_idx', {}) for part in (dataset, first))
        if folders and wanted and folders != wanted:
            names = examples(sorted(folders.keys() ^ wanted.keys()))
            text = f'labels differ: only one of {first.img_prefix!r}, {dataset.img_prefix!r}'
            yield Stop(f'{text} has {names}')
        classes = split.classes
        if any(folders.get(name, index) != index for index, name in enumerate(classes)):
            text = f'{classes=} are not in the order of {dataset.img_prefix!r}'
            yield Stop(f'{text}, which is {[*folders]}')


def check_class_pictures(run: Run) -> Iterator[Stop | Warn]:
    """Find classifiers that have one class, and classes without pictures."""
    if not any(getattr(module, 'num_classes', None) for module in run.model.modules()):
        return  # self-supervised training, which reads no labels
    for mode in ('train', 'val'):
        splits = run.of_mode(mode)  # the parts of a ConcatDataset
        pictures = [picture for split in splits for picture in split.pictures]
        labels = Counter(p.label for p in pictures if isinstance(p.label, int))
        if not labels or sum(labels.values()) < len(pictures):
            continue  # there are no labels, or several for each picture
        folders = examples(split.folder for split in splits)
        if len(labels) == 1 and mode == 'train':
            yield Stop(
                f'all {len(pictures)} pictures in {folders} are of one class: the loss would be 0 '
                'and the accuracy 100. Is data_prefix the folder that holds the folders of classes?'
            )
            continue
        empty = [name for index, name in enumerate(splits[0].classes) if index not in labels]
        if empty:
            yield Warn(f'no picture in {folders} is of the classes {examples(empty)}')


def check_skipped_files(run: Run) -> Iterator[Warn]:
    """Find pictures that mmpretrain skips silently because of their extensions."""
    for split in run.splits:
        extensions = getattr(split.dataset, 'extensions', None)
        if not extensions or getattr(split.dataset, 'ann_file', None) or '://' in split.folder:
            continue
        known = {*PICTURES, *OTHER_PICTURES} - {'.npy'}
        skipped = Counter(
            file.suffix.lower()
            for file in walk(Path(split.folder))
            if file.suffix.lower() in known and not file.name.lower().endswith(tuple(extensions))
        )
        if skipped:
            kinds = ', '.join(f'{n} {suffix}' for suffix, n in skipped.most_common())
            yield Warn(
                f'{sum(skipped.values())} pictures in {split.folder!r} are skipped ({kinds}): add '
                'these to the extensions of the dataset, or convert them'
            )


def check_categories(run: Run) -> Iterator[Stop]:
    """Find classes that are not among COCO's categories, or not in their order."""
    for split in run.splits:
        if split.coco is None:
            continue
        listed = {entry['id']: entry['name'] for entry in split.coco.categories or ()}
        names, classes = [listed.get(id) for id in split.dataset.cat_ids], split.classes
        if len({*listed.values()}) < len(listed):
            continue  # another check says so
        # Classes that come last may be missing in training; an evaluation of them would fail.
        expected = classes[: len(names) if split.mode == 'train' else None]
        # LVIS's dataset takes all categories by position, even one that mmdet spells differently.
        written, wanted = {*names}, {*classes}
        pairs = zip(names, expected)
        fits = all(a == b or not (a in wanted or b in written) for a, b in pairs)
        if names and len(names) == len(expected) and fits:
            continue
        unknown = [name for name in classes if name not in names]
        yield Stop(
            f'{unknown or "the classes"} are not {"among" if unknown else "in the order of"} the '
            f'categories of {split.dataset.ann_file!r}: set {run.line_of_classes(split.mode)} to '
            f'{"some of " if unknown else ""}{tuple(listed.values() if unknown else names)}'
        )


def check_pictures(run: Run) -> Iterator[Stop | Warn]:
    """Find datasets without a picture, and pictures that are in training and in validation."""
    train, val = run.of_mode('train'), run.of_mode('val')
    if train and not any(split.pictures for split in train):
        yield Stop(
            'the training data are empty: no picture is found, or filter_cfg leaves out all of them'
        )
    if val and not any(split.pictures for split in val):
        yield Stop(f'the validation data in {val[0].name} are empty')
    resolve = lru_cache(maxsize=None)(_resolve_files)
    paths = [
        {
            resolve(os.path.dirname(p.path)).get(os.path.basename(p.path), '')
            for s in part
            for p in s.pictures
            if p.path
        }
        for part in (train, val)
    ]
    same = sorted((paths[0] & paths[1]) - {''})
    if same:
        yield Warn(
            f'{len(same)} of {len(paths[1])} pictures of validation are also trained on, such as '
            f'{same[0]!r}: metrics say nothing about other pictures'
        )


def _resolve_files(folder: str) -> dict[str, str]:
    """Return the real paths of the files in a folder, by name: files may be links."""
    real = os.path.realpath(folder)
    return {
        entry.name: os.path.realpath(entry) if entry.is_symlink() else entry.path
        for entry in (os.scandir(real) if os.path.isdir(real) else ())
        if entry.is_file()
    }


def check_objects(run: Run) -> Iterator[Stop | Warn]:
    """Find data without objects; warn of classes without objects, which may be intended."""
    yield from _check_trained_objects([s for s in run.of_mode('train') if _has_boxes(s)])
    yield from _check_validated_objects([s for s in run.of_mode('val') if _has_boxes(s)])
    for split in run.splits:
        number = sum(len(picture.labels) for picture in split.pictures)
        if number and split.coco is None and number == sum(p.ignored for p in split.pictures):
            yield Stop(f'all {number} objects in {split.name} are ignored, as difficult ones are')


def _check_trained_objects(splits: list[Split]) -> Iterator[Stop | Warn]:
    """Compare the classes of training data with the labels of their objects."""
    names = {name for split in splits for name in _object_classes(split)}
    seen: set[str] = set()
    has_other_labels = False
    for split in splits:
        classes = dict(enumerate(_object_classes(split)))
        labels = {label for picture in split.pictures for label in picture.labels}
        seen.update(classes[label] for label in labels if label in classes)
        has_other_labels |= any(label not in classes for label in labels)
    if names <= seen or has_other_labels:
        return
    fault = f'no object in the training data is one of the classes {sorted(names - seen)}'
    if seen:
        yield Warn(fault)
    # Otherwise another check says why all pictures, or all objects of the classes, are left out.
    elif any(split.pictures for split in splits) and not any(map(_file_has_objects, splits)):
        written = sorted({name for split in splits for name in _names_of_objects(split)})
        yield Stop(f'{fault}: objects are called {written}' if written else fault)


def _check_validated_objects(splits: list[Split]) -> Iterator[Stop]:
    """Find validation data that have pictures, and no object of a class."""
    splits = [split for split in splits if split.pictures]
    labelled = any(picture.labels for split in splits for picture in split.pictures)
    if splits and not labelled and not any(map(_file_has_objects, splits)):
        yield Stop(
            f'no object in the validation data {splits[0].name} is one of the classes '
            f'{splits[0].classes}: AP would be -1'
        )


def _object_classes(split: Split) -> list[str]:
    """Return the names of the classes that objects have; panoptic data have more."""
    return list(split.dataset.metainfo.get('thing_classes') or split.classes)


def _names_of_objects(split: Split) -> list[str]:
    """Return the names that objects have in a split's files, of Pascal VOC or of COCO."""
    trees = [ET.parse(picture.xml) for picture in split.pictures if picture.xml]
    names = {str(name.text) for tree in trees for name in tree.iterfind('object/name')}
    if split.coco:
        ids = {item.get('category_id') for item in split.coco.annotations or ()}
        names |= {str(c.get('name')) for c in split.coco.categories or () if c.get('id') in ids}
    return sorted(names)


def _has_boxes(split: Split) -> bool:
    """Return whether the dataset has boxes, as mmdet's do."""
    return hasattr(split.dataset, 'COCOAPI') or any(picture.xml for picture in split.pictures)


def _file_has_objects(split: Split) -> bool:
    """Return whether the split's COCO file holds objects of its classes."""
    if split.coco is None:
        return False
    left_out = {entry['id'] for entry in split.coco.categories or ()} - {*split.dataset.cat_ids}
    return any(item.get('category_id') not in left_out for item in split.coco.annotations or ())


def check_test_split(loader: Any) -> Iterator[Warn]:
    """Warn before training if the file of the test split does not exist."""
    dataset = loader.get('dataset') if isinstance(loader, dict) else None
    if isinstance(dataset, dict) and not dataset.get('backend_args'):
        file = os.path.join(dataset.get('data_root') or '', dataset.get('ann_file') or '')
        if '://' not in file and not os.path.exists(file or '.'):
            yield Warn(f'the test split needs {file!r}, which does not exist')
