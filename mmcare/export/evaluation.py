"""Put an exported program into a toolbox's model, in place of a part, to test it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_structure, tree_unflatten

from mmcare.export.backends.base import Exported
from mmcare.export.source import HEADS, Network
from mmcare.weights.reading import digest_weights


def pad_images(model: Any, shape: tuple[int, int]) -> None:
    """Let a model of a toolbox pad normalized images to a height and width, right and below.

    The model then raises a ValueError for larger images.
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


@contextmanager
def replaced_part(model: Any, program: Exported, checked: bool = False) -> Iterator[str]:
    """Let a program, for images of one size, compute its part of a toolbox's model; yield the part.

    Raises:
        ValueError: If the program is of another model or, with ``checked``, of other weights.
    """
    device = next(model.parameters()).device
    image = torch.zeros(program.input_shape, device=device)

    def run(images: Tensor) -> tuple[Tensor, ...]:
        if program.input_kind == 'image':
            images = images * model.data_preprocessor.std + model.data_preprocessor.mean
        outputs = map(torch.from_numpy, program.run(images.cpu()))
        # mmcv silently misreads tensors that are not contiguous.
        return tuple(output.to(device).contiguous() for output in outputs)

    part = program.description.get('part')
    if part is None:
        raise ValueError('the file does not say what it is: export it with mmcare')
    network = Network(model, part)
    weights = network.model.state_dict()
    if checked and digest_weights(weights, {}) != program.description['sha256']:
        raise ValueError('the file is of other weights than the checkpoint')
    found = [[*output.shape] for output in run(image)]
    expected = [[*output.shape] for output in network(image)]
    if found != expected:
        raise ValueError(
            f"the file is of another model: its outputs are {found}, those of the config's "
            f'{type(model).__name__} {expected}'
        )
    replaced: list[tuple[Any, str, Any]]
    if part == 'backbone':
        replaced = [(network.model, 'forward', run)]
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
