"""Data that is missing or does not fit the model is found before training, and named."""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmengine.dataset import BaseDataset
from mmengine.dist import is_main_process, master_only
from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.registry import DATASETS
from mmengine.registry import HOOKS as MMENGINE_HOOKS
from mmengine.runner import Runner
from torch import nn
from torch.utils.data import DataLoader

from mmcare.datasets import CheckLabels, check_coco_file, check_png
from mmcare.engine.training_state import check_training_state
from mmcare.registry import HOOKS

WRAPPED = ('dataset', 'datasets')  # what dataset wrappers call the datasets inside


@HOOKS.register_module()
@MMENGINE_HOOKS.register_module()
class DataCheckHook(Hook):
    """Check annotation files, images and class numbers before any work is done.

    Before datasets are built (with ``runner_type='mmcare.CheckingRunner'``): annotation files and
    folders exist, annotations in COCO's format are what mmdet takes them for
    (:func:`mmcare.datasets.check_coco_file`), and the evaluator reads the annotations of the data
    it evaluates. Before the first iteration: no split is empty, every image and every label map is
    on disk, the checksums of label maps are right (:func:`mmcare.datasets.check_png`), and no
    category is beyond the model's ``num_classes``, which would end in an IndexError much later.
    Where folders are the classes (mmpretrain's), none is empty and all splits have the same:
    labels are numbers of folders in alphabetical order. Only local paths are checked. A checkpoint
    that a run resumes from must hold all that it needs
    (:func:`mmcare.engine.training_state.check_training_state`).

    Args:
        enabled: False switches the checks off:
            ``--cfg-options default_hooks.data_check.enabled=False``.

    Raises:
        FileNotFoundError: If a file or folder is missing; the message names it, the argument it
            comes from and what to set.
        ValueError: If a split is empty, categories and model do not fit, or a file of annotations
            is damaged or malformed.
        CheckpointError: If a checkpoint to resume from is incomplete.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled

    def before_build(self, runner: Runner, modes: Sequence[str]) -> None:
        """Check the paths in the configuration of the dataloaders."""
        if not self.enabled:
            return
        for mode in modes:
            loader = getattr(runner, f'_{mode}_dataloader')
            if isinstance(loader, Mapping):
                name = f'{mode}_dataloader.dataset'
                for argument, dataset in _leaf_configs(name, loader['dataset']):
                    _check_paths(argument, dataset)
                    if is_main_process():
                        _check_annotations(dataset)
                if mode != 'train':
                    _check_evaluator(mode, loader['dataset'], getattr(runner, f'_{mode}_evaluator'))

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Check what the run is to resume from, if it resumes."""
        if self.enabled and runner._resume:
            check_training_state(checkpoint, runner.param_schedulers)

    @master_only
    def before_run(self, runner: Runner) -> None:
        """Check the datasets that were built."""
        if not self.enabled:
            return
        class_folders = {}
        for mode in ('train', 'val', 'test'):
            loop = getattr(runner, f'_{mode}_loop')
            loader = getattr(loop, 'dataloader', None)
            if isinstance(loader, DataLoader):
                for dataset in _leaf_datasets(loader.dataset):
                    argument = f'{mode}_dataloader.dataset'
                    _check_dataset(argument, dataset, runner.model)
                    if getattr(dataset, 'folder_to_idx', None):
                        class_folders[argument] = dataset
        _check_equal_folders(class_folders)


def _leaf_configs(argument: str, dataset: Any) -> Iterator[tuple[str, Mapping]]:
    """Datasets inside wrappers, with the name of the argument each comes from."""
    if isinstance(dataset, Sequence) and not isinstance(dataset, str):
        for index, inner in enumerate(dataset):
            yield from _leaf_configs(f'{argument}.{index}', inner)
    elif isinstance(dataset, Mapping):
        wrapped = [key for key in WRAPPED if key in dataset]
        if not wrapped:
            yield argument, dataset
        for key in wrapped:
            yield from _leaf_configs(f'{argument}.{key}', dataset[key])


