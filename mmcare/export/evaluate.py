"""Test an exported program in the toolbox's own test loop, in place of a part of the model."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from mmcv.transforms import Resize
from mmengine.config import Config
from torch import Tensor, nn
from torch.utils._pytree import tree_structure, tree_unflatten

from mmcare.export.formats.base import Exported
from mmcare.export.load import HEADS, Network
from mmcare.registry import TRANSFORMS
from mmcare.weights.reading import digest_weights


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


def fit_config(config: Config, shape: tuple[int, int]) -> dict[str, Any]:
    """Let a config of a toolbox test single images, within a height and width, in place.

    ``Resize`` and ``Pad`` take the size. So does ``CenterCrop``, and the edge that ``ResizeEdge``
    makes before it changes in proportion to the longer side. ``ResizeToMultiple`` goes. Segmentors
    see the whole image.

    Returns:
        The steps of the test pipeline by name.
    """
    size = shape[1], shape[0]
    loader, model = config.test_dataloader, config.model
    loader.batch_size = 1
    steps = {}
    for step in loader.dataset.get('pipeline') or ():  # types are names, or classes
        steps[getattr(step.type, '__name__', step.type).rpartition('.')[2]] = step
    if 'Resize' in steps:
        steps['Resize'].update(type='mmcare.ResizeToFit', scale=size, keep_ratio=False)
    if 'ResizeToMultiple' in steps:  # images are padded to the size instead
        loader.dataset.pipeline.remove(steps.pop('ResizeToMultiple'))
    if 'Pad' in steps:
        steps['Pad'].update(size=size, size_divisor=None, pad_to_square=False)
    if 'CenterCrop' in steps:
        factor = max(size) / np.max(steps['CenterCrop'].crop_size)
        steps['CenterCrop'].crop_size = size
        if 'ResizeEdge' in steps:
            steps['ResizeEdge'].scale = round(steps['ResizeEdge'].scale * factor)
    for preprocessor in (model.get('data_preprocessor'), config.get('data_preprocessor')):
        for padding in ('pad_size_divisor', 'test_cfg'):
            (preprocessor or {}).pop(padding, None)
    if 'mode' in (model.get('test_cfg') or {}):
        model.test_cfg.mode = 'whole'
    return steps


def pad_images(model: Any, shape: tuple[int, int]) -> None:
    """Let a model of a toolbox pad normalised images to a height and width, right and below.

    For larger images it then raises a ValueError.
    """

    def pad(_: nn.Module, __: Any, data: dict[str, Any]) -> None:
        height, width = data['inputs'].shape[2:]
        bottom, right = shape[0] - height, shape[1] - width
        if bottom < 0 or right < 0:
            raise ValueError(
                f'the test pipeline makes an image of {height}x{width}, the file takes '
                f'{shape[0]}x{shape[1]}: give the pipeline a Resize or a CenterCrop'
            )
        padding = 0, right, 0, bottom
        data['inputs'] = F.pad(data['inputs'], padding)
        metainfo = dict(pad_shape=shape, batch_input_shape=shape, img_padding_size=padding)
        for sample in data['data_samples']:  # mmseg crops its logits by the padding
            sample.set_metainfo(metainfo)

    model.data_preprocessor.register_forward_hook(pad)


def take_normalized(program: Exported, model: Any) -> Exported:
    """Let a program of pixels take what a model's preprocessor returns; others stay as they are."""
    if not program.pixels:
        return program
    mean, std = (one.cpu() for one in (model.data_preprocessor.mean, model.data_preprocessor.std))
    return replace(program, run=lambda images: program.run(images * std + mean))


@contextmanager
def replaced_part(model: Any, program: Exported, checked: bool = False) -> Iterator[str]:
    """Let a program, for images of one size, compute its part of a toolbox's model; yield the part.

    Raises:
        ValueError: If the program is of another model or, where it is checked, of other weights.
    """
    device = next(model.parameters()).device
    image = torch.zeros(program.input_shape, device=device)

    def run(images: Tensor) -> tuple[Tensor, ...]:
        maps = map(torch.from_numpy, program.run(images.cpu()))
        return tuple(one.to(device).contiguous() for one in maps)  # mmcv silently misreads others

    part = program.description.get('part')
    if part is None:
        raise ValueError('the file does not say what it is: export it with mmcare')
    network = Network(model, part)
    weights = network.model.state_dict()
    if checked and digest_weights(weights, {}) != program.description['sha256']:
        raise ValueError('the file is of other weights than the checkpoint')
    found, expected = ([[*one.shape] for one in each(image)] for each in (run, network))
    if found != expected:
        raise ValueError(
            f"the file is of another model: its outputs are {found}, those of the config's "
            f'{type(model).__name__} {expected}'
        )
    replaced: list[tuple[Any, str, Any]]
    if part == 'backbone':
        replaced = [(Network(model).backbone, 'forward', run)]
    elif part == 'neck':
        replaced = [(model, 'extract_feat', run)]
    else:
        head = next(getattr(model, name) for name in HEADS if hasattr(model, name))
        structure = tree_structure(model(image))
        replaced = [
            (model, 'extract_feat', lambda images: images),
            (head, 'forward', lambda images: tree_unflatten(run(images), structure)),
        ]
    for module, name, function in replaced:
        setattr(module, name, function)
    try:
        yield part
    finally:
        for module, name, _ in replaced:
            delattr(module, name)  # the class has the method
