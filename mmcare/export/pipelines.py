"""Adapt how a config prepares test images to files that take one height and width."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch.nn.functional as F
from mmcv.transforms import Resize
from mmengine.config import Config
from torch import Tensor

from mmcare.registry import TRANSFORMS, type_name
from mmcare_runtime.tiles import tile_stride

LETTERBOXES = ('top-left', 'center')  # where a picture is in an image
# Endings of the names of steps that change an image's size, and the steps that files can describe.
RESIZING = 'Resize', 'Edge', 'ToMultiple', 'Crop', 'Pad'
DESCRIBED = 'Resize', 'ResizeEdge', 'CenterCrop', 'EfficientNetCenterCrop'
# Steps that do the same to pictures as another one.
SAME = {'FixScaleResize': 'Resize'}


@TRANSFORMS.register_module()
class ResizeToFit(Resize):
    """Resize to the largest size within ``scale`` (width, height), with the aspect ratio kept.

    mmcv's ``Resize(keep_ratio=True)`` swaps width and height of ``scale`` for upright images.
    """

    def _resize_img(self, results: dict[str, Any]) -> None:
        height, width = results['img'].shape[:2]
        ratio = min(self.scale[0] / width, self.scale[1] / height)
        results['scale'] = tuple(max(int(side * ratio + 0.5), 1) for side in (width, height))
        super()._resize_img(results)


def _inner_steps(step: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the steps within a ``KeyMapper``, or the step itself."""
    if type_name(step['type']) != 'KeyMapper':
        return [step]
    inner = step['transforms']
    return [inner] if isinstance(inner, dict) else inner


def inner_datasets(dataset: Any) -> list[Any]:
    """Return the configs of the data sets that another one repeats, balances or concatenates."""
    if 'datasets' in dataset:
        return [inner for part in dataset.datasets for inner in inner_datasets(part)]
    return inner_datasets(dataset.dataset) if 'dataset' in dataset else [dataset]


def name_steps(config: Config) -> dict[str, Any]:
    """Return the steps of the test pipeline by name."""
    dataset = (config.get('test_dataloader') or {}).get('dataset') or {}
    pipeline = inner_datasets(dataset)[0].get('pipeline') or ()
    steps = [inner for step in pipeline for inner in _inner_steps(step)]
    names = [type_name(step['type']) for step in steps]
    return {SAME.get(name, name): step for name, step in zip(names, steps, strict=True)}


def _remove_step(pipeline: list[dict[str, Any]], name: str) -> None:
    """Remove a step of this name, in place, with the step around it."""
    named = [s for s in pipeline if name in [type_name(inner['type']) for inner in _inner_steps(s)]]
    for step in named:
        pipeline.remove(step)


def fit_config(config: Config, shape: tuple[int, int], tile: str = 'whole') -> dict[str, Any]:
    """Change a config, in place, so that it tests single images within a height and width.

    ``Resize`` (to a scale) and ``CenterCrop`` get this size. Before a ``CenterCrop``, the edge of
    ``ResizeEdge`` is scaled as the crop's longer side is. ``ResizeToMultiple`` and ``Pad`` are
    removed, since images are padded later, see :func:`pad_to`.

    Args:
        config: Of a model with test data.
        shape: Height and width.
        tile: ``'whole'``: segmentors see the whole image. ``'slide'``: they see windows of this
            size, in images that are resized as the config says if its mode is ``'slide'``, and
            otherwise keep their sizes.

    Returns:
        The steps of the test pipeline by name.

    Raises:
        ValueError: If parts of the test data have other pipelines than the first.
    """
    size = shape[1], shape[0]
    loader, model = config.test_dataloader, config.model
    loader.batch_size = 1
    first, *others = inner_datasets(loader.dataset)
    pipeline = first.get('pipeline')
    if any(part.get('pipeline') != pipeline for part in others):
        raise ValueError('the parts of test_dataloader.dataset have different pipelines')
    for part in others if pipeline else ():
        part.pipeline = pipeline
    steps = name_steps(config)
    if tile == 'slide':
        if not is_slid(config):
            for name in [name for name in steps if name.endswith(RESIZING)]:
                _remove_step(pipeline, name)
                steps.pop(name)
        stride = tile_stride(shape, model.test_cfg.get('stride'))
        model.test_cfg.update(mode='slide', crop_size=shape, stride=stride)
        return steps
    if 'Resize' in steps and not steps['Resize'].get('scale_factor'):
        steps['Resize'].update(type='mmcare.ResizeToFit', scale=size, keep_ratio=False)
    for name in {'ResizeToMultiple', 'Pad'} & {*steps}:
        _remove_step(pipeline, name)
        steps.pop(name)
    if 'CenterCrop' in steps:
        factor = max(size) / np.max(steps['CenterCrop'].crop_size)
        steps['CenterCrop'].crop_size = size
        if 'ResizeEdge' in steps:
            steps['ResizeEdge'].scale = round(steps['ResizeEdge'].scale * factor)
    if 'EfficientNetCenterCrop' in steps:
        step = steps['EfficientNetCenterCrop']
        padding = step.get('crop_padding', 32) * shape[0] / step.crop_size
        step.update(crop_size=shape[0], crop_padding=padding)
    for preprocessor in (model.get('data_preprocessor'), config.get('data_preprocessor')):
        while preprocessor:
            for padding in ('pad_size_divisor', 'test_cfg'):
                preprocessor.pop(padding, None)
            preprocessor = preprocessor.get('data_preprocessor')  # of a branch
    if 'mode' in (model.get('test_cfg') or {}):
        model.test_cfg.mode = 'whole'
    return steps


