"""One-stage detectors of mmdet: the maps of the head, or boxes, scores and labels."""

import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from mmengine.config import Config, ConfigDict
from mmengine.structures import InstanceData
from torch import Tensor, nn

from mmcare.export.errors import Argument, RequestError
from mmcare.export.plain_operators import nms_mask, nms_mask_operator
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
from mmcare.export.tasks.matching import Detected, distances, leads_of_missing, surplus
from mmcare_runtime.results import read_detections

BOXES, CENTERS = ('cls_score', 'bbox_pred'), ('cls_score', 'bbox_pred', 'centerness')
FACTORS = ('cls_score', 'bbox_pred', 'iou_pred')
# What the maps of each level are called, in the order of the head's `forward`, by the class of the
# head or of its nearest parent.
MAP_NAMES: dict[str, Sequence[str]] = {
    'ATSSHead': CENTERS,
    'AutoAssignHead': ('cls_score', 'bbox_pred', 'objectness'),
    'DDODHead': FACTORS,
    'FCOSHead': CENTERS,
    'FoveaHead': BOXES,
    'GFLHead': BOXES,
    'PAAHead': FACTORS,
    'RTMDetHead': BOXES,
    'RetinaHead': BOXES,
    'RetinaSepBNHead': BOXES,
    'SSDHead': BOXES,
    'TOODHead': BOXES,
    'YOLOFHead': BOXES,
    'YOLOXHead': ('cls_score', 'bbox_pred', 'objectness'),
}
CANDIDATES = 1000  # boxes for NMS; mmdet's own configs keep 1000 to 30000 per level
MAX_DETECTIONS = 100  # COCO's metrics look at 100 boxes per image


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
        if decodes and not describe_decoding(self.head):
            raise RequestError(
                f'the {type(self.head).__name__} has a decoding of its own, or not the plain NMS '
                'of each class: use raw outputs, at the top left'
            )

    def post_process(
        self, outputs: Outputs, shape: Shape, output_format: OutputFormat, options: Options
    ) -> PostProcess:
        """Make the module that decodes boxes."""
        number = options.get('max_detections', MAX_DETECTIONS)
        results = Boxes(self.head, outputs, shape, number, output_format)
        if 'max_detections' in options:
            results.metadata['test_cfg']['max_per_img'] = results.number
        return results

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
            boxes = clip_boxes_to_image(boxes, sample.metainfo['img_shape'])  # without the padding
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
        post_process = self.head._bbox_post_process

        def move_back(
            results: InstanceData, *args: Any, img_meta: Any, **kwargs: Any
        ) -> InstanceData:
            """Move boxes from the middle of the image back to the picture."""
            from torchvision.ops import clip_boxes_to_image  # it imports PyTorch's compiler

            left, right, top, bottom = img_meta['img_padding_size']
            height, width = img_meta['img_shape']
            boxes = results.bboxes - results.bboxes.new_tensor([left, top] * 2)
            results.bboxes = clip_boxes_to_image(
                boxes, (height - top - bottom, width - left - right)
            )
            return post_process(results, *args, img_meta=img_meta, **kwargs)

        return [(self.head, '_bbox_post_process', move_back)]


def read_test_cfg(test_cfg: Any) -> dict[str, Any] | None:
    """Return a ``test_cfg`` that names its NMS; None if the NMS is not mmcv's ``nms`` per class.

    In mmdet's pure-Python configs, the type is the function itself.
    """
    nms = dict((test_cfg or {}).get('nms') or {})  # if None, mmdet skips NMS
    kind = nms.get('type', 'nms')
    if getattr(kind, '__module__', '') == 'mmcv.ops.nms':
        kind = kind.__name__
    others = nms.keys() - {'type', 'iou_threshold', 'class_agnostic', 'split_thr'}
    if kind != 'nms' or nms.get('class_agnostic') or others or 'iou_threshold' not in nms:
        return None
    return dict(test_cfg, nms=dict(nms, type=kind))


