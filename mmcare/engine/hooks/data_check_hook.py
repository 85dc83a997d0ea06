from __future__ import annotations

import json
import logging
import os
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.dataset import BaseDataset
from mmengine.dist import is_main_process
from mmengine.logging import print_log
from mmengine.runner import BaseLoop, Runner
from PIL import Image
from torch import nn

from mmcare.engine.hooks import SwitchableHook
from mmcare.registry import HOOKS

_warn = partial(print_log, logger='current', level=logging.WARNING)


@HOOKS.register_module()
class DataCheckHook(SwitchableHook):
    """Check the data for what the toolboxes assume, by the ``_check_`` functions of this file.

    They run before a run; what may be intended is a warning. The sizes of 1000 images of a dataset
    are compared, evenly spread. Before each iteration, the labels of mmseg's maps are compared with
    the classes. Remote data (``backend_args``, ``://``) are not checked.

    Raises:
        ValueError: If something is wrong. The message names the files and what to do.
    """

    def before_run(self, runner: Runner) -> None:
        """Check the datasets that were built for this run."""
        datasets: list[tuple[str, BaseDataset]] = []
        for mode in ('train', 'val', 'test') if is_main_process() else ():
            loop = getattr(runner, f'_{mode}_loop')
            for dataset in _unwrap(loop.dataloader.dataset) if isinstance(loop, BaseLoop) else ():
                if not getattr(dataset, 'backend_args', None):
                    datasets.append((mode, dataset))
        faults: list[str] = []
        for mode, dataset in datasets:
            faults += _check_num_classes(mode, dataset, runner.model)
            faults += _check_evaluator(mode, dataset, runner)
            faults += _check_class_folders(dataset, datasets[0][1])
            faults += _check_categories(mode, dataset)
            faults += _check_files(mode, dataset)
        train = [dataset for mode, dataset in datasets if mode == 'train']
        faults = faults or [*_check_objects(train), *_check_labels(train, runner.model)]
        if faults:
            raise ValueError('\n'.join(faults[:10]))
        _check_test_split(runner._test_dataloader if train else None)

    def _before_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, mode: str = 'train'
    ) -> None:
        """Check the label maps (1, H, W) in a batch of mmseg's."""
        dataset = getattr(runner, f'{mode}_dataloader').dataset
        metainfo = getattr(dataset, 'metainfo', {})
        if not (metainfo.get('classes') and 'reduce_zero_label' in metainfo):
            return
        last, shift = len(metainfo['classes']) - 1, int(metainfo['reduce_zero_label'])
        samples = data_batch['data_samples']
        for sample in samples[0] if isinstance(samples[0], (list, tuple)) else samples:  # views
            labels = sample.gt_sem_seg.data if 'gt_sem_seg' in sample else torch.zeros(1)
            beyond = set(labels[labels > last].tolist())
            if beyond and (beyond := beyond - _ignored(_unwrap(dataset), runner.model)):
                raise ValueError(
                    f'the label map {sample.get("seg_map_path")!r} has the label '
                    f'{max(beyond) + shift}, the last class has {last + shift}'
                )


def _unwrap(dataset: Any) -> list[BaseDataset]:
    if isinstance(dataset, BaseDataset):
        return [dataset]
    inner = getattr(dataset, 'datasets', None) or filter(None, [getattr(dataset, 'dataset', None)])
    return [found for wrapped in inner for found in _unwrap(wrapped)]


def _ignored(datasets: list[BaseDataset], model: nn.Module) -> set[int]:
    parts = [*datasets, *model.modules()]
    return {part.ignore_index for part in parts if hasattr(part, 'ignore_index')}


def _check_num_classes(mode: str, dataset: BaseDataset, model: nn.Module) -> Iterator[str]:
    """Find heads for fewer classes than the dataset has; warn of more in training."""
    number = len(dataset.metainfo.get('classes') or ())
    if any(hasattr(module, 'num_stuff_classes') for module in model.modules()):
        return  # panoptic models count things and stuff apart
    named = any(hasattr(module, 'language_model') for module in model.modules())
    for name, module in model.named_modules():
        found = getattr(module, 'num_classes', None)
        # Proposals are class-agnostic, and STDC has a head for borders.
        other = 'backbone' in name or 'rpn' in name or hasattr(module, 'boundary_threshold')
        if isinstance(found, int) and found != number and not other:
            fault = f'the {mode} dataset has {number} classes, but model.{name}.num_classes={found}'
            if found < number and not named:  # classes are words of a prompt, which can be split
                yield fault
            elif number and mode == 'train':
                _warn(fault)