def _leaf_datasets(dataset: Any) -> Iterator[BaseDataset]:
    if isinstance(dataset, BaseDataset):
        yield dataset
    for key in WRAPPED:
        inner = getattr(dataset, key, None)
        for part in inner if isinstance(inner, list | tuple) else [inner]:
            if part is not None:
                yield from _leaf_datasets(part)


def _local_path(dataset: Mapping, path: str) -> Path | None:
    """Where mmengine will look for a file of a dataset; None if that is no local path."""
    joined = os.path.join(dataset.get('data_root') or '', path)
    return None if '://' in joined else Path(joined)


def _is_local(dataset: Mapping) -> bool:
    return (dataset.get('backend_args') or {}).get('backend', 'local') == 'local'


def _check_annotations(dataset: Mapping) -> None:
    """Check the content of an annotation file that mmdet's CocoDataset will read."""
    dataset_class = _find_coco_class(dataset.get('type'))
    ann_file = dataset.get('ann_file')
    if dataset_class is None or not _is_local(dataset) or not isinstance(ann_file, str):
        return
    path = _local_path(dataset, ann_file)
    if path is None or not path.is_file():
        return
    metainfo = dataset.get('metainfo') or {}
    classes = metainfo.get('classes', dataset_class.METAINFO.get('classes'))
    if isinstance(classes, str):  # the name of a file that lists them
        classes = None
    print_log(f'checking {path}', logger='current')
    for line in check_coco_file(
        path,
        classes,
        with_masks=any(step.get('with_mask') for step in dataset.get('pipeline') or []),
        test_mode=dataset.get('test_mode', False),
    ):
        print_log(line, logger='current', level=logging.WARNING)


def _find_coco_class(dataset_type: Any) -> Any:
    """The class of a dataset if it reads its file as mmdet's CocoDataset does, or None."""
    found = dataset_type
    if isinstance(dataset_type, str):
        with DATASETS.switch_scope_and_registry(None) as registry:  # as building it will do
            found = registry.get(dataset_type)
    for base in getattr(found, '__mro__', ()):
        if base.__name__ == 'CocoDataset' and base.__module__.startswith('mmdet.'):
            same = all(
                getattr(found, name) is getattr(base, name)
                for name in ('load_data_list', 'parse_data_info')
            )
            return found if same else None
    return None


def _check_paths(argument: str, dataset: Mapping) -> None:
    wanted = {}
    if not _is_local(dataset):
        return
    if isinstance(dataset.get('ann_file'), str) and dataset['ann_file']:
        wanted['ann_file'] = dataset['ann_file']
    prefixes = dataset.get('data_prefix') or {}
    if isinstance(prefixes, str):  # mmpretrain takes the one folder of images so
        wanted['data_prefix'] = prefixes
    else:
        wanted.update({f'data_prefix.{key}': value for key, value in prefixes.items() if value})
    for key, value in wanted.items():
        path = _local_path(dataset, value)
        if path is None:
            continue
        if not (path.is_file() if key == 'ann_file' else path.is_dir()):
            kind = 'file' if key == 'ann_file' else 'folder'
            raise FileNotFoundError(
                f'{argument}.{key}={value!r} with data_root={dataset.get("data_root")!r} names the '
                f'{kind} {str(path)!r}, which does not exist (seen from {os.getcwd()!r}). Put the '
                f'data there, or say where it is: --cfg-options {argument}.data_root=DIR/ (for '
                'every dataloader, and for detection the evaluator: val_evaluator.ann_file=FILE '
                'test_evaluator.ann_file=FILE).'
            )


def _check_evaluator(mode: str, dataset: Mapping, evaluator: Any) -> None:
    """An evaluator with a stale annotation file would compare with other images' objects."""
    metrics = evaluator if isinstance(evaluator, list | tuple) else [evaluator]
    for metric in metrics:
        if not isinstance(metric, Mapping) or not metric.get('ann_file'):
            continue
        if not isinstance(dataset, Mapping) or not dataset.get('ann_file'):
            continue
        evaluated = _local_path(dataset, dataset['ann_file'])
        compared = _local_path({}, metric['ann_file'])
        if evaluated and compared and evaluated.resolve() != compared.resolve():
            raise ValueError(
                f'{mode}_evaluator.ann_file={metric["ann_file"]!r} is not the annotation file of '
                f'{mode}_dataloader, {str(evaluated)!r}; set both: --cfg-options '
                f'{mode}_evaluator.ann_file={evaluated}'
            )


