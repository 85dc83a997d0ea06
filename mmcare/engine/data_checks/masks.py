"""Checks of masks that have a class for each pixel, as mmseg reads them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from mmengine.dataset import BaseDataset
from PIL import Image
from torch import nn

from mmcare.engine.data_checks.findings import NUMBER, Picture, Run, Split, Stop, Warn, sample
from mmcare.engine.data_checks.headers import Header
from mmcare.engine.data_checks.pictures import TURN

EXACT = ('L', 'P', 'P;1', 'P;2', 'P;4')  # Pillow's raw modes that are read as stored


def check_mask_files(run: Run) -> Iterator[Stop | Warn]:
    """Find masks that are damaged, of another size, or misread: one finding for each kind."""
    for split in run.splits:
        faults: dict[str, list[str]] = defaultdict(list)
        # mmseg's loaders of .npy and of medical volumes have no with_seg.
        loads = any(getattr(step, 'with_seg', False) for step in split.steps.values())
        pictures = [p for p in sample(split.pictures, NUMBER) if p.mask] if loads else []
        for picture in pictures:
            for kind, text in _look_at(picture, split):
                faults[kind].append(text)
        advice = dict(
            damaged='Get them again',
            form='Store one channel of 8 bits a pixel, with the numbers of classes',
            size='Resize them with nearest neighbours, or scaling makes values that mean nothing',
            turned=TURN,
            lossy='JPEG changes values at borders: write PNG',
        )
        for kind, texts in faults.items():
            finding = Warn if kind == 'lossy' else Stop
            number = f'{len(texts)} of {len(pictures)} masks of the {split.mode} dataset'
            yield finding(f'{number}: {texts[0]}. {advice[kind]}')


def check_palettes(run: Run) -> Iterator[Warn]:
    """Find palettes that differ between masks: one colour is then several classes."""
    for split in run.splits:
        first: dict[int, tuple[tuple[int, ...], str]] = {}
        for picture in sample(split.pictures, 200) if split.of_pixels else ():
            for index, colour in _read_palette(picture.mask).items():
                known, path = first.setdefault(index, (colour, str(picture.mask)))
                if known != colour:
                    yield Warn(
                        f'the palettes of {path!r} and {picture.mask!r} differ: {index} is '
                        f'{known} and {colour}. Numbers, not colours, are the classes'
                    )
                    break
            else:
                continue
            break


def check_mask_values(run: Run) -> Iterator[Stop]:
    """Find masks with a single class, such as 0 and 255 (ignored): mIoU would be 100."""
    splits = [split for split in run.of_mode('train') if split.of_pixels]
    ignored = ignored_labels([split.dataset for split in splits], run.model)
    values: set[int] = set()
    path = None
    for split in splits:
        for picture in split.pictures:
            path, labels = picture.mask, _read_labels(split, picture)
            values.update(labels)
            if len(split.classes) == 1 and values - ignored - {0}:
                yield Stop(
                    f'the masks, such as {path!r}, have the labels {sorted(values)}, and there is '
                    f'one class: name the background also, {["background", *split.classes]}, and '
                    'set num_classes=2; for one channel of output, also out_channels=1 and '
                    'use_sigmoid=True in the loss'
                )
                return
            if len(values - ignored) > 1:
                return
    if values:
        read = f'values are read as {sorted(values)}, and {ignored} are ignored'
        yield Stop(
            f'the labels in maps such as {path!r} are of one class ({read}): write 0, 1, ...'
        )


def check_ignored_labels(run: Run) -> Iterator[Stop | Warn]:
    """Find heads, losses, padding and metrics that do not ignore the same label."""
    splits = [split for split in run.splits if split.of_pixels and split.classes]
    if not splits:
        return
    settings: dict[str, int] = {}
    for name, module in _modules_of_labels(run.model):
        for key in ('ignore_index', 'ignore_label', 'seg_pad_val'):
            value = getattr(module, key, None)
            # The decoders of masks have their own losses, over queries.
            if isinstance(value, int) and value >= 0:
                settings[f'model.{name}.{key}'.replace('..', '.')] = value
    for split in splits:
        for step in split.dataset.pipeline.transforms if split.mode == 'train' else ():
            if isinstance(getattr(step, 'seg_pad_val', None), int):
                settings[f'{type(step).__name__}.seg_pad_val'] = step.seg_pad_val
        for metric in split.metrics:
            if isinstance(getattr(metric, 'ignore_index', None), int):
                settings[f'{split.mode}_evaluator.ignore_index'] = metric.ignore_index
    text = ', '.join(f'{name}={value}' for name, value in settings.items())
    # Padding may be meant to be the background, which reduce_zero_label takes out of the classes.
    reduced = any(split.dataset.metainfo['reduce_zero_label'] for split in splits)
    certain = {v for k, v in settings.items() if reduced or v or not k.endswith('seg_pad_val')}
    if len(certain) > 1:
        yield Stop(f'labels that are ignored differ: {text}. Set all to the same value')
    elif len({*settings.values()}) > 1:
        yield Warn(f'padding is not ignored, but trained as class 0: {text}')


def check_label_values(model: nn.Module, dataset: Any, samples: list[Any]) -> Iterator[Stop]:
    """Find labels in mmseg's maps (1, H, W) that no class has."""
    metainfo = dataset.metainfo
    last, shift = len(metainfo['classes']) - 1, int(metainfo['reduce_zero_label'])
    for item in samples:
        labels = item.gt_sem_seg.data if 'gt_sem_seg' in item else torch.zeros(1)
        beyond = set(labels[labels > last].tolist())
        if beyond and (beyond := beyond - ignored_labels(unwrap(dataset), model)):
            yield Stop(
                f'the label map {item.get("seg_map_path")!r} has the label '
                f'{max(beyond) + shift}, the last class has {last + shift}'
            )


