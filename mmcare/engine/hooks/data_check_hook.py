"""Data that would spoil a run in silence, or end it after hours, are found before it starts."""

import os
from collections.abc import Iterator
from functools import cache
from typing import Any

import mmengine
import numpy as np
from mmengine.dataset import BaseDataset
from mmengine.dist import broadcast_object_list, is_main_process
from mmengine.hooks import Hook
from mmengine.runner import BaseLoop, Runner
from PIL import Image

from mmcare.registry import HOOKS


@HOOKS.register_module()
class DataCheckHook(Hook):
    """Check what the toolboxes take on trust.

    Before a run: images and label maps exist; label maps in PNG are undamaged and read as stored;
    COCO's categories are in the order of the classes; the evaluator's ``ann_file`` is that of its
    dataloader; all splits have the same class folders; the model has enough classes. Before each
    iteration: mmseg's labels are among the classes. Remote data (``backend_args``, ``://``) pass.

    Args:
        enabled: False (``default_hooks.data_check.enabled=False``) switches the checks off.

    Raises:
        ValueError: If something is wrong. The message names the files and what to do.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled

    def before_run(self, runner: Runner) -> None:
        """Check the datasets that were built for this run."""
        datasets: list[tuple[str, BaseDataset]] = []
        for mode in ('train', 'val', 'test') if self.enabled else ():
            loop = getattr(runner, f'_{mode}_loop')
            if isinstance(loop, BaseLoop):  # otherwise a config that this run does not need
                datasets += [(mode, dataset) for dataset in _unwrap(loop.dataloader.dataset)]
        faults: list[str] = []
        if is_main_process():
            for mode, dataset in datasets:
                faults += _check_num_classes(mode, dataset, runner)
                faults += _check_evaluator(mode, dataset, runner)
                faults += _check_class_folders(mode, dataset, *datasets[0])
                faults += _check_categories(mode, dataset)
                faults += _check_files(mode, dataset)
        outcome = ['\n'.join(faults[:10])]
        broadcast_object_list(outcome)
        if outcome[0]:
            raise ValueError(outcome[0])

    def _before_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, mode: str = 'train'
    ) -> None:
        """Check the label maps (1, H, W) in a batch of mmseg's."""
        metainfo = getattr(getattr(runner, f'{mode}_dataloader').dataset, 'metainfo', {})
        if not self.enabled or 'reduce_zero_label' not in metainfo:  # only mmseg has it
            return
        last, shift = len(metainfo['classes']) - 1, int(metainfo['reduce_zero_label'])
        samples = data_batch['data_samples']
        for sample in samples[0] if isinstance(samples[0], list | tuple) else samples:  # views
            labels = sample.gt_sem_seg.data if 'gt_sem_seg' in sample else np.zeros(1)
            beyond = labels[(labels > last) & (labels != 255)]  # 255: no class
            if len(beyond):
                raise ValueError(
                    f'the label map {sample.get("seg_map_path")!r} has the label '
                    f'{beyond.max() + shift}, the last class has {last + shift}: correct the file, '
                    f'or name all classes in {mode}_dataloader.dataset.metainfo'
                )


def _unwrap(dataset: Any) -> list[BaseDataset]:
    """Give the datasets within wrappers, unless their files are in remote storage."""
    if isinstance(dataset, BaseDataset):
        return [] if getattr(dataset, 'backend_args', None) else [dataset]
    inner = getattr(dataset, 'datasets', None) or filter(None, [getattr(dataset, 'dataset', None)])
    return [one for wrapped in inner for one in _unwrap(wrapped)]


def _check_num_classes(mode: str, dataset: BaseDataset, runner: Runner) -> Iterator[str]:
    number = len(dataset.metainfo.get('classes') or ())
    if any(hasattr(module, 'num_stuff_classes') for module in runner.model.modules()):
        return  # panoptic models count things and stuff apart
    for name, module in runner.model.named_modules():
        # Proposals are class-agnostic, and STDC has a head for borders.
        if 'backbone' in name or 'rpn' in name or hasattr(module, 'boundary_threshold'):
            continue
        if isinstance(found := getattr(module, 'num_classes', None), int) and found < number:
            yield (
                f'the {mode} dataset has {number} classes, but model.{name}.num_classes={found}:'
                f' set that to {number}, or {mode}_dataloader.dataset.metainfo.classes to fewer'
            )


