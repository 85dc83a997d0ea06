"""What follows the network of a one-stage detector: boxes, scores and labels."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from mmengine.config import ConfigDict
from torch import Tensor

from mmcare.export.plain_operators import nms_mask, nms_mask_operator
from mmcare.export.tasks.base import (
    Options,
    OutputFormat,
    Outputs,
    PostProcess,
    Shape,
    is_of_class,
    max_rel_error,
)
from mmcare.export.tasks.matching import (
    Detected,
    changes_of_classes,
    distances,
    leads_of_missing,
    nearest_rows,
    surplus,
)

# mmdet's methods that decode all maps of an image, and whether they clip boxes to the image. All
# but YOLOX's select by `filter_scores_and_topk`.
BASE = 'BaseDenseHead._predict_by_feat_single'
DECODING = {
    BASE: True,
    'FoveaHead._predict_by_feat_single': True,
    'GFLHead._predict_by_feat_single': True,
    'RepPointsHead._predict_by_feat_single': True,
    'TOODHead._predict_by_feat_single': False,
    'YOLOV3Head.predict_by_feat': False,
    'YOLOXHead.predict_by_feat': False,
}
MAX_DETECTIONS = 100  # COCO's metrics look at 100 boxes per image
CANDIDATES = 1000  # boxes for NMS; mmdet's own configs keep 1000 to 30000 per level


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


def find_decoding(head: Any) -> str:
    """Return the name of the method that decodes all maps of an image."""
    method: Any = getattr(head, 'predict_by_feat', None)
    if getattr(method, '__qualname__', '') == 'BaseDenseHead.predict_by_feat':
        method = head._predict_by_feat_single
    return getattr(method, '__qualname__', '')


def is_decoded(head: Any) -> bool:
    """Say whether files can decode a head's maps, and select boxes as mmdet does."""
    post_process = getattr(getattr(head, '_bbox_post_process', None), '__qualname__', '')
    known = 'BaseDenseHead._bbox_post_process', 'YOLOXHead._bbox_post_process'
    is_known = find_decoding(head) in DECODING and post_process in known
    return is_known and read_test_cfg(head.test_cfg) is not None


def clips_boxes(head: Any) -> bool:
    """Say whether mmdet clips boxes to the image."""
    coder = getattr(head, 'bbox_coder', None)
    return DECODING[find_decoding(head)] and getattr(coder, 'clip_border', True)


def complete_test_cfg(head: Any) -> dict[str, Any]:
    """Return the ``test_cfg`` of a head with ``clip_border=False`` if boxes are not clipped."""
    test_cfg = read_test_cfg(head.test_cfg)
    assert test_cfg is not None, 'others are refused'
    return test_cfg if clips_boxes(head) else dict(test_cfg, clip_border=False)


