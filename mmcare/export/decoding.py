"""Whole one-stage detectors: names of their raw maps, and how boxes are decoded from them."""

import inspect
import json
import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from mmcare.export.source import Network


def name_outputs(network: Network, outputs: Sequence[Tensor]) -> list[str]:
    """Name the outputs of a network, in their order.

    Returns:
        ``stage1``, ... of a backbone, ``neck1``, ... of a neck, ``['logits']`` of classifiers and
        segmentors. Of one-stage detectors the kinds of maps as the head's loss calls them, with
        the number of the level: ``cls_score1``, ``cls_score2``, ..., ``bbox_pred1``, ...

    Raises:
        ValueError: If the maps are not one of each kind at each level.
    """
    if network.part == 'backbone':
        return [f'stage{index + 1}' for index in network.backbone.out_indices]
    if network.part == 'neck':
        return [f'neck{index + 1}' for index in range(len(outputs))]
    if not hasattr(network.model, 'bbox_head'):
        return ['logits']
    head: Any = network.model.bbox_head
    arguments = list(inspect.signature(head.loss_by_feat).parameters)
    kinds = arguments[: arguments.index('batch_gt_instances')]
    levels = len(outputs) // len(kinds)
    sizes = [output.shape[2:] for output in outputs]
    if sizes != sizes[:levels] * len(kinds):
        raise ValueError(
            f'the {len(outputs)} outputs of the {type(head).__name__} are not {", ".join(kinds)} '
            'for each level: export backbone and neck (--with-neck)'
        )
    singular = [re.sub('(?<=ss)es$|s$', '', kind) for kind in kinds]
    return [f'{kind}{level + 1}' for kind in singular for level in range(levels)]


def describe_decoding(model: nn.Module) -> dict[str, Any]:
    """Describe how boxes and scores are decoded from the maps of a one-stage detector.

    Maps are (1, priors * values, H, W): after a transposition to (H, W, priors * values) and a
    reshape to (-1, values) each row belongs to one prior.

    Returns:
        Nothing if the model has no such head, or one that decodes in its own way (GFL, YOLOX, ...).
        Otherwise ``decode``, with the plain values that docs/deploy.md lists.
    """
    head: Any = getattr(model, 'bbox_head', None)
    for name in ('predict_by_feat', '_predict_by_feat_single'):
        method = getattr(head, name, None)
        if not getattr(method, '__qualname__', '').startswith('BaseDenseHead.'):
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