def _check_evaluator(mode: str, dataset: BaseDataset, runner: Runner) -> Iterator[str]:
    """A stale file in the evaluator would compare with the objects of other images."""
    metrics = getattr(runner, f'_{mode}_evaluator', None)  # training has none
    for metric in metrics if isinstance(metrics, list | tuple) else [metrics]:
        compared = metric.get('ann_file') if isinstance(metric, dict) else None
        alone = dataset is getattr(runner, f'{mode}_dataloader').dataset  # not one of several
        if alone and compared and os.path.realpath(compared) != os.path.realpath(dataset.ann_file):
            yield (
                f'{mode}_evaluator.ann_file={compared!r} is not the annotation file of '
                f'{mode}_dataloader: set {mode}_evaluator.ann_file={dataset.ann_file}'
            )


def _check_class_folders(mode: str, dataset: Any, first_mode: str, first: Any) -> Iterator[str]:
    """Labels are the folders' places in the alphabet: one less moves those behind it."""
    folders, others = (getattr(one, 'folder_to_idx', None) for one in (dataset, first))
    if folders and others and folders != others:
        yield (
            f'equal labels mean different classes in {first.img_prefix!r} ({first_mode}) and '
            f'{dataset.img_prefix!r} ({mode}), only one of which has '
            f'{", ".join(sorted(folders.keys() ^ others.keys())[:3])}: give both the same folders'
        )


def _check_categories(mode: str, dataset: BaseDataset) -> Iterator[str]:
    """mmdet numbers categories in the order of the file, whatever the order of the classes."""
    if hasattr(dataset, 'cat_ids'):
        listed = {one['id']: one['name'] for one in mmengine.load(dataset.ann_file)['categories']}
        if [listed[one] for one in dataset.cat_ids] != list(dataset.metainfo['classes']):
            yield (
                f'{dataset.ann_file!r} does not have the classes in their order, so labels shift: '
                f'set {mode}_dataloader.dataset.metainfo.classes to {tuple(listed.values())}'
            )


def _check_files(mode: str, dataset: BaseDataset) -> Iterator[str]:
    @cache
    def list_files(folder: str) -> set[str]:  # much faster than to ask for each file
        entries = os.scandir(folder) if os.path.isdir(folder) else ()
        return {entry.name for entry in entries if entry.is_file()}

    missing = []
    for index in range(len(dataset)):
        info = dataset.get_data_info(index)
        for path in (info.get('img_path'), info.get('seg_map_path')):
            if isinstance(path, str) and '://' not in path:
                folder, name = os.path.split(path)
                if name not in list_files(folder or '.'):
                    missing.append(path)
                elif path == info.get('seg_map_path') and name.endswith('.png'):
                    yield from _check_label_map(path)
    if missing:
        yield (
            f'{len(missing)} files of the {mode} dataset do not exist, the first is {missing[0]!r}:'
            f' put them there, or set {mode}_dataloader.dataset.data_root'
        )


def _check_label_map(path: str) -> Iterator[str]:
    """Find what Pillow reads as other labels: damage, and grey values of 2, 4 or 16 bits."""
    try:
        with Image.open(path) as labels:
            stored = str(labels.tile[0][3])  # such as 'L;4'
            labels.verify()  # checksums, which decoding does not compare
    except Exception as error:  # a different one for each kind of damage
        yield f'the label map {path!r} is damaged ({error}): get it anew'
        return
    large = stored.startswith('I') and np.asarray(Image.open(path)).max() > 255
    if large or stored in ('L;2', 'L;4'):
        yield f'the label map {path!r} is not read as stored: store labels in 8 bits a pixel'
