"""Test an exported program inside a toolbox's model, in place of a part of the model."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from mmengine.structures import InstanceData
from torch import Tensor, nn

from mmcare.export.loading import Normalization
from mmcare.export.pipelines import pad_to
from mmcare.export.tasks import Task, make_task
from mmcare.weights.reading import digest_weights


def pad_images(
    model: Any,
    shape: tuple[int, int],
    normalization: Normalization | None = None,
    letterbox: str = 'top-left',
    tile: str = 'whole',
) -> None:
    """Let a model of a toolbox pad normalized images to a height and width.

    The model then raises a ValueError for larger images, unless it sees windows of them. Results
    are moved back from the center.

    Args:
        model: Changed in place.
        shape: Height and width.
        normalization: Has the padding; None: zeros.
        letterbox: See :func:`mmcare.export.pipelines.pad_to`.
        tile: See :func:`mmcare.export.pipelines.fit_config`.
    """
    slides = tile == 'slide'
    letterbox = 'top-left' if slides else letterbox
    fill = normalization.fill if normalization else [0.0]

    def pad(_: nn.Module, __: Any, data: dict[str, Any]) -> None:
        """Pad images (B, C, h, w), and note it in the metainfo."""
        size = tuple(map(max, data['inputs'].shape[-2:], shape)) if slides else shape
        data['inputs'], padding = pad_to(data['inputs'], size, fill, letterbox)
        metainfo: dict[str, Any] = dict(pad_shape=size, batch_input_shape=size)
        if letterbox == 'center':
            metainfo['img_shape'] = size
        for sample in data['data_samples']:  # mmseg crops its logits by the padding
            before = sample.metainfo.get('img_padding_size', [0] * 4)
            widths = tuple(sum(pair) for pair in zip(before, padding, strict=True))
            sample.set_metainfo(dict(metainfo, img_padding_size=widths))

    model.data_preprocessor.register_forward_hook(pad)
    if letterbox == 'center':
        for owner, name, substitute in make_task(model, 'model').centered_substitutes():
            setattr(owner, name, substitute)


@contextmanager
def replaced_part(model: Any, program: Any, checked: bool = False) -> Iterator[str]:
    """Let a file compute its part of a toolbox's model, for images of one size; yield the part.

    Args:
        model: Changed while the context is active.
        program: A file that :func:`mmcare.export.open_exported` has opened.
        checked: Whether the file must have the model's weights.

    Raises:
        ValueError: If the file was exported from another model or other weights.
    """
    device = next(model.parameters()).device
    batch, *shape = program.input_shape
    image = torch.zeros(1, *shape, device=device)

    def run(images: Tensor) -> tuple[Tensor, ...]:
        """Map normalized images (1, C, H, W) to the file's outputs."""
        if program.input_kind == 'image' and hasattr(model.data_preprocessor, 'mean'):
            images = images * model.data_preprocessor.std + model.data_preprocessor.mean
        images = images.repeat(batch, 1, 1, 1).cpu().contiguous()
        outputs = [torch.from_numpy(output) for output in program.run(images.numpy())]
        if batch > 1:  # the toolbox tests one image at a time
            outputs = [output[:1] for output in outputs]
        # mmcv silently misreads tensors that are not contiguous.
        return tuple(output.to(device).contiguous() for output in outputs)

    description = program.description
    if not description:
        raise ValueError('the file does not say what it is: export it with mmcare')
    task = make_task(model, description['part'])
    if checked:
        _check_weights(task, description)
    shapes = [[*output.shape] for output in run(image)]
    expected = [[*output.shape] for output in task(image)]
    if shapes != expected and 'kind' not in description['outputs'][0]:
        raise ValueError(
            f"the file is of another model: its outputs are {shapes}, those of the config's "
            f'{type(model).__name__} {expected}'
        )
    with ExitStack() as stack:
        for owner, name, substitute in task.substitutes(run, description, image):
            setattr(owner, name, substitute)
            stack.callback(delattr, owner, name)  # restores the method of the class
        yield task.part


def _check_weights(task: Task, description: Mapping[str, Any]) -> None:
    if digest_weights(task.model.state_dict(), {}) != description['sha256']:
        raise ValueError('the file is of other weights than the checkpoint')


@contextmanager
def sliced(model: Any, program: Any, checked: bool = False) -> Iterator[str]:
    """Let a detector's file compute windows of the pictures on disk; yield its part of the model.

    Args:
        model: Of mmdet, changed while the context is active: it computes metrics only.
        program: A file that :func:`mmcare.export.open_exported` has opened.
        checked: Whether the file must have the model's weights.

    Raises:
        ValueError: If the file was exported from other weights.
    """
    if checked:
        _check_weights(make_task(model, 'model'), program.description)

    def predict(_: Tensor, samples: Any, **__: Any) -> Any:
        for sample in samples:
            results = program.predict(sample.img_path, tile='slide')
            names = dict(bboxes='boxes', scores='scores', labels='labels', masks='masks')
            values = {key: results[name] for key, name in names.items() if name in results}
            tensors = {key: torch.from_numpy(value) for key, value in values.items()}
            sample.pred_instances = InstanceData(**tensors)
        return samples

    model.predict = predict
    try:
        yield 'model'
    finally:
        del model.predict