def _check_dataset(argument: str, dataset: BaseDataset, model: nn.Module) -> None:
    if len(dataset) == 0:
        raise ValueError(
            f'{argument} ({type(dataset).__name__}, data_root={dataset.data_root!r}) '
            'has no images: the annotation file lists none, or the filter leaves none'
        )
    classes = dataset.metainfo.get('classes')
    modules = dict(model.named_modules())
    panoptic = any(hasattr(module, 'num_stuff_classes') for module in modules.values())
    for name, module in modules.items():
        num_classes = getattr(module, 'num_classes', None)
        if panoptic or not name or name.startswith('backbone') or 'rpn' in name:
            # A segmentor as a whole repeats its head's number, a backbone may keep its classifier,
            # proposals are class-agnostic, and panoptic detectors share the classes out.
            continue
        if hasattr(module, 'boundary_threshold'):  # STDC's head for borders: two classes
            continue
        if classes and isinstance(num_classes, int) and num_classes < len(classes):
            raise ValueError(
                f'{argument} has {len(classes)} categories, but {name} has '
                f'num_classes={num_classes}; set num_classes to {len(classes)}, or '
                f'the metainfo of the dataset to the {num_classes} classes meant'
            )
    for transform in dataset.pipeline.transforms:
        if (
            isinstance(transform, CheckLabels)
            and classes
            and transform.enabled
            and transform.num_classes != len(classes)
        ):
            raise ValueError(
                f'{argument} has {len(classes)} categories, but CheckLabels in its pipeline has '
                f'num_classes={transform.num_classes}; set that to {len(classes)}'
            )
    if getattr(dataset, 'folder_to_idx', None):
        _check_class_folders(argument, dataset)
        return  # its files were found by looking into the folders
    print_log(
        f'{argument}: looking for the files of {len(dataset)} entries '
        '(default_hooks.data_check.enabled=False switches this off)',
        logger='current',
    )
    listed = f' in {dataset.ann_file!r}' if getattr(dataset, 'ann_file', '') else ''
    for index in range(len(dataset)):
        info = dataset.get_data_info(index)
        for key in ('img_path', 'seg_map_path'):
            path = info.get(key)
            if not path or '://' in path:
                continue
            if not os.path.isfile(path):
                raise FileNotFoundError(
                    f'{argument}: {key} {path!r} (entry {index} of {len(dataset)}{listed}) does '
                    'not exist'
                )
            if key == 'seg_map_path' and path.endswith('.png'):
                check_png(path)


def _check_class_folders(argument: str, dataset: BaseDataset) -> None:
    """A class without images is never learnt, or never asked for; mmpretrain logs it at most."""
    if getattr(dataset, '_indices', None) is not None:
        return  # a part of the data was asked for
    labels = {dataset.get_data_info(index)['gt_label'] for index in range(len(dataset))}
    empty = [name for name, label in dataset.folder_to_idx.items() if label not in labels]
    if empty:
        paths = [os.path.join(dataset.img_prefix, name) for name in empty]
        more = f' and {len(paths) - 3} more' if len(paths) > 3 else ''
        raise ValueError(
            f'{argument}: the class folder {", ".join(map(repr, paths[:3]))}{more} holds no image '
            f'(of {", ".join(sorted(dataset.extensions))}); put images there, or remove the folder '
            'in every split and set num_classes to the number of folders'
        )


def _check_equal_folders(datasets: Mapping[str, BaseDataset]) -> None:
    """Labels are numbers of folders: one missing in a split would shift those behind it."""
    arguments = list(datasets)
    for argument in arguments[1:]:
        first, other = datasets[arguments[0]], datasets[argument]
        names = set(first.folder_to_idx) ^ set(other.folder_to_idx)
        if names:
            raise ValueError(
                f'{arguments[0]} ({first.img_prefix!r}) and {argument} ({other.img_prefix!r}) do '
                f'not have the same class folders: {", ".join(sorted(names)[:3])} is in one of '
                'them only, so equal labels would mean different classes'
            )
