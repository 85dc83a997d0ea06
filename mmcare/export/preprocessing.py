"""How a config prepares its test images, changed for files that take one height and width."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch.nn.functional as F
from mmcv.transforms import Resize
from mmengine.config import Config
from torch import Tensor

from mmcare.registry import TRANSFORMS, type_name

LETTERBOXES = ('top-left', 'center')  # where a picture is in an image


@TRANSFORMS.register_module()
class ResizeToFit(Resize):
    """Resize to the largest size within ``scale`` (width, height), the ratio kept.

    mmcv's ``Resize(keep_ratio=True)`` turns the given size by 90 degrees for upright images.
    """

    def _resize_img(self, results: dict[str, Any]) -> None:
        height, width = results['img'].shape[:2]
        ratio = min(self.scale[0] / width, self.scale[1] / height)
        results['scale'] = round(width * ratio), round(height * ratio)
        super()._resize_img(results)


def _inner_steps(step: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the steps within a step, such as a ``KeyMapper``, or the step itself."""
    return step.get('transforms') or [step]


def _name_steps(config: Config) -> dict[str, Any]:
    """Return the steps of the test pipeline by name."""
    dataset = (config.get('test_dataloader') or {}).get('dataset') or {}
    steps = [inner for step in dataset.get('pipeline') or () for inner in _inner_steps(step)]
    return {type_name(step['type']): step for step in steps}


def _remove_step(pipeline: list[dict[str, Any]], name: str) -> None:
    """Remove a step of this name, in place, with the step around it."""
    named = [s for s in pipeline if name in [type_name(inner['type']) for inner in _inner_steps(s)]]
    for step in named:
        pipeline.remove(step)


def fit_config(config: Config, shape: tuple[int, int]) -> dict[str, Any]:
    """Change a config, in place, so that it tests single images within a height and width.

    ``Resize`` and ``CenterCrop`` get this size. Before a ``CenterCrop``, the edge of
    ``ResizeEdge`` is scaled as the crop's longer side is. ``ResizeToMultiple`` and ``Pad`` go,
    since images are padded later, see :func:`pad_to`. Segmentors see the whole image.

    Returns:
        The steps of the test pipeline by name.
    """
    size = shape[1], shape[0]
    loader, model = config.test_dataloader, config.model
    loader.batch_size = 1
    steps = _name_steps(config)
    if 'Resize' in steps:
        steps['Resize'].update(type='mmcare.ResizeToFit', scale=size, keep_ratio=False)
    for name in {'ResizeToMultiple', 'Pad'} & {*steps}:
        _remove_step(loader.dataset.pipeline, name)
        steps.pop(name)
    if 'CenterCrop' in steps:
        factor = max(size) / np.max(steps['CenterCrop'].crop_size)
        steps['CenterCrop'].crop_size = size
        if 'ResizeEdge' in steps:
            steps['ResizeEdge'].scale = round(steps['ResizeEdge'].scale * factor)
    for preprocessor in (model.get('data_preprocessor'), config.get('data_preprocessor')):
        for padding in ('pad_size_divisor', 'test_cfg'):
            if preprocessor:
                preprocessor.pop(padding, None)
    if 'mode' in (model.get('test_cfg') or {}):
        model.test_cfg.mode = 'whole'
    return steps


def pad_to(
    images: Tensor, shape: Sequence[int], fill: Any, letterbox: str
) -> tuple[Tensor, tuple[int, int, int, int]]:
    """Pad images (..., C, h, w) to (..., C, H, W).

    Args:
        images: A ValueError is raised if they are larger than the shape.
        shape: Height and width.
        fill: Value of each channel, (C,), in the padding.
        letterbox: ``'top-left'``: padding is on the right and below; ``'center'``: on all sides.

    Returns:
        The images, and the widths of the padding: left, right, top, bottom.
    """
    size = tuple(images.shape[-2:])
    if size[0] > shape[0] or size[1] > shape[1]:
        raise ValueError(
            f'the test pipeline makes an image of {size[0]}x{size[1]}, the file takes '
            f'{shape[0]}x{shape[1]}: give the pipeline a Resize or a CenterCrop'
        )
    down, across = (whole - side for whole, side in zip(shape, size, strict=True))
    top, left = (down // 2, across // 2) if letterbox == 'center' else (0, 0)
    padding = left, across - left, top, down - top
    shift = images.new_tensor(fill)[:, None, None]
    return F.pad(images - shift, padding) + shift, padding


def choose_shape(config: Config | None) -> tuple[int, int]:
    """Choose the height and width that a config's test pipeline makes, rounded up to 32.

    For mmseg's models it is the size of training images: pipelines only fix the shorter side.
    Return 512 and 512 if nothing fixes a size.
    """
    if config is None:
        return 512, 512
    steps, preprocessor = _name_steps(config), config.model.get('data_preprocessor') or {}
    size = steps.get('CenterCrop', {}).get('crop_size') or steps.get('Resize', {}).get('scale')
    if preprocessor.get('size'):
        size = preprocessor['size'][::-1]
    width, height = np.broadcast_to(size or 512, 2).tolist()
    return -(-height // 32) * 32, -(-width // 32) * 32


def read_padding(config: Config, channels: int) -> tuple[float, ...] | None:
    """Return the pixel, in BGR, with which the test pipeline's ``Pad`` fills up images.

    Return None if there is no ``Pad``: images are filled up with zeros after normalization.
    """
    step = _name_steps(config).get('Pad')
    if step is None:
        return None
    value = step.get('pad_val', 0)
    value = value.get('img', 0) if isinstance(value, dict) else value
    return tuple(np.broadcast_to(value, channels).astype(float).tolist())


def describe_resizing(config: Config | None, shape: tuple[int, int]) -> dict[str, Any] | None:
    """Describe how pictures are resized to a height and width.

    Returns:
        None if the test pipeline resizes nothing. Otherwise mmcv's ``interpolation`` and
        ``backend``; ``shorter`` and ``crop``: resize the shorter side to this length, then cut out
        the middle. If these two are None: resize to fit.
    """
    step: Any = {}
    steps: dict[str, Any] = {}
    if config is not None and config.get('test_dataloader'):
        steps = fit_config(deepcopy(config), shape)
        step = steps.get('ResizeEdge') or steps.get('Resize')
        if not step:
            return None
    crops = 'ResizeEdge' in steps and 'CenterCrop' in steps
    return dict(
        interpolation=step.get('interpolation', 'bilinear'),
        backend=step.get('backend', 'cv2'),
        shorter=step.scale if 'ResizeEdge' in steps else None,
        crop=[*shape] if crops else None,
    )
