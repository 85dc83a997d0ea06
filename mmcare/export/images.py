"""Draw images, or read pictures as pixels, to check files on and to quantize with."""

import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from mmengine.registry import DATASETS
from torch import Tensor

from mmcare.export.errors import Argument, RequestError
from mmcare.export.loading import LoadedModel, Normalization
from mmcare.export.pipelines import (
    describe_loader,
    describe_resizing,
    describe_sliding,
    fit_config,
    inner_datasets,
    is_slid,
)
from mmcare_runtime.prepare import (
    PICTURES,
    check_pixels,
    list_files,
    prepare,
    read_picture,
    resize_as_mmcv,
)

PICTURE_MEAN, PICTURE_STD = 116.0, 57.0  # of pictures of 8 bits, as in ImageNet
LOOKED_AT = 8  # pictures that are looked at if the config does not say their bits and values
HELD_OUT = 2  # pictures to check files on; calibration does not use them
Pictures = str | os.PathLike | Sequence[Tensor] | None  # a folder, or pixels (1, C, H, W)


@dataclass(frozen=True)
class CheckImage:
    """An image to compare a file with PyTorch on."""

    pixels: Tensor  # (1, C, H, W); where mean and std are unknown, the network's input
    enforced: bool = True  # differences on this image are errors; if False, they are only reported
    is_picture: bool = False  # from a data set or a folder, not drawn

    @property
    def fits_bytes(self) -> bool:
        """Whether all pixels are whole numbers from 0 to 255."""
        return torch.equal(self.pixels, self.pixels.byte().float())


@dataclass(frozen=True)
class Images:
    """All images of an export, the same for every format."""

    checked: Mapping[str, CheckImage]
    loader: Mapping[str, Any]  # of the description: how pictures are read
    calibration: Sequence[Tensor] = ()  # pixels (1, C, H, W)
    why_no_pictures: str = ''


def draw_images(
    channels: int,
    shape: tuple[int, int],
    normalization: Normalization | None = None,
    bits: int | None = 8,
) -> dict[str, CheckImage]:
    """Draw images: random ones, one as smooth as pictures, and extremes.

    With a normalization, they are pixels: whole numbers of 8 or 16 bits, except in the last image.
    Their spread is the normalization's, or that of pictures where it divides by 1, as Caffe's do.
    """
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1, channels, *shape, generator=generator)
    coarse = torch.randn(1, channels, 8, 8, generator=generator)
    smooth = F.interpolate(coarse, shape, mode='bilinear') + 0.02 * noise
    drawn = dict(random=noise, smooth=smooth, zeros=0 * noise, black_and_white=2.5 * noise.sign())
    hundredfold = 100 * noise
    if normalization is not None:
        if bits == 8 and {*normalization.std} == {1.0}:
            mean, std = (PICTURE_MEAN,) * channels, (PICTURE_STD,) * channels
            normalization = replace(normalization, mean=mean, std=std)
        drawn = {name: normalization.to_pixels(image) for name, image in drawn.items()}
        if bits in (8, 16):
            drawn = {name: x.round().clamp(0, 2**bits - 1) for name, x in drawn.items()}
        hundredfold = normalization.to_pixels(hundredfold)
    enforced = {'random', 'smooth'}
    images = {name: CheckImage(image, name in enforced) for name, image in drawn.items()}
    return images | dict(hundredfold=CheckImage(hundredfold, enforced=False))


def load_images(
    model: LoadedModel,
    shape: tuple[int, int],
    number: int,
    pictures: Pictures,
    letterbox: str,
) -> Images:
    """Draw images, and read ``HELD_OUT`` pictures to check on and ``number`` to calibrate with.

    Raises:
        ValueError: If there are no pictures where they are needed or asked for.
    """
    loader = 'train_dataloader' if number else 'test_dataloader'
    folder = pictures if isinstance(pictures, str | os.PathLike) else None
    read = look_at_pictures(model, loader, folder)
    channels = model.task.info.in_channels
    checked = draw_images(channels, shape, model.normalization, read['bits'])
    try:
        if pictures is None or isinstance(pictures, str | os.PathLike):
            pictures = read_images(
                model, shape, HELD_OUT + number, pictures, loader, letterbox, read
            )
        if number and len(pictures) <= HELD_OUT:
            raise ValueError(f'{len(pictures)} are too few, {HELD_OUT} are held out')
    except Exception as error:  # a data set of a toolbox without its data raises anything
        reason = ' '.join(f'{type(error).__name__}: {error}'.split())
        if number or pictures is not None:
            raise RequestError(
                f'no pictures can be read: {reason}; give a config with training data, or a folder '
                'of pictures with ',
                Argument('images'),
            ) from error
        return Images(checked, read, (), reason)
    for index, pixels in enumerate(pictures[-HELD_OUT:], 1):
        checked[f'picture{index}'] = CheckImage(pixels, is_picture=True)
    return Images(checked, read, pictures[:-HELD_OUT][:number])


