"""One-stage detectors of mmdet: the maps of the head, or boxes, scores and labels."""

import inspect
import json
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from mmengine.config import Config, ConfigDict
from mmengine.structures import InstanceData
from torch import Tensor, nn

from mmcare.export.errors import Argument, RequestError
from mmcare.export.tasks.base import (
    Description,
    Options,
    OutputFormat,
    Outputs,
    PostProcess,
    RunImages,
    Shape,
    Substitutes,
    Task,
    describe_classes,
    in_structure,
    is_of_class,
)
from mmcare.export.tasks.one_stage_results import (
    BASE,
    MAX_DETECTIONS,
    Boxes,
    OwnBoxes,
    clips_boxes,
    complete_test_cfg,
    find_decoding,
    is_decoded,
)
from mmcare_runtime.results import read_detections

BOXES, CENTERS = ('cls_score', 'bbox_pred'), ('cls_score', 'bbox_pred', 'centerness')
FACTORS = ('cls_score', 'bbox_pred', 'iou_pred')
# What the maps of each level are called, in the order of the head's `forward`, by the class of the
# head or of its nearest parent.
MAP_NAMES: dict[str, Sequence[str]] = {
    'ATSSHead': CENTERS,
    'AutoAssignHead': ('cls_score', 'bbox_pred', 'objectness'),
    'CenterNetUpdateHead': BOXES,
    'DDODHead': FACTORS,
    'FCOSHead': CENTERS,
    'FoveaHead': BOXES,
    'GFLHead': BOXES,
    'PAAHead': FACTORS,
    'RTMDetHead': BOXES,
    'RepPointsHead': BOXES,
    'RetinaHead': BOXES,
    'RetinaSepBNHead': BOXES,
    'SSDHead': BOXES,
    'TOODHead': BOXES,
    'VFNetHead': BOXES,
    'YOLOFHead': BOXES,
    'YOLOV3Head': ('pred_map',),
    'YOLOXHead': ('cls_score', 'bbox_pred', 'objectness'),
}