def describe_sliding(config: Config) -> dict[str, Any]:
    """Describe the windows that a config tests a segmentor on.

    Returns:
        mmseg's ``stride``; the ``resize`` before them, and a ``multiple`` to which sides are
        enlarged, or None; ``size_divisor`` and ``size``, to which images are padded, or None;
        ``other_steps`` that change an image's size.
    """
    steps, preprocessor = name_steps(config), config.model.get('data_preprocessor') or {}
    padding = preprocessor.get('test_cfg') or {}
    resize: Any = steps.get('Resize')
    multiple = steps.get('ResizeToMultiple', {})
    others = sorted(name for name in steps if name.endswith(RESIZING))
    others = [name for name in others if name not in ('Resize', 'ResizeToMultiple')]
    if resize and not resize.get('scale'):
        others += ['Resize by scale_factor'] if resize.get('scale_factor') != 1 else []
        resize = None
    if resize:
        resize = dict(
            scale=np.broadcast_to(resize.scale, 2).tolist(),
            keep_ratio=resize.get('keep_ratio', False),
            **_name_interpolation(resize),
        )
    return dict(
        stride=[*config.model.test_cfg.stride],
        resize=resize,
        multiple=multiple.get('size_divisor', 32) if multiple else None,
        size_divisor=padding.get('size_divisor'),
        size=[*padding['size']] if padding.get('size') else None,
        other_steps=others,
    )


def describe_loader(config: Config | None) -> dict[str, Any]:
    """Describe how a config's test pipeline reads pictures, in mmcv's terms.

    Returns:
        ``color_type`` and ``imdecode_backend``, which are None if the loader is not mmcv's;
        ``to_float32``; ``bits`` of a value, None if they are those of the file.
    """
    steps = name_steps(config) if config is not None else {}
    loaders = [name for name in steps if name.startswith('Load') and 'Annotation' not in name]
    if not loaders:
        return dict(color_type=None, imdecode_backend=None, to_float32=False, bits=8)
    step = steps[loaders[0]]
    if loaders[0] != 'LoadImageFromFile':
        return dict(color_type=None, imdecode_backend=None, to_float32=True, bits=None)
    color_type = step.get('color_type', 'color')
    decoder = step.get('imdecode_backend') or 'cv2'
    as_stored = color_type == 'unchanged' or decoder == 'tifffile'
    return dict(
        color_type=color_type,
        imdecode_backend=decoder,
        to_float32=bool(step.get('to_float32', False)),
        bits=None if as_stored else 8,
    )


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


def is_slid(config: Config | None) -> bool:
    """Say whether a config tests a segmentor on windows that slide over pictures."""
    model = config.get('model') or {} if config is not None else {}
    return (model.get('test_cfg') or {}).get('mode') == 'slide'


