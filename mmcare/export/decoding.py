"""Describe the outputs of a network: their names, scores, classes, and how boxes are decoded."""

import inspect
import json
import re
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from mmengine.config import Config
from mmengine.registry import DATASETS
from torch import Tensor, nn

from mmcare.export.source import HEADS, Network


def name_outputs(network: Network, outputs: Sequence[Tensor]) -> list[str]:
    """Name the outputs of a network, in their order.

    Returns:
        ``stage1``, ... of a CARE, ``neck1``, ... of a neck, ``['logits']`` of classifiers and
        segmentors. Of one-stage detectors, the names that the head's loss gives its maps, with the
        number of the level: ``cls_score1``, ``cls_score2``, ..., ``bbox_pred1``, ...

    Raises:
        ValueError: If a detector has not one map of each name at each level, or a classifier or
            segmentor not one output.
    """
    if network.part == 'backbone':
        return [*network.info.output_names]
    if network.part == 'neck':
        return [f'neck{index + 1}' for index in range(len(outputs))]
    if not hasattr(network.model, 'bbox_head'):
        if len(outputs) != 1:
            raise ValueError(f'the head has {len(outputs)} outputs, not one: use --part backbone')
        return ['logits']
    head: Any = network.model.bbox_head
    arguments = list(inspect.signature(head.loss_by_feat).parameters)
    names = arguments[: arguments.index('batch_gt_instances')]
    levels = len(outputs) // len(names)
    sizes = [output.shape[2:] for output in outputs]
    if sizes != sizes[:levels] * len(names):
        raise ValueError(
            f'the {len(outputs)} outputs of the {type(head).__name__} are not {", ".join(names)} '
            'for each level: use --part neck'
        )
    singular = [re.sub('(?<=ss)es$|s$', '', name) for name in names]
    return [f'{name}{level + 1}' for name in singular for level in range(levels)]


def describe_scores(model: nn.Module, config: Config | None, channels: int) -> dict[str, Any]:
    """Describe the scores of a whole model, whose first output has this number of channels.

    Returns:
        ``activation``: ``'softmax'``, ``'sigmoid'``, or None if that is not known. ``threshold`` of
        a segmentor with one channel: above it, a pixel is of class 1. ``classes`` and ``palette``
        of the config's test data, if their number is the head's number of classes.
    """
    head_name = next(name for name in HEADS if hasattr(model, name))
    head: Any = getattr(model, head_name)
    if head_name == 'bbox_head':
        is_sigmoid = getattr(head, 'use_sigmoid_cls', None)
    elif head_name == 'decode_head':
        is_sigmoid = channels == 1
    else:
        is_sigmoid = any(base.__name__ == 'MultiLabelClsHead' for base in type(head).__mro__)
    activations = {True: 'sigmoid', False: 'softmax', None: None}
    described: dict[str, Any] = dict(activation=activations[is_sigmoid])
    if head_name == 'decode_head' and is_sigmoid:
        described['threshold'] = head.threshold
    if config is None or not config.get('test_dataloader'):
        return described
    dataset = innermost_dataset(config.test_dataloader.dataset)
    dataset_type: Any = dataset.type
    if isinstance(dataset_type, str):
        with DATASETS.switch_scope_and_registry(config.get('default_scope')) as registry:
            dataset_type = registry.get(dataset_type)
    load = getattr(dataset_type, '_load_metainfo', None)  # concatenated data sets have none
    metainfo = load(deepcopy(dataset.get('metainfo'))) if load else {}
    if load and dataset.get('classes'):  # mmpretrain's argument: names, or a file of names
        metainfo = load(dict(metainfo, classes=dataset.classes))
    for key in ('classes', 'palette'):
        values = metainfo.get(key) or ()
        if len(values) == head.num_classes and not isinstance(values, str):
            described[key] = [value if isinstance(value, str) else [*value] for value in values]
    return described


def innermost_dataset(dataset: Any) -> Any:
    """Return the config of the data set that another one repeats or balances."""
    while 'dataset' in dataset:
        dataset = dataset.dataset
    return dataset


def describe_decoding(model: nn.Module) -> dict[str, Any]:
    """Describe how boxes and scores are decoded from the maps of a one-stage detector.

    Maps are (1, priors * values, H, W): after a transposition to (H, W, priors * values) and a
    reshape to (-1, values) each row belongs to one prior.

    Returns:
        Nothing if the model has no such head, or a head with a decoding of its own (GFL, YOLOX,
        ...) or another NMS than mmdet's ``'nms'`` of each class. Otherwise ``decode``, with the
        plain values that docs/deploy.md lists.
    """
    head: Any = getattr(model, 'bbox_head', None)
    for name in ('predict_by_feat', '_predict_by_feat_single'):
        method = getattr(head, name, None)
        if not getattr(method, '__qualname__', '').startswith('BaseDenseHead.'):
            return {}
    nms = head.test_cfg.get('nms', {})
    others = nms.keys() - {'type', 'iou_threshold', 'class_agnostic', 'split_thr'}
    if nms.get('type', 'nms') != 'nms' or nms.get('class_agnostic') or others:
        return {}
    priors, coder = head.prior_generator, head.bbox_coder
    wanted = ('base_anchors', 'scales', 'ratios', 'base_sizes', 'center_offset', 'offset')
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(coder.decode).parameters.items()
        if isinstance(parameter.default, float)  # wh_ratio_clip, which no config sets
    }
    described = dict(
        strides=[stride[0] for stride in priors.strides],
        prior_type=type(priors).__name__,
        prior_params={name: getattr(priors, name) for name in wanted if hasattr(priors, name)},
        coder=dict(type=type(coder).__name__, **vars(coder), **defaults),
        score_activation='sigmoid' if head.use_sigmoid_cls else 'softmax',
        test_cfg=head.test_cfg,
        box_transform_applied=type(coder).__name__ == 'DistancePointBBoxCoder',
    )
    return dict(decode=json.loads(json.dumps(described, default=Tensor.tolist)))