class OneStageDetector(Task):
    """All maps of the head: scores of each level, then boxes, then factors of scores if any."""

    summary = 'one-stage detectors'
    head_name = 'bbox_head'
    options: ClassVar = {
        'max_detections': dict(
            type=int,
            metavar='N',
            help=f'boxes of decoded detectors with NMS in the file; default: {MAX_DETECTIONS}',
        )
    }

    @staticmethod
    def fits(model: nn.Module) -> bool:
        """Say whether a model is a one-stage detector."""
        return is_of_class(model, 'SingleStageDetector') and hasattr(model, 'bbox_head')

    def name_outputs(self, outputs: Outputs) -> list[str]:
        """Name the maps ``cls_score1``, ``cls_score2``, ..., ``bbox_pred1``, ...

        Raises:
            ValueError: If the head is unknown, or does not have one map of each name at each level.
        """
        parents = [base.__name__ for base in type(self.head).__mro__]
        names = next((MAP_NAMES[parent] for parent in parents if parent in MAP_NAMES), ())
        priors = getattr(self.head, 'prior_generator', None)  # CenterNet's head has none
        levels = len(priors.strides) if priors else 0
        sizes = [output.shape[2:] for output in outputs]
        if not names or sizes != sizes[:levels] * len(names):
            raise RequestError(
                f'the {len(outputs)} outputs of the {type(self.head).__name__} are not known by '
                'name, or are not one map of each name for each level: use ',
                Argument('part', 'neck'),
            )
        return [f'{name}{level + 1}' for name in names for level in range(levels)]

    def describe(self, config: Config | None, outputs: Outputs) -> dict[str, Any]:
        """Describe classes, activation and ``decode``, see :func:`describe_decoding`."""
        is_sigmoid = getattr(self.head, 'use_sigmoid_cls', None)
        activations = {True: 'sigmoid', False: 'softmax', None: None}
        described = dict(activation=activations[is_sigmoid])
        described |= describe_classes(config, self.head.num_classes)
        return described | describe_decoding(self.head)

    def keeps_best(self, output_format: OutputFormat) -> bool:
        """Say whether NMS is in the network."""
        return output_format.has_nms

    def check_request(self, request: Any) -> None:
        """Raise a RequestError if only the toolbox can decode the head, and files should."""
        super().check_request(request)
        decodes = request.outputs == 'decoded' or request.letterbox == 'center'
        if decodes and not is_decoded(self.head):
            raise RequestError(
                f'the {type(self.head).__name__} has a decoding of its own, or not the plain NMS '
                'of each class: use raw outputs, at the top left'
            )

    def post_process(
        self, outputs: Outputs, shape: Shape, output_format: OutputFormat, options: Options
    ) -> PostProcess:
        """Make the module that decodes boxes."""
        kind = Boxes if find_decoding(self.head) == BASE else OwnBoxes
        return kind(self.head, outputs, shape, options, output_format)

    def substitutes(self, run: RunImages, description: Description, image: Tensor) -> Substitutes:
        """Replace the method that makes maps, or ``predict`` of the head if the file decodes."""
        head = self.head

        def predict(images: Tensor, data_samples: Any, rescale: bool = False) -> list[InstanceData]:
            """Read the file's boxes, and post-process them as mmdet does."""
            from torchvision.ops import clip_boxes_to_image  # it imports PyTorch's compiler

            (sample,) = data_samples
            outputs = [output.cpu().numpy() for output in run(images)]
            detections = map(torch.from_numpy, read_detections(description, outputs))
            boxes, scores, labels, _ = (detection.to(images.device) for detection in detections)
            if description['test_cfg'].get('clip_border', True):
                shape = sample.metainfo['img_shape']  # without the padding
                boxes = clip_boxes_to_image(boxes, shape)
            instances = InstanceData(bboxes=boxes, scores=scores, labels=labels)
            options = dict(rescale=rescale, with_nms=True, img_meta=sample.metainfo)
            test_cfg = ConfigDict(description['test_cfg'])
            return [head._bbox_post_process(instances, test_cfg, **options)]

        decoded = description['outputs'][0].get('kind') == 'boxes'
        forward = in_structure(run, self.model(image))
        method = (head, 'predict', predict) if decoded else (head, 'forward', forward)
        return [(self.model, 'extract_feat', lambda images: images), method]

    def centered_substitutes(self) -> Substitutes:
        """Replace the method that scales boxes back to the picture."""
        post_process, clips = self.head._bbox_post_process, clips_boxes(self.head)

        def move_back(
            results: InstanceData, *args: Any, img_meta: Any, **kwargs: Any
        ) -> InstanceData:
            """Move boxes from the middle of the image back to the picture."""
            from torchvision.ops import clip_boxes_to_image  # it imports PyTorch's compiler

            left, right, top, bottom = img_meta['img_padding_size']
            height, width = img_meta['img_shape']
            results.bboxes = results.bboxes - results.bboxes.new_tensor([left, top] * 2)
            if clips:
                size = height - top - bottom, width - left - right
                results.bboxes = clip_boxes_to_image(results.bboxes, size)
            return post_process(results, *args, img_meta=img_meta, **kwargs)

        return [(self.head, '_bbox_post_process', move_back)]


def describe_decoding(head: Any) -> dict[str, Any]:
    """Describe how boxes and scores are decoded from the maps of a one-stage detector.

    Maps are (1, priors * values, H, W): after a transposition to (H, W, priors * values) and a
    reshape to (-1, values) each row belongs to one prior.

    Returns:
        Nothing for a head that decodes in its own way (GFL, YOLOX, ...), or with an NMS other than
        mmdet's ``'nms'`` for each class. Otherwise ``decode``, with the plain values that
        docs/description.md lists.
    """
    if not is_decoded(head) or find_decoding(head) != BASE:
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
        test_cfg=complete_test_cfg(head),
        box_transform_applied=type(coder).__name__ == 'DistancePointBBoxCoder',
    )
    return dict(decode=json.loads(json.dumps(described, default=Tensor.tolist)))
