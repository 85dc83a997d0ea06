"""Validate data before training."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator
from functools import lru_cache
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


@HOOKS.register_module()
class DataCheckHook(SwitchableHook):
    """Validate what the toolboxes assume.

    Before a run: images and label maps exist; label maps in PNG are undamaged, as large as their
    images and read as stored; COCO's categories are in the order of the classes; the evaluator's
    ``ann_file`` is that of its dataloader; all splits have the same class folders; the model has
    enough classes (with a ``language_model``: or a warning). Before each iteration: mmseg's labels
    are among the classes, or ignored. Remote data (``backend_args``, ``://``) are not checked.

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
        if faults:
            raise ValueError('\n'.join(faults[:10]))

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
            beyond = set(labels[(labels > last) & (labels != 255)].tolist())
            if beyond:
                parts = [*_unwrap(dataset), *runner.model.modules()]
                beyond -= {getattr(part, 'ignore_index', 255) for part in parts}
            if beyond:
                raise ValueError(
                    f'the label map {sample.get("seg_map_path")!r} has the label '
                    f'{max(beyond) + shift}, the last class has {last + shift}'
                )


def _unwrap(dataset: Any) -> list[BaseDataset]:
    """Return the datasets within wrappers."""
    if isinstance(dataset, BaseDataset):
        return [dataset]
    inner = getattr(dataset, 'datasets', None) or filter(None, [getattr(dataset, 'dataset', None)])
    return [one for wrapped in inner for one in _unwrap(wrapped)]


def _check_num_classes(mode: str, dataset: BaseDataset, model: nn.Module) -> Iterator[str]:
    number = len(dataset.metainfo.get('classes') or ())
    if any(hasattr(module, 'num_stuff_classes') for module in model.modules()):
        return  # panoptic models count things and stuff apart
    named = any(hasattr(module, 'language_model') for module in model.modules())
    for name, module in model.named_modules():
        found = getattr(module, 'num_classes', None)
        # Proposals are class-agnostic, and STDC has a head for borders.
        other = 'backbone' in name or 'rpn' in name or hasattr(module, 'boundary_threshold')
        if isinstance(found, int) and found < number and not other:
            fault = f'the {mode} dataset has {number} classes, but model.{name}.num_classes={found}'
            if named:  # classes are words of a prompt, which can be split
                print_log(fault, logger='current', level=logging.WARNING)
            else:
                yield fault


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
    """Find a missing class folder, which shifts all later labels: they index the sorted folders."""
    given, wanted = (getattr(one, 'folder_to_idx', None) for one in (dataset, first))
    if given and wanted and given != wanted:
        names = ', '.join(sorted(given.keys() ^ wanted.keys())[:3])
        yield f'labels differ: only one of {first.img_prefix!r}, {dataset.img_prefix!r} has {names}'


def _check_categories(mode: str, dataset: BaseDataset) -> Iterator[str]:
    """Find classes in another order than the file's, in which mmdet numbers categories."""
    if not hasattr(dataset, 'cat_ids') or not os.path.isfile(dataset.ann_file):
        return
    # Their names alone: mmdet deletes what it has parsed, and to parse it again takes a minute.
    text = Path(dataset.ann_file).read_text(encoding='utf-8')
    listed: dict[int, str] = {}
    for found in re.finditer(r'"categories"\s*:\s*(?=\[\s*\{)', text):
        entries = json.JSONDecoder().raw_decode(text, found.end())[0]
        listed.update((o['id'], o['name']) for o in entries if o.keys() >= {'id', 'name'})
    names, classes = [listed.get(one) for one in dataset.cat_ids], [*dataset.metainfo['classes']]
    # Classes that come last may be missing in training; an evaluation of them would raise.
    if not names or names != classes[: len(names) if mode == 'train' else None]:
        yield (
            f'the labels of {dataset.ann_file!r} are not in the order of the classes: set '
            f'{mode}_dataloader.dataset.metainfo.classes to {tuple(names or listed.values())}'
        )


def _check_files(mode: str, dataset: BaseDataset) -> Iterator[str]:
    @lru_cache(maxsize=None)
    def list_files(folder: str) -> set[str]:  # much faster than to ask for each file
        entries = os.scandir(folder) if os.path.isdir(folder) else ()
        return {entry.name for entry in entries if entry.is_file()}

    missing = []
    steps = {type(step).__name__: step for step in dataset.pipeline.transforms}
    two = len(dataset.metainfo.get('classes') or ()) <= 2
    for index in range(len(dataset)):
        info = dataset.get_data_info(index)
        paths = [info.get('img_path'), info.get('seg_map_path')]
        paths = [os.path.abspath(p) for p in paths if isinstance(p, str) and '://' not in p]
        absent = [p for p in paths if os.path.basename(p) not in list_files(os.path.dirname(p))]
        missing += absent
        if len(paths) == 2 and not absent and paths[1].endswith('.png'):
            yield from _check_label_map(paths[0], paths[1], steps, two)
    if missing:
        yield f'{len(missing)} files of the {mode} dataset do not exist, such as {missing[0]!r}'


def _check_label_map(image: str, path: str, steps: dict[str, Any], two: bool) -> Iterator[str]:
    """Find damage, another size than the image's, and what the steps read as other labels."""
    try:
        with Image.open(path) as labels:
            stored, size = str(labels.tile[0][3]), labels.size
            labels.verify()  # checksums, which decoding does not compare
    except Exception as error:  # a different one for each kind of damage
        yield f'the label map {path!r} is damaged ({error}): get it again'
        return
    if (wanted := _size_as_loaded(image, steps.get('LoadImageFromFile'))) not in (None, size):
        yield f'the label map {path!r} is {size} pixels large, and its image is loaded as {wanted}'
    if getattr(steps.get('LoadAnnotations'), 'with_seg', False) and not (
        stored in ('L', 'P', 'P;1', 'P;2', 'P;4')
        or (stored == '1' and two)  # classes
        or (stored.startswith('I') and np.asarray(Image.open(path)).max() < 256)
    ):
        yield f'the label map {path!r} is not read as stored: store one channel of 8 bits a pixel'


def _size_as_loaded(path: str, loader: Any) -> tuple[int, int] | None:
    """Return width and height after the loader has turned the image, None if they are unknown."""
    try:
        with Image.open(path) as image:
            turned = image.getexif().get(0x0112, 1) > 4  # orientation
            turned &= loader.color_type in ('color', 'grayscale')
            return image.size[::-1] if turned else image.size
    except Exception:  # a format that Pillow does not read, or no loader of mmcv's
        return None