class Detections(PostProcess):
    """Boxes, scores and labels, as a format writes them, followed by masks, if there are any.

    ``boxes`` (1, N, 4), ``scores`` (1, N), ``labels`` (1, N), the best first; unused rows have
    score 0.
    """

    sides: Tensor

    def __init__(
        self,
        shape: Shape,
        options: Options,
        output_format: OutputFormat,
        has_masks: bool = False,
    ) -> None:
        super().__init__()
        self.format, self.options = output_format, options
        self.number = options.get('max_detections', MAX_DETECTIONS)
        kinds = ['boxes', 'scores'] + ['labels'] * output_format.has_nms
        kinds += ['count'] * output_format.with_count + ['masks'] * has_masks
        height, width = shape
        self.register_buffer('sides', torch.tensor([width, height, width, height]).float())
        names = dict(boxes=output_format.box_name, scores=output_format.score_name)
        self.outputs = [dict(name=names.get(kind, kind), kind=kind) for kind in kinds]
        scale = self.sides.tolist() if output_format.relative else [1.0] * 4
        self.outputs[0] |= dict(box_format=output_format.box_format, scale=scale)

    def describe(self, test_cfg: Mapping[str, Any], total: int = 0, **more: Any) -> None:
        """Describe how apps choose boxes, at most as many as a file has, or as were asked for.

        Without NMS in the network, a file has a total of boxes.
        """
        number = self.number if self.format.has_nms else total
        most = test_cfg.get('max_per_img', -1)  # not positive: all of them
        most = min(most, number) if most > 0 else number
        most = self.number if 'max_detections' in self.options else most
        self.metadata = dict(nms=self.format.nms, test_cfg=dict(test_cfg, max_per_img=most), **more)

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

    one_class = False  # each box only has its best class
    priors: Tensor
    pair_rows: Tensor
    pair_labels: Tensor

    def __init__(
        self,
        head: Any,
        raw: Outputs,
        shape: Shape,
        options: Options,
        output_format: OutputFormat,
    ) -> None:
        super().__init__(shape, options, output_format)
        self.levels = len(head.prior_generator.strides)
        sizes = [(output.shape[2], output.shape[3]) for output in raw[: self.levels]]
        total = self.keep_decoder(head, sizes, shape)
        config = complete_test_cfg(head)
        self.clips = clips_boxes(head)
        self.least = config.get('min_bbox_size', -1)
        most = config.get('nms_pre', -1)  # not positive: all of them
        most = min(most if most > 0 else CANDIDATES, CANDIDATES)
        self.set_selection(most, total, head.num_classes, config['nms']['iou_threshold'])
        self.describe(config, total)

    def set_selection(self, most: int, total: int, labels: int, iou: float) -> None:
        """Say how many boxes are chosen for NMS and after it.

        Args:
            most: The largest number of pairs of a box and a class in NMS.
            total: Number of all boxes.
            labels: Number of classes.
            iou: Threshold of NMS.
        """
        self.candidates, self.pairs = min(most, total), min(most, total * labels)
        self.number, self.labels, self.iou = min(self.number, self.pairs), labels, iou
        # Tables of the candidate and of the class in each pair. Runtimes would compute both by a
        # division in floats, and float16 does not have all integers above 2048.
        rows, classes = torch.arange(self.candidates), torch.arange(labels)
        self.register_buffer('pair_rows', rows.repeat_interleave(labels))
        self.register_buffer('pair_labels', classes.repeat(self.candidates))

    def keep_decoder(self, head: Any, sizes: Sequence[Shape], shape: Shape) -> int:
        """Keep what decodes maps of these sizes; return the number of priors."""
        self.classes, self.is_sigmoid = head.cls_out_channels, head.use_sigmoid_cls
        self.decode = head.bbox_coder.decode
        priors = torch.cat(head.prior_generator.grid_priors(sizes, device='cpu'))
        self.register_buffer('priors', priors)
        return len(priors)

    def rows(self, raw: Outputs, start: int, values: int) -> Tensor:
        """Return the rows (P, values) of all levels of a kind of maps."""
        maps = raw[start * self.levels : (start + 1) * self.levels]
        return torch.cat([x.permute(0, 2, 3, 1).reshape(-1, values) for x in maps])

    def decode_all(self, raw: Outputs) -> tuple[Tensor, Tensor]:
        """Return all boxes (P, 4), x1, y1, x2, y2 in pixels of the image, and scores (P, K)."""
        scores = self.rows(raw, 0, self.classes)
        scores = scores.sigmoid() if self.is_sigmoid else scores.softmax(1)[:, :-1]
        if len(raw) > 2 * self.levels:
            scores = scores * self.rows(raw, 2, 1).sigmoid()
        return self.decode(self.priors, self.rows(raw, 1, 4)), scores

    def read(self, raw: Outputs) -> tuple[Tensor, Tensor]:
        """Return all boxes (P, 4), x1, y1, x2, y2 as shares of the image, and scores (P, K)."""
        boxes, scores = self.decode_all(raw)
        boxes = boxes / self.sides
        return boxes.clamp(0, 1) if self.clips else boxes, scores

    def forward(self, raw: Outputs) -> tuple[Tensor, ...]:
        """Decode; then keep the best boxes if NMS is in the network."""
        boxes, scores = self.read(raw)
        if self.one_class:
            scores = scores * (scores >= scores.amax(1, True)).to(scores.dtype)
        if not self.format.has_nms:
            everything = self.write_boxes(boxes), scores
            return tuple(x[None] for x in everything) if self.format.with_batch else everything
        if self.least >= 0:  # boxes outside of the image have no area
            sizes = (boxes[:, 2:] - boxes[:, :2]) * self.sides[:2]
            scores = scores * (sizes.amin(1, True) > self.least).float()
        best = scores.amax(1).topk(self.candidates).indices
        scores, pairs = scores.index_select(0, best).flatten().topk(self.pairs)
        boxes = boxes.index_select(0, best)
        boxes = boxes.index_select(0, self.pair_rows.index_select(0, pairs))
        labels = self.pair_labels.index_select(0, pairs)
        if self.iou < 1:
            scores = scores * self.suppress(boxes, self.iou, labels, self.labels)
        scores, order = scores.topk(self.number)
        boxes, labels = boxes.index_select(0, order), labels.index_select(0, order)
        return tuple(self.write(boxes, scores, labels))

    def max_error(self, raw: Outputs, results: Sequence[Any]) -> float:
        """Compare a file's results with candidates and with the results that it should have.

        Returns:
            The largest of: the distance of a box and its score from the nearest candidate of its
            class; the lead of a missing box's score over the scores of its neighbours, or over the
            last score that takes part in NMS, or what is left of its sides above
            ``min_bbox_size``; 1 for a surplus box. If each box only has its best class, rounding
            may choose another one, if their scores differ by as much.
        """
        if not self.format.has_nms:
            return self.max_error_of_all(raw, results)
        rows = self.read_results(results)
        found, wanted = rows.used(), self.read_results(self(raw))
        candidates, scores = self.read(raw)
        best = scores.amax(1, True)
        below = best - scores if self.one_class else None
        strange = distances(found, candidates[:, None], scores, below)
        last = scores.flatten().topk(self.pairs).values[-1]  # the last score in NMS
        leads = [wanted.scores - torch.maximum(rows.scores.min(), last)]
        if self.least >= 0:  # by how much a side must change for the box to be removed
            lengths = wanted.boxes[:, 2:] - wanted.boxes[:, :2]
            leads.append((lengths - self.least / self.sides[:2]).amin(1))
        if self.one_class and self.labels > 1:
            first, second = scores.topk(2, 1).values.unbind(1)
            leads.append((first - second)[nearest_rows(wanted, candidates, best)])
        missing = leads_of_missing(wanted, found, self.iou, torch.stack(leads, 1))
        return torch.cat([strange, missing, surplus(found, self.iou)]).max().item()

    def max_error_of_all(self, raw: Outputs, results: Sequence[Any]) -> float:
        """Compare all boxes; where two classes have nearly the same score, either may be kept."""
        if not self.one_class or self.labels == 1:
            return super().max_error(raw, results)
        _, scores = self.read(raw)
        found = torch.as_tensor(results[1]).reshape(scores.shape)
        changes = changes_of_classes(scores, found).max() / scores.max()
        boxes = max_rel_error(self(raw)[:1], results[:1])
        return np.max([boxes, changes.item()]).item()