def _check_evaluator(mode: str, dataset: BaseDataset, runner: Runner) -> Iterator[str]:
    """Find a stale file in the evaluator, with the objects of other images."""
    if dataset is not getattr(runner, f'{mode}_dataloader').dataset:  # one of several
        return
    metrics = getattr(runner, f'_{mode}_evaluator', None)  # training has none
    for metric in metrics if isinstance(metrics, (list, tuple)) else [metrics]:
        file = metric.get('ann_file') if isinstance(metric, dict) else None
        if file and os.path.realpath(file) != os.path.realpath(dataset.ann_file):
            yield f"{mode}_evaluator.ann_file={file!r} is not the dataset's, {dataset.ann_file!r}"


def _check_class_folders(dataset: Any, first: Any) -> Iterator[str]:
    """Find other class folders, which shift labels (sorted folders), and another order of them."""
    given, wanted = getattr(dataset, 'folder_to_idx', {}), getattr(first, 'folder_to_idx', {})
    if given and wanted and given != wanted:
        names = ', '.join(sorted(given.keys() ^ wanted.keys())[:3])
        yield f'labels differ: only one of {first.img_prefix!r}, {dataset.img_prefix!r} has {names}'
    classes = [*(dataset.metainfo.get('classes') or ())]
    if any(given.get(name, index) != index for index, name in enumerate(classes)):
        yield f'{classes=} are not in the order of {dataset.img_prefix!r}, which is {[*given]}'


def _check_categories(mode: str, dataset: BaseDataset) -> Iterator[str]:
    """Find classes that are not among COCO's categories, or not in their order."""
    if not hasattr(dataset, 'cat_ids') or not os.path.isfile(dataset.ann_file):
        return
    # Only the names are parsed: mmdet deletes what it has parsed, and parsing all takes a minute.
    text = Path(dataset.ann_file).read_text(encoding='utf-8')
    listed: dict[int, str] = {}
    for found in re.finditer(r'"categories"\s*:\s*(?=\[\s*\{)', text):
        entries = json.JSONDecoder().raw_decode(text, found.end())[0]
        listed.update((o['id'], o['name']) for o in entries if o.keys() >= {'id', 'name'})
    names, classes = [listed.get(id) for id in dataset.cat_ids], [*dataset.metainfo['classes']]
    # Classes that come last may be missing in training; an evaluation of them would raise.
    if names and names == classes[: len(names) if mode == 'train' else None]:
        return
    unknown = [name for name in classes if name not in names]
    yield (
        f'{unknown or "the classes"} are not {"among" if unknown else "in the order of"} the '
        f'categories of {dataset.ann_file!r}: set {mode}_dataloader.dataset.metainfo.classes to '
        f'{"some of " if unknown else ""}{tuple(listed.values() if unknown else names)}'
    )