def limit_boxes(test_cfg: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return a ``test_cfg`` whose ``max_per_img`` is at most the number of boxes in a file."""
    most = test_cfg.get('max_per_img', -1)  # not positive: all of them
    return dict(test_cfg, max_per_img=min(most, number) if most > 0 else number)


def describe_decoding(head: Any) -> dict[str, Any]:
    """Describe how boxes and scores are decoded from the maps of a one-stage detector.

    Maps are (1, priors * values, H, W): after a transposition to (H, W, priors * values) and a
    reshape to (-1, values) each row belongs to one prior.

    Returns:
        Nothing for a head that decodes in its own way (GFL, YOLOX, ...), or with an NMS other than
        mmdet's ``'nms'`` for each class. Otherwise ``decode``, with the plain values that
        docs/description.md lists.
    """
    for name in ('predict_by_feat', '_predict_by_feat_single', '_bbox_post_process'):
        method = getattr(head, name, None)
        if not getattr(method, '__qualname__', '').startswith('BaseDenseHead.'):
            return {}
    test_cfg = read_test_cfg(head.test_cfg)
    if test_cfg is None:
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
        test_cfg=test_cfg,
        box_transform_applied=type(coder).__name__ == 'DistancePointBBoxCoder',
    )
    return dict(decode=json.loads(json.dumps(described, default=Tensor.tolist)))


class Detections(PostProcess):
    """Boxes, scores and labels, as a format writes them, followed by masks, if there are any.

    ``boxes`` (1, N, 4), ``scores`` (1, N), ``labels`` (1, N), the best first; unused rows have
    score 0.
    """

    sides: Tensor

    def __init__(self, shape: Shape, output_format: OutputFormat, kinds: Sequence[str]) -> None:
        super().__init__()
        self.format = output_format
        height, width = shape
        self.register_buffer('sides', torch.tensor([width, height, width, height]).float())
        names = dict(boxes=output_format.box_name, scores=output_format.score_name)
        self.outputs = [dict(name=names.get(kind, kind), kind=kind) for kind in kinds]
        scale = self.sides.tolist() if output_format.relative else [1.0] * 4
        self.outputs[0] |= dict(box_format=output_format.box_format, scale=scale)

    def write(self, boxes: Tensor, scores: Tensor, labels: Tensor) -> list[Tensor]:
        """Write boxes (N, 4), scores (N,) and labels (N,) as the format says."""
        results = [self.write_boxes(boxes)[None], scores[None], labels[None].to(self.format.labels)]
        return results + [(scores > 0).float().sum()[None]] * self.format.with_count

    def write_boxes(self, boxes: Tensor) -> Tensor:
        """Write boxes (N, 4), x1, y1, x2, y2 as shares of the image, as the format says."""
        if self.format.box_format == 'cxcywh':
            low, high = boxes.chunk(2, 1)
            boxes = torch.cat([(low + high) / 2, high - low], 1)
        return boxes if self.format.relative else boxes * self.sides

    def read_boxes(self, boxes: Tensor) -> Tensor:
        """Read boxes (N, 4) of a file; the reverse of :meth:`write_boxes`."""
        boxes = boxes if self.format.relative else boxes / self.sides
        if self.format.box_format == 'cxcywh':
            center, size = boxes.chunk(2, 1)
            boxes = torch.cat([center - size / 2, center + size / 2], 1)
        return boxes

    def read_results(self, results: Sequence[Any]) -> Detected:
        """Read the objects of a file; unused rows have score 0."""
        boxes, scores, labels = (torch.as_tensor(x)[0] for x in results[:3])
        return Detected(self.read_boxes(boxes), scores, labels.long())

    def suppress(
        self,
        boxes: Tensor,
        iou: float,
        labels: Tensor | None = None,
        classes: int = 1,
        valid: Tensor | None = None,
    ) -> Tensor:
        """Return 1 for boxes (N, 4) that stay, from the best to the worst, and 0 for others.

        Only boxes of the same label are compared. Invalid boxes do not stay.
        """
        labels = labels if classes > 1 else None
        if self.format.nms == 'operator':
            return nms_mask_operator(boxes, iou, labels, classes, valid)
        return nms_mask(boxes, iou, labels, valid)


class Boxes(Detections):
    """Maps of a one-stage detector to boxes, scores and labels, as mmdet's base head decodes them.

    The boxes must equal those of ``decode_boxes`` in :mod:`mmcare_runtime.results`, as a test in
    ``tests/test_export/test_postprocessing.py`` shows.

    Without NMS, the outputs are all ``boxes`` (P, 4), and ``scores`` (P, K) for each class, or
    (1, P, 4) and (1, P, K) if the format says so.
    """

    priors: Tensor
    pair_rows: Tensor
    pair_labels: Tensor

    def __init__(
        self,
        head: Any,
        raw: Outputs,
        shape: Shape,
        number: int,
        output_format: OutputFormat,
    ) -> None:
        kinds = ['boxes', 'scores'] + ['labels'] * output_format.has_nms
        super().__init__(shape, output_format, kinds + ['count'] * output_format.with_count)
        generator, config = head.prior_generator, read_test_cfg(head.test_cfg)
        assert config is not None, 'others are refused'
        self.levels = len(generator.strides)
        self.classes, self.is_sigmoid = head.cls_out_channels, head.use_sigmoid_cls
        self.decode = head.bbox_coder.decode
        sizes = [output.shape[2:] for output in raw[: self.levels]]
        priors = torch.cat(generator.grid_priors(sizes, device='cpu'))
        self.register_buffer('priors', priors)
        most = config.get('nms_pre', -1)  # not positive: all of them
        self.candidates = min(most if most > 0 else CANDIDATES, CANDIDATES, len(priors))
        self.number, self.iou = min(number, self.candidates), config['nms']['iou_threshold']
        self.least = config.get('min_bbox_size', -1)
        # Tables of the candidate and of the class in each pair. Runtimes would compute both by a
        # division in floats, and float16 does not have all integers above 2048.
        self.labels = self.classes if self.is_sigmoid else self.classes - 1  # without background
        rows, labels = torch.arange(self.candidates), torch.arange(self.labels)
        self.register_buffer('pair_rows', rows.repeat_interleave(self.labels))
        self.register_buffer('pair_labels', labels.repeat(self.candidates))
        test_cfg = limit_boxes(config, self.number) if output_format.has_nms else config
        self.metadata = dict(nms=output_format.nms, test_cfg=test_cfg)

    def read(self, raw: Outputs) -> tuple[Tensor, Tensor]:
        """Return all boxes (P, 4), x1, y1, x2, y2 as shares of the image, and scores (P, K)."""

        def rows(start: int, values: int) -> Tensor:
            maps = raw[start * self.levels : (start + 1) * self.levels]
            return torch.cat([x.permute(0, 2, 3, 1).reshape(-1, values) for x in maps])

        scores = rows(0, self.classes)
        scores = scores.sigmoid() if self.is_sigmoid else scores.softmax(1)[:, :-1]
        if len(raw) > 2 * self.levels:
            scores = scores * rows(2, 1).sigmoid()
        return (self.decode(self.priors, rows(1, 4)) / self.sides).clamp(0, 1), scores

    def forward(self, raw: Outputs) -> tuple[Tensor, ...]:
        """Decode; then keep the best boxes if NMS is in the network."""
        boxes, scores = self.read(raw)
        if not self.format.has_nms:
            everything = self.write_boxes(boxes), scores
            return tuple(x[None] for x in everything) if self.format.with_batch else everything
        if self.least >= 0:  # boxes outside of the image have no area
            sizes = (boxes[:, 2:] - boxes[:, :2]) * self.sides[:2]
            scores = scores * (sizes.amin(1, True) > self.least).float()
        best = scores.amax(1).topk(self.candidates).indices
        scores, pairs = scores.index_select(0, best).flatten().topk(self.candidates)
        boxes = boxes.index_select(0, best)
        boxes = boxes.index_select(0, self.pair_rows.index_select(0, pairs))
        labels = self.pair_labels.index_select(0, pairs)
        kept = self.suppress(boxes, self.iou, labels, self.labels)
        scores, order = (scores * kept).topk(self.number)
        boxes, labels = boxes.index_select(0, order), labels.index_select(0, order)
        return tuple(self.write(boxes, scores, labels))

    def max_error(self, raw: Outputs, results: Sequence[Any]) -> float:
        """Compare a file's results with candidates and with the results that it should have.

        Returns:
            The largest of: the distance of a box and its score from the nearest candidate of its
            class; the lead of a missing box's score over the scores of its neighbours, or over the
            last score that takes part in NMS; 1 for a surplus box.
        """
        if not self.format.has_nms:
            return super().max_error(raw, results)
        rows = self.read_results(results)
        found, wanted = rows.used(), self.read_results(self(raw))
        candidates, scores = self.read(raw)
        strange = distances(found, candidates[:, None], scores)
        last = scores.flatten().topk(self.candidates).values[-1]  # the last score in NMS
        lead = wanted.scores - torch.maximum(rows.scores.min(), last)
        missing = leads_of_missing(wanted, found, self.iou, lead[:, None])
        return torch.cat([strange, missing, surplus(found, self.iou)]).max().item()