class OwnBoxes(Boxes):
    """Boxes of heads with a decoding of their own, such as GFL, TOOD, YOLOv3 and YOLOX.

    The head's own ``predict_by_feat`` decodes all priors; what it selects by is replaced.
    """

    def keep_decoder(self, head: Any, sizes: Sequence[Shape], shape: Shape) -> int:
        """Keep the head without its layers, and the priors of each level."""
        self.one_class = is_of_class(head, 'YOLOXHead')
        self.head: Any = deepcopy(head)
        for name, child in [*self.head.named_children()]:
            if any(True for _ in child.parameters()):
                delattr(self.head, name)
        options = dict(with_stride=True) if self.one_class else {}
        priors = head.prior_generator.grid_priors(sizes, device='cpu', **options)
        for level, values in enumerate(priors):
            self.register_buffer(f'priors{level}', values)
        self.shape, self.least_factor = shape, head.test_cfg.get('conf_thr', -1)
        return sum(map(len, priors))

    def decode_all(self, raw: Outputs) -> tuple[Tensor, Tensor]:
        """Return all boxes (P, 4), x1, y1, x2, y2 in pixels of the image, and scores (P, K)."""
        priors = [getattr(self, f'priors{level}') for level in range(self.levels)]
        if is_of_class(self.head, 'YOLOXHead'):  # mmdet selects by a condition on the data
            values, classes = self.rows(raw, 1, 4), self.rows(raw, 0, self.labels)
            boxes = self.head._bbox_decode(torch.cat(priors), values)
            return boxes, classes.sigmoid() * self.rows(raw, 2, 1).sigmoid()

        def keep_all(
            scores: Tensor, score_thr: float, topk: int, results: Any = None
        ) -> tuple[Any, ...]:
            return scores, scores[:, 0], slice(None), results

        head: Any = self.head
        method = getattr(head, find_decoding(head).rpartition('.')[2])
        maps = [[*raw[at : at + self.levels]] for at in range(0, len(raw), self.levels)]
        metas = [dict(img_shape=self.shape)]
        test_cfg = ConfigDict(head.test_cfg, conf_thr=-1)
        with (
            patch.dict(method.__globals__, filter_scores_and_topk=keep_all),
            patch.object(head.prior_generator, 'grid_priors', lambda *_, **__: priors),
            patch.object(head, '_bbox_post_process', lambda results, *_, **__: results),
        ):
            (results,) = head.predict_by_feat(*maps, batch_img_metas=metas, cfg=test_cfg)
        scores = results.scores
        if 'score_factors' in results:
            factors = results.score_factors[:, None]
            if self.least_factor > 0:
                factors = factors * (factors >= self.least_factor).to(factors.dtype)
            scores = scores * factors
        return results.bboxes, scores