def _check_files(mode: str, dataset: BaseDataset) -> Iterator[str]:
    """Find images and label maps that do not exist."""

    @lru_cache(maxsize=None)
    def list_files(folder: str) -> set[str]:  # much faster than to ask for each file
        entries = os.scandir(folder) if os.path.isdir(folder) else ()
        return {entry.name for entry in entries if entry.is_file()}

    missing, steps = [], {type(step).__name__: step for step in dataset.pipeline.transforms}
    sampled = range(0, len(dataset), -(-len(dataset) // 1000) or 1)
    binary = len(dataset.metainfo.get('classes') or ()) <= 2
    for index in range(len(dataset)):
        info = dataset.get_data_info(index)
        paths = [info.get('img_path'), info.get('seg_map_path')]
        paths = [os.path.abspath(p) for p in paths if isinstance(p, str) and '://' not in p]
        absent = [p for p in paths if os.path.basename(p) not in list_files(os.path.dirname(p))]
        missing += absent
        if len(paths) == 2 and not absent and paths[1].endswith('.png'):
            yield from _check_label_map(paths[0], paths[1], steps, binary)
        size = (info.get('width'), info.get('height'))
        if all(size) and len(paths) > len(absent) and index in sampled:
            yield from _check_size('annotations', size, paths[0], steps, off=1)
    if missing:
        yield f'{len(missing)} files of the {mode} dataset do not exist, such as {missing[0]!r}'


def _check_label_map(image: str, path: str, steps: dict[str, Any], binary: bool) -> Iterator[str]:
    """Find damaged label maps, those of another size than the image, and those misread."""
    try:
        with Image.open(path) as labels:
            stored, size = str(labels.tile[0][3]), labels.size
            labels.verify()  # checksums, which decoding does not compare
    except Exception as error:  # a different one for each kind of damage
        yield f'the label map {path!r} is damaged ({error}): get it again'
        return
    yield from _check_size(f'the labels {path!r}', size, image, steps)
    if getattr(steps.get('LoadAnnotations'), 'with_seg', False) and not (
        stored in ('L', 'P', 'P;1', 'P;2', 'P;4')
        or (stored == '1' and binary)
        or (stored.startswith('I') and np.asarray(Image.open(path)).max() < 256)
    ):
        yield f'the label map {path!r} is not read as stored: store one channel of 8 bits a pixel'


def _check_size(what: str, size: Any, path: str, steps: Any, off: int = 0) -> Iterator[str]:
    """Find annotations for another size, such as before EXIF data turn an image."""
    try:
        with Image.open(path) as image:
            obeys = steps['LoadImageFromFile'].color_type in ('color', 'grayscale')
            turned = obeys and image.getexif().get(0x0112, 1) > 4  # orientation
            loaded = image.size[::-1] if turned else image.size
    except Exception:  # a format that Pillow does not read, or no loader of mmcv's
        return
    if any(abs(given - side) > off for given, side in zip(size, loaded)):
        advice = "set the loader's color_type='color_ignore_orientation', or correct the size"
        yield f'{what} of {path!r} are for {size} pixels, and it is loaded as {loaded}: {advice}'


def _check_objects(datasets: list[BaseDataset]) -> Iterator[str]:
    """Find training data without objects; warn of single classes without, which may be meant."""
    if datasets and not any(map(len, datasets)):
        yield 'the training data are empty: no image is found, or filter_cfg leaves out all of them'
    wanted: set[str] = set()
    found: set[str | None] = set()
    written: set[str] = set()
    for dataset in datasets:
        names = dataset.metainfo.get('thing_classes') or dataset.metainfo.get('classes') or ()
        for info in map(dataset.get_data_info, range(len(dataset) if names else 0)):
            wanted.update(names if 'instances' in info else ())
            labels = {instance.get('bbox_label') for instance in info.get('instances', ())}
            found.update(names[i] if i in range(len(names)) else None for i in labels)
            if 'xml_path' in info and not found:  # mmdet leaves out objects of other names
                tree = ET.parse(info['xml_path'])
                written.update(str(name.text) for name in tree.iterfind('object/name'))
    fault = f'no object in the training data is one of the classes {sorted(wanted - found)}'
    if wanted and not found:
        yield f"{fault}, which Pascal VOC's files call {sorted(written)}" if written else fault
    elif wanted - found and None not in found:
        _warn(fault)


def _check_labels(datasets: list[BaseDataset], model: nn.Module) -> Iterator[str]:
    """Find label maps of one class, such as masks of 0 and 255 (ignored), whose mIoU is 100."""
    values: set[int] = set()
    for dataset in datasets:
        steps = [s for s in dataset.pipeline.transforms if hasattr(s, 'reduce_zero_label')]
        for info in map(dataset.get_data_info, range(len(dataset))):
            path = info.get('seg_map_path') or '://'
            if not steps or '://' in path or 'reduce_zero_label' not in info:
                return
            values.update(np.unique(steps[0](info)['gt_seg_map']).tolist())
            if len(values - _ignored(datasets, model)) > 1:
                return
    if values:
        read = f'values are read as {sorted(values)}, and {_ignored(datasets, model)} are ignored'
        yield f'the labels in maps such as {path!r} are of one class ({read}): write 0, 1, ...'


def _check_test_split(loader: Any) -> None:
    """Warn before training if the file of the test split does not exist."""
    dataset = loader.get('dataset') if isinstance(loader, dict) else None
    if isinstance(dataset, dict) and not dataset.get('backend_args'):
        file = os.path.join(dataset.get('data_root') or '', dataset.get('ann_file') or '')
        if '://' not in file and not os.path.exists(file or '.'):
            _warn(f'the test split needs {file!r}, which does not exist')
