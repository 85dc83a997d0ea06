"""Put an exported program into a toolbox's model, in place of a part, to test it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from mmengine.structures import InstanceData
from torch import Tensor, nn
from torch.utils._pytree import tree_structure, tree_unflatten

from mmcare.export.backends.base import Exported
from mmcare.export.prediction import read_detections
from mmcare.export.preprocessing import pad_to
from mmcare.export.source import HEADS, Network, Normalization
from mmcare.weights.reading import digest_weights


def pad_images(
    model: Any,
    shape: tuple[int, int],
    normalization: Normalization | None = None,
    letterbox: str = 'top-left',
) -> None:
    """Let a model of a toolbox pad normalized images to a height and width.

    The model then raises a ValueError for larger images. Boxes are moved back from the center.

    Args:
        model: Changed in place.
        shape: Height and width.
        normalization: Has the padding; None: zeros.
        letterbox: See :func:`mmcare.export.preprocessing.pad_to`.
    """
    fill = normalization.fill if normalization else [0.0]

    def pad(_: nn.Module, __: Any, data: dict[str, Any]) -> None:
        data['inputs'], padding = pad_to(data['inputs'], shape, fill, letterbox)
        metainfo = dict(pad_shape=shape, batch_input_shape=shape, img_padding_size=padding)
        if letterbox == 'center':
            metainfo['img_shape'] = shape
        for sample in data['data_samples']:  # mmseg crops its logits by the padding
            sample.set_metainfo(metainfo)

    def move_back(results: InstanceData, *args: Any, img_meta: Any, **kwargs: Any) -> InstanceData:
        from torchvision.ops import clip_boxes_to_image  # it imports PyTorch's compiler

        left, right, top, bottom = img_meta['img_padding_size']
        boxes = results.bboxes - results.bboxes.new_tensor([left, top] * 2)
        size = shape[0] - top - bottom, shape[1] - left - right
        results.bboxes = clip_boxes_to_image(boxes, size)
        return post_process(results, *args, img_meta=img_meta, **kwargs)

    model.data_preprocessor.register_forward_hook(pad)
    if letterbox == 'center' and hasattr(model, 'bbox_head'):
        post_process = model.bbox_head._bbox_post_process
        model.bbox_head._bbox_post_process = move_back


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
    outputs, found = network(image), [[*output.shape] for output in run(image)]
    expected = [[*output.shape] for output in outputs]
    decoded = [output for output in program.description.get('outputs', ()) if 'kind' in output]
    if found != expected and not decoded:
        raise ValueError(
            f"the file is of another model: its outputs are {found}, those of the config's "
            f'{type(model).__name__} {expected}'
        )
    replaced: list[tuple[Any, str, Any]] = [(model, 'extract_feat', run)]
    if part == 'backbone':
        replaced = [(network.model, 'forward', run)]
    elif part == 'model':
        head = next(getattr(model, name) for name in HEADS if hasattr(model, name))
        structure = tree_structure(model(image))
        replaced = [(model, 'extract_feat', lambda images: images)]
        if decoded and hasattr(model, 'bbox_head'):
            predict = partial(predict_boxes, head, run, program.description)
            replaced.append((head, 'predict', predict))
        else:
            channels = outputs[0].shape[1]
            encode = partial(to_logits, decoded[0], channels) if decoded else tuple
            forward = lambda images: tree_unflatten(encode(run(images)), structure)  # noqa: E731
            replaced.append((head, 'forward', forward))
    with ExitStack() as stack:
        for module, name, function in replaced:
            setattr(module, name, function)
            stack.callback(delattr, module, name)  # the class has the method
        yield part


def to_logits(output: Mapping[str, Any], channels: int, results: Sequence[Tensor]) -> list[Tensor]:
    """Return logits from which a toolbox predicts the probabilities or labels of a file."""
    if output['kind'] == 'probabilities':
        is_sigmoid = output['activation'] == 'sigmoid'
        return [results[0].logit(1e-7) if is_sigmoid else results[0].clamp(1e-30).log()]
    labels = F.one_hot(results[0].long(), max(channels, 2)).permute(0, 3, 1, 2).float()
    return [labels if channels > 1 else 40 * labels[:, 1:] - 20]


def predict_boxes(
    head: Any,
    run: Callable[[Tensor], Sequence[Tensor]],
    description: Mapping[str, Any],
    images: Tensor,
    data_samples: Any,
    rescale: bool = False,
) -> list[InstanceData]:
    """Predict as mmdet's base head does, from the detections of a file."""
    from torchvision.ops import clip_boxes_to_image  # it imports PyTorch's compiler

    (sample,) = data_samples
    boxes, scores, labels = read_detections(description, run(images))
    meta, config = sample.metainfo, head.test_cfg
    boxes = clip_boxes_to_image(boxes, meta['img_shape'])  # without the padding
    found = InstanceData(bboxes=boxes, scores=scores, labels=labels)
    return [head._bbox_post_process(found, config, rescale, with_nms=True, img_meta=meta)]