def look_at_pictures(
    model: LoadedModel, loader: str, folder: str | os.PathLike | None
) -> dict[str, Any]:
    """Describe how pictures are read. If their bits depend on the files, look at some of them.

    Returns:
        See :func:`mmcare.export.pipelines.describe_loader`. ``range`` has the least and the
        largest value of the pictures that were looked at.
    """
    described = describe_loader(model.config)
    if described['bits']:
        return described
    try:
        if folder is None:
            data = _load_data(model, (32, 32), loader)
            paths = [data.get_data_info(i)['img_path'] for i in range(len(data))]
        else:
            paths = list_files(Path(folder), PICTURES)
        channels = model.task.info.in_channels
        some = paths[:: -(-len(paths) // LOOKED_AT) or 1]
        pictures = [read_picture(path, channels, described) for path in some]
        bits = {8 * pixels.dtype.itemsize for pixels in pictures}
    except Exception:  # a data set of a toolbox without its data raises anything
        return described
    if bits in ({8}, {16}, {32}):
        low = min(pixels.min().item() for pixels in pictures)
        high = max(pixels.max().item() for pixels in pictures)
        described.update(bits=bits.pop(), range=[low, high])
    return described


def read_images(
    model: LoadedModel,
    shape: tuple[int, int],
    number: int,
    folder: str | os.PathLike | None = None,
    loader: str = 'train_dataloader',
    letterbox: str = 'top-left',
    described_loader: Mapping[str, Any] | None = None,
) -> list[Tensor]:
    """Read pictures, evenly spread over the data, as pixels (1, C, H, W).

    Args:
        model: Its config describes the data, unless there is a folder.
        shape: Height and width. Pictures are resized as the test pipeline does, and padded. If
            the pipeline tests windows, the middle window is taken.
        number: The largest number of pictures.
        folder: Searched recursively. None: the config's data, through its test pipeline.
        loader: ``'train_dataloader'`` or ``'test_dataloader'``, whose data are read.
        letterbox: See :func:`mmcare.export.pipelines.pad_to`.
        described_loader: See :func:`look_at_pictures`; None: the config's.
    """
    if model.normalization is None:
        raise ValueError('the config has no mean and std of images')
    data: Any
    config = model.config
    slides = config is not None and is_slid(config)
    if folder is None:
        data, resize = _load_data(model, shape, loader), None  # the pipeline has resized them
    else:
        data = list_files(Path(folder), PICTURES)
        resize = None if slides else describe_resizing(config, shape)
    read = described_loader or describe_loader(model.config)
    dtype = 'uint8' if read['bits'] == 8 else 'float32'
    described = model.normalization.describe('image', dtype)
    described |= dict(resize=resize, letterbox=letterbox, loader=read)
    channels = model.task.info.in_channels
    images = []
    for index in np.linspace(0, len(data) - 1, min(number, len(data))).round().astype(int):
        if folder is None:
            pixels = data[index]['inputs'].permute(1, 2, 0).numpy()
        else:
            pixels = read_picture(data[index], channels, read)
            pixels = check_pixels(pixels, channels, read['bits'])
            if config is not None and slides:
                pixels = resize_as_mmcv(pixels, describe_sliding(config))
        if slides:
            top, left = (max(a - b, 0) // 2 for a, b in zip(pixels.shape, shape, strict=False))
            pixels = pixels[top : top + shape[0], left : left + shape[1]]
        if pixels.shape[2] != channels:
            raise ValueError(f'pictures have {pixels.shape[2]} channels, unlike the network')
        image, _ = prepare(pixels, described, shape)
        images.append(torch.from_numpy(image).float())
    if not images:
        raise ValueError(f'{folder or f"the data set of {loader}"} holds no pictures')
    return images


def _load_data(model: LoadedModel, shape: tuple[int, int], loader: str) -> Any:
    """Build a data set with the test pipeline, fitted to height and width."""
    config = deepcopy(model.config)
    if config is None or not config.get(loader) or not config.get('test_dataloader'):
        raise ValueError(f'{model.name} has no {loader}')
    fit_config(config, shape, 'slide' if is_slid(config) else 'whole')
    dataset = inner_datasets(config[loader].dataset)[0]
    dataset.pipeline = inner_datasets(config.test_dataloader.dataset)[0].pipeline
    return DATASETS.build({**dataset, '_scope_': config.get('default_scope')})
