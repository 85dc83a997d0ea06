"""Pictures from a config's data or a folder, and how they are prepared and what they show."""

import os
from copy import deepcopy
from typing import Any

import mmcv
import numpy as np
import torch
import torch.nn.functional as F
from mmengine.config import Config
from mmengine.registry import DATASETS
from mmengine.utils import scandir
from torch import Tensor

from mmcare.export.evaluation import ResizeToFit, fit_config
from mmcare.export.source import HEADS, Source

HELD_BACK = 2  # pictures to compare on, not to calibrate with
SUFFIXES = ('.bmp', '.jpeg', '.jpg', '.png', '.webp')


def read_pictures(
    source: Source,
    shape: tuple[int, int],
    number: int,
    folder: str | os.PathLike | None = None,
    loader: str = 'train_dataloader',
) -> list[Tensor]:
    """Read pictures (1, C, H, W), normalised, evenly spread over what there is.

    Args:
        source: Its config has the data, unless there is a folder.
        shape: Height and width. Pictures are resized to fit, the ratio kept, and padded.
        number: At most so many.
        folder: Searched recursively. None: the config's data, through its test pipeline.
        loader: Whose data, ``'train_dataloader'`` or ``'test_dataloader'``.
    """
    if source.normalization is None:
        raise ValueError('the config has no mean and std of images')
    mean, std = torch.tensor([source.normalization.mean, source.normalization.std])[..., None, None]
    if folder is None:
        data = _load_data(source, shape, loader)
    else:
        data = sorted(scandir(folder, SUFFIXES, recursive=True, case_sensitive=False))
    resize = ResizeToFit(scale=shape[::-1], keep_ratio=False)
    images = []
    for index in np.linspace(0, len(data) - 1, min(number, len(data))).round().astype(int):
        if folder is None:
            image = data[index]['inputs']
        else:
            pixels = mmcv.imread(os.path.join(folder, data[index]))
            if pixels is None:
                raise ValueError(f'{os.path.join(folder, data[index])} is not a picture')
            image = torch.from_numpy(resize({'img': pixels})['img']).permute(2, 0, 1)
        if len(image) != source.network.in_channels:
            raise ValueError(f'pictures have {len(image)} channels, unlike the network')
        image = image.flip(0) if source.normalization.channels == 'RGB' else image
        height, width = image.shape[1:]
        padding = 0, shape[1] - width, 0, shape[0] - height
        images.append(F.pad((image - mean) / std, padding)[None].contiguous())
    if not images:
        raise ValueError(f'{folder or f"the data set of {loader}"} holds no pictures')
    return images


def choose_pictures(
    source: Source, shape: tuple[int, int], calibration: int, folder: str | os.PathLike | None
) -> tuple[list[Tensor], str]:
    """Read pictures to calibrate with, and ``HELD_BACK`` more; return them, or why none are read.

    Where they are needed or asked for, raise a ValueError instead.
    """
    loader = 'train_dataloader' if calibration else 'test_dataloader'
    try:
        pictures = read_pictures(source, shape, HELD_BACK + calibration, folder, loader)
        if calibration and len(pictures) <= HELD_BACK:
            raise ValueError(f'{len(pictures)} are too few, {HELD_BACK} are held back')
        return pictures, ''
    except Exception as error:  # whatever a data set of others raises where it has no data
        reason = ' '.join(f'{type(error).__name__}: {error}'.split())
        if not calibration and folder is None:
            return [], reason
        raise ValueError(
            f'no pictures can be read: {reason}; give a config with training data, or a folder of '
            'pictures with --images'
        ) from error


def describe_resizing(config: Config | None, shape: tuple[int, int]) -> dict[str, Any] | None:
    """Describe how pictures get a height and width; None: the test pipeline leaves their size.

    Returns:
        mmcv's ``interpolation`` and ``backend``; ``shorter`` and ``crop``: resize the shorter side
        to so many pixels, then cut out the middle. Without these, resize to fit.
    """
    step: Any = {}
    steps: dict[str, Any] = {}
    if config is not None and config.get('test_dataloader'):
        steps = fit_config(deepcopy(config), shape)
        if not (step := steps.get('ResizeEdge') or steps.get('Resize')):
            return None
    return dict(
        keep_ratio=True,
        interpolation=step.get('interpolation', 'bilinear'),
        backend=step.get('backend', 'cv2'),
        shorter=step.scale if 'ResizeEdge' in steps else None,
        crop=[*shape] if 'ResizeEdge' in steps and 'CenterCrop' in steps else None,
    )


def describe_scores(source: Source, channels: int) -> dict[str, Any]:
    """Describe the scores of a whole model, whose first output has so many channels.

    Returns:
        ``activation``: ``'softmax'``, ``'sigmoid'``, or None if that is not known. ``classes`` and
        ``palette`` of the test data, if they are as many as the model tells apart.
    """
    config, model = source.config, source.network.model
    name, head = next((name, getattr(model, name)) for name in HEADS if hasattr(model, name))
    kinds = {base.__name__ for base in type(head).__mro__}
    of_detector = getattr(head, 'use_sigmoid_cls', None)
    sigmoid: Any = dict(
        head='MultiLabelClsHead' in kinds, decode_head=channels == 1, bbox_head=of_detector
    )[name]
    described: dict[str, Any] = dict(activation={True: 'sigmoid', False: 'softmax'}.get(sigmoid))
    if config is None or not config.get('test_dataloader'):
        return described
    dataset = _innermost(config.test_dataloader.dataset)
    kind: Any = dataset.type
    if isinstance(kind, str):
        with DATASETS.switch_scope_and_registry(config.get('default_scope')) as registry:
            kind = registry.get(kind)
    load = getattr(kind, '_load_metainfo', None)  # data sets of several have none
    known = load(deepcopy(dataset.get('metainfo'))) if load else {}
    return described | {
        name: [one if isinstance(one, str) else [*one] for one in known[name]]
        for name in ('classes', 'palette')
        if len(known.get(name) or ()) == head.num_classes
    }


def _innermost(dataset: Any) -> Any:
    """Return the config of the data set that another one repeats or balances."""
    while 'dataset' in dataset:
        dataset = dataset.dataset
    return dataset


def _load_data(source: Source, shape: tuple[int, int], loader: str) -> Any:
    """Build a data set with the test pipeline, fitted to a size."""
    config = deepcopy(source.config)
    if config is None or not config.get(loader) or not config.get('test_dataloader'):
        raise ValueError(f'{source.name} has no {loader}')
    fit_config(config, shape)
    dataset = _innermost(config[loader].dataset)
    dataset.pipeline = config.test_dataloader.dataset.pipeline
    return DATASETS.build({**dataset, '_scope_': config.get('default_scope')})
