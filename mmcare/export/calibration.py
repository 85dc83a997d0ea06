"""Pictures of a data set or a folder, to quantize with and to check files on."""

import os
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
from mmengine.registry import DATASETS
from mmengine.utils import scandir
from torch import Tensor

from mmcare.export.decoding import innermost_dataset
from mmcare.export.prediction import prepare, read_pixels
from mmcare.export.preprocessing import describe_resizing, fit_config
from mmcare.export.source import Source
from mmcare.export.spec import CheckImage, ExportSpec

HELD_OUT = 2  # pictures to check files on, which are not calibrated with
SUFFIXES = ('.bmp', '.jpeg', '.jpg', '.png', '.webp')
Images = str | os.PathLike | Sequence[Tensor] | None  # a folder, or normalized images (1, C, H, W)


def add_images(
    spec: ExportSpec, source: Source, number: int, images: Images
) -> tuple[ExportSpec, str]:
    """Add ``number`` pictures to calibrate with, ``HELD_OUT`` pictures to check on, and resizing.

    Also return why there are no pictures. Where they are needed or asked for, raise a ValueError.
    """
    shape, reason = spec.input_shape[2:], ''
    loader = 'train_dataloader' if number else 'test_dataloader'
    try:
        if images is None or isinstance(images, str | os.PathLike):
            total = HELD_OUT + number
            images = read_images(source, shape, total, images, loader, spec.letterbox)
        if number and len(images) <= HELD_OUT:
            raise ValueError(f'{len(images)} are too few, {HELD_OUT} are held out')
    except Exception as error:  # a data set of a toolbox without its data raises anything
        reason = ' '.join(f'{type(error).__name__}: {error}'.split())
        if number or images is not None:
            raise ValueError(
                f'no pictures can be read: {reason}; give a config with training data, or a folder '
                'of pictures with --images'
            ) from error
        images = []
    checked, calibration = dict(spec.images), images[:-HELD_OUT][:number]
    for index, image in enumerate(images[-HELD_OUT:], 1):
        checked[f'picture{index}'] = CheckImage(image, is_picture=True)
    resize = describe_resizing(source.config, shape)
    return replace(spec, images=checked, calibration=calibration, resize=resize), reason


def read_images(
    source: Source,
    shape: tuple[int, int],
    number: int,
    folder: str | os.PathLike | None = None,
    loader: str = 'train_dataloader',
    letterbox: str = 'top-left',
) -> list[Tensor]:
    """Read pictures, evenly spread over the data, as normalized images (1, C, H, W).

    Args:
        source: Its config describes the data, unless there is a folder.
        shape: Height and width. Pictures are resized as the test pipeline does, and padded.
        number: The largest number of pictures.
        folder: Searched recursively. None: the config's data, through its test pipeline.
        loader: ``'train_dataloader'`` or ``'test_dataloader'``, whose data are read.
        letterbox: See :func:`mmcare.export.preprocessing.pad_to`.
    """
    normalization = source.normalization
    if normalization is None:
        raise ValueError('the config has no mean and std of images')
    data: Any
    if folder is None:
        data, resize = _load_data(source, shape, loader), None  # the pipeline has resized them
    else:
        data = sorted(scandir(folder, SUFFIXES, recursive=True, case_sensitive=False))
        resize = describe_resizing(source.config, shape)
    taken = dict(normalization.describe('tensor'), resize=resize, letterbox=letterbox)
    images = []
    for index in np.linspace(0, len(data) - 1, min(number, len(data))).round().astype(int):
        if folder is None:
            pixels = data[index]['inputs'].permute(1, 2, 0).numpy()
        else:
            pixels = read_pixels(os.path.join(folder, data[index]))
        if pixels.shape[2] != source.network.info.in_channels:
            raise ValueError(f'pictures have {pixels.shape[2]} channels, unlike the network')
        images.append(prepare(pixels, taken, shape)[0].contiguous())
    if not images:
        raise ValueError(f'{folder or f"the data set of {loader}"} holds no pictures')
    return images


def _load_data(source: Source, shape: tuple[int, int], loader: str) -> Any:
    """Build a data set with the test pipeline, fitted to height and width."""
    config = deepcopy(source.config)
    if config is None or not config.get(loader) or not config.get('test_dataloader'):
        raise ValueError(f'{source.name} has no {loader}')
    fit_config(config, shape)
    dataset = innermost_dataset(config[loader].dataset)
    dataset.pipeline = config.test_dataloader.dataset.pipeline
    return DATASETS.build({**dataset, '_scope_': config.get('default_scope')})