def check_class_weights(model: nn.Module, dataset: Any, samples: list[Any]) -> Iterator[Stop]:
    """Find ignored labels where mmseg's cross entropy has class weights: the loss would fail."""
    size = getattr(getattr(model, 'data_preprocessor', None), 'size', None)
    for name, loss in model.named_modules():
        weights = getattr(loss, 'class_weight', None)
        other = getattr(loss, 'use_sigmoid', False) or getattr(loss, 'use_mask', False)
        other = other or getattr(loss, 'reduction', 'mean') != 'mean'
        kind = type(loss)  # mmdet's, which query-based heads have, never sees ignored pixels
        mmseg = kind.__name__ == 'CrossEntropyLoss' and kind.__module__.startswith('mmseg.')
        if weights is None or not mmseg or other:
            continue
        for item in samples:
            labels = item.gt_sem_seg.data if 'gt_sem_seg' in item else torch.zeros(1)
            pads = size is not None and tuple(labels.shape[-2:]) != tuple(size)
            if pads or bool((labels >= len(weights)).any()):
                yield Stop(
                    f'model.{name}.class_weight fails in mmseg where pixels are ignored, as in '
                    f'{item.get("seg_map_path")!r}{" once it is padded" if pads else ""}: leave '
                    'class_weight out, or take a loss that leaves out ignored pixels, such as '
                    "dict(type='LovaszLoss', reduction='none')"
                    f'{", or pad in the pipeline: see your_data/segmentor.py" if pads else ""}'
                )
                return


def unwrap(dataset: Any) -> list[BaseDataset]:
    """Return the datasets within wrappers."""
    if isinstance(dataset, BaseDataset):
        return [dataset]
    inner = getattr(dataset, 'datasets', None) or filter(None, [getattr(dataset, 'dataset', None)])
    return [part for wrapped in inner for part in unwrap(wrapped)]


def ignored_labels(datasets: list[BaseDataset], model: nn.Module) -> set[int]:
    """Return the labels that datasets, heads or losses ignore."""
    parts = [*datasets, *(module for _, module in _modules_of_labels(model))]
    return {part.ignore_index for part in parts if hasattr(part, 'ignore_index')}


def _modules_of_labels(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules by name, without DiceLoss: its ``ignore_index`` is a class that it leaves out.

    The background often is such a class, if other classes are rare.
    """
    for name, module in model.named_modules():
        if type(module).__name__ != 'DiceLoss':
            yield name, module


def _look_at(picture: Picture, split: Split) -> Iterator[tuple[str, str]]:
    path = str(picture.mask)
    try:
        with Image.open(path) as labels:
            mode, size, kind = labels.mode, labels.size, labels.format
            stored = str(labels.tile[0][3]) if kind == 'PNG' else mode
            labels.verify()  # checksums, which decoding does not compare
    except FileNotFoundError:
        return  # another check says so
    except Exception as error:  # a different one for each kind of damage
        decoder = getattr(split.steps.get('LoadAnnotations'), 'imdecode_backend', 'pillow')
        is_large = isinstance(error, Image.DecompressionBombError) and decoder != 'pillow'
        if decoder != 'tifffile' and not is_large:
            yield 'damaged', f'{path!r} is damaged or of an unknown format ({error})'
        return
    header = split.headers.get(picture.path or '')
    if isinstance(header, Header) and size != (loaded := split.loaded_size(header)):
        swapped = size == loaded[::-1] and header.turn > 4
        text = f'{path!r} is for {size} pixels, and {picture.path!r} is loaded as {loaded}'
        yield ('turned' if swapped else 'size'), text
    if not split.of_pixels:
        return
    if not (
        stored in EXACT
        or (stored == '1' and len(split.classes) <= 2)
        or (stored[0] in 'FI' and _fits_in_bytes(Image.open(path)))
    ):
        yield 'form', f'{path!r} is not read as stored ({stored})'
    elif kind == 'JPEG':
        values = len(np.unique(np.asarray(Image.open(path))))
        if values > len(split.classes) + 1:
            yield 'lossy', f'{path!r} has {values} values for {len(split.classes)} classes'


def _fits_in_bytes(labels: Image.Image) -> bool:
    """Return whether mmseg's conversion to 8 bits keeps all values."""
    values = np.asarray(labels)
    if values.dtype.kind == 'i':
        values = np.where(values == -1, 255, values)  # as the conversion does
    return bool((values == values.astype(np.uint8)).all())


def _read_palette(path: str | None) -> dict[int, tuple[int, ...]]:
    try:
        with Image.open(str(path)) as image:
            if image.mode != 'P':
                return {}
            colours = np.reshape(image.getpalette() or (), (-1, 3)).tolist()
            used = np.unique(np.asarray(image)).tolist()
            return {index: tuple(colours[index]) for index in used if index < len(colours)}
    except Exception:  # another check says so
        return {}


def _read_labels(split: Split, picture: Picture) -> set[int]:
    info = dict(
        seg_map_path=picture.mask,
        reduce_zero_label=split.dataset.metainfo['reduce_zero_label'],
        label_map=getattr(split.dataset, 'label_map', None),
        seg_fields=[],
    )
    try:
        return set(np.unique(split.steps['LoadAnnotations'](info)['gt_seg_map']).tolist())
    except Exception:  # remote, or another check says so
        return set()