def choose_shape(config: Config | None, multiple: int = 32) -> tuple[tuple[int, int], str]:
    """Choose the height and width of a config's windows, or of its test images.

    Returns:
        Height and width, and the reason for this size. Sizes of windows are kept, and sizes of
        images are rounded up to multiples; the size is 512 and 512 if nothing fixes one.
    """
    if config is None:
        return (512, 512), 'there is no config'
    steps, preprocessor = name_steps(config), config.model.get('data_preprocessor') or {}
    resize = steps.get('Resize', {}).get('scale')
    crop = steps.get('CenterCrop') or steps.get('EfficientNetCenterCrop') or {}
    if is_slid(config):
        height, width = config.model.test_cfg['crop_size']
        return (height, width), "the windows' in test_cfg, whose mode is 'slide'"
    if crop.get('crop_size'):
        size, reason = crop['crop_size'], "that of the test pipeline's crop"
    elif resize:
        size, reason = resize, f"the largest that the test pipeline's Resize makes, {resize}"
    elif preprocessor.get('size'):
        size, reason = preprocessor['size'][::-1], 'that of training; tests keep their sizes'
    else:
        size, reason = 512, 'nothing in the config fixes one'
    width, height = np.broadcast_to(size, 2).tolist()
    return (-(-height // multiple) * multiple, -(-width // multiple) * multiple), reason


def read_padding(config: Config, channels: int) -> tuple[float, ...] | None:
    """Return the pixel, in BGR, with which the test pipeline's ``Pad`` fills up images.

    Return None if there is no ``Pad``: images are filled up after normalization.
    """
    step = name_steps(config).get('Pad')
    if step is None:
        return None
    value = step.get('pad_val', 0)
    value = value.get('img', 0) if isinstance(value, dict) else value
    return tuple(np.broadcast_to(value, max(channels, np.size(value))).astype(float).tolist())


def _name_interpolation(step: Any) -> dict[str, str]:
    names = dict(interpolation='bilinear', backend='cv2')
    return {name: step.get(name, default) for name, default in names.items()}


def describe_resizing(config: Config | None, shape: tuple[int, int]) -> dict[str, Any] | None:
    """Describe how pictures are resized to a height and width.

    Returns:
        None if the test pipeline resizes nothing. Otherwise mmcv's ``interpolation`` and
        ``backend``; ``shorter`` and ``crop``: resize the shorter side to this length, then cut out
        the middle. ``share``: cut a square out of the middle, whose sides are this share of the
        shorter side, then resize it. If these three are None: resize to fit.

    Raises:
        ValueError: If the test pipeline resizes or crops in another way.
    """
    step: Any = {}
    steps: dict[str, Any] = {}
    if config is not None and config.get('test_dataloader'):
        steps = fit_config(deepcopy(config), shape)
        square = steps.get('EfficientNetCenterCrop')
        step = square or steps.get('ResizeEdge') or steps.get('Resize')
        for name in steps:
            if name.endswith(RESIZING) and name not in DESCRIBED and not is_slid(config):
                raise ValueError(
                    f'files cannot describe {name}: use Resize, or ResizeEdge and CenterCrop'
                )
        if square is not None and shape[0] != shape[1]:
            raise ValueError(f'EfficientNetCenterCrop makes squares, the file has {shape}')
        if 'CenterCrop' in steps and 'ResizeEdge' not in steps:
            raise ValueError('files cannot describe a CenterCrop without a ResizeEdge before it')
        factor = step.get('scale_factor') if step else 1
        if factor == 1:
            return None
        if factor and not is_slid(config):
            raise ValueError(f'files cannot describe a Resize with scale_factor={factor}')
        if step.get('edge', 'short') != 'short':
            raise ValueError(f'files cannot describe a ResizeEdge with edge={step.edge!r}')
    if 'EfficientNetCenterCrop' in steps:
        named = _name_interpolation(dict(dict(interpolation='bicubic'), **step))
        share = step.crop_size / (step.crop_size + step.crop_padding)
        return dict(**named, shorter=None, crop=None, share=share)
    return dict(
        **_name_interpolation(step),
        shorter=step.scale if 'ResizeEdge' in steps else None,
        crop=[*shape] if 'CenterCrop' in steps else None,
    )
