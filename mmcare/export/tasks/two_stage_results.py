"""What follows the network of a two-stage detector: proposals, boxes, and masks within them."""

from collections.abc import Sequence
from copy import deepcopy
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from mmcare.export.plain_operators import RoIAlign
from mmcare.export.tasks.base import Options, OutputFormat
from mmcare.export.tasks.matching import (
    IOU_MARGIN,
    Detected,
    distances,
    leads_of_missing,
    surplus,
)
from mmcare.export.tasks.one_stage_results import (
    CANDIDATES,
    Detections,
    read_test_cfg,
)

# What float16 may add to a box's size: a share of the size, and two steps of coordinates above 0.5.
FLOAT16_ROUNDING, FLOAT16_STEPS = 2e-3, 1e-3
REMOVED = 6e4  # below each logit, and within float16's range


def round_sizes(boxes: Tensor) -> list[Tensor]:
    """Return boxes (N, 4), as shares, with the least and the largest size that float16 gives them.

    A size at a bound decides from which level's map a box is taken, and one of whole cells decides
    the number of samples.
    """
    low, high = boxes.chunk(2, 1)
    margin = FLOAT16_ROUNDING * (high - low) + FLOAT16_STEPS
    sizes = (high - low - margin).clamp(min=0), high - low + margin
    return [torch.cat([low, low + size], 1) for size in sizes]


def list_stages(module: Any) -> list[Any]:
    """Return the modules of all stages of a cascade, or the only one."""
    return [*module] if isinstance(module, nn.ModuleList) else [module]


class RoIAlignOperator(nn.Module):
    """RoIAlign by the operator of runtimes that have one; called as :class:`RoIAlign` is.

    Args:
        layer: mmcv's RoIAlign.
        shape: Height and width of the image.
    """

    sides: Tensor
    cell: Tensor

    def __init__(self, layer: Any, shape: tuple[int, int]) -> None:
        super().__init__()
        self.options = layer.output_size, layer.spatial_scale, layer.sampling_ratio, layer.aligned
        self.aligned, stride = layer.aligned, 1 / layer.spatial_scale
        self.register_buffer('sides', torch.tensor([*shape[::-1]] * 2).float())
        self.register_buffer('cell', torch.tensor([0, 0, stride, stride]))

    def forward(self, x: Tensor, boxes: Tensor, weights: Tensor) -> Tensor:
        """Average a map (1, C, H, W) in boxes (N, 4), with weights (N,) 0 or 1, to (N, h, w, C)."""
        from torchvision.ops import roi_align  # here, since backbones do not need it

        if self.aligned:  # an empty box gives 0, but NaN in OpenVINO
            sides = boxes[:, 2:] - boxes[:, :2]
            weights = weights * (sides.amin(1) > 0).to(weights.dtype)
        weights = weights[:, None]
        # Boxes with weight 0 become one cell, which has few samples.
        rois = boxes * self.sides * weights + self.cell * (1 - weights)
        rois = torch.cat([torch.zeros_like(weights), rois], 1)
        averages = roi_align(x, rois, *self.options) * weights[:, :, None, None]
        return averages.permute(0, 2, 3, 1)


class RoIExtractor(nn.Module):
    """mmdet's ``SingleRoIExtractor``, for boxes as shares of an image.

    Each box is averaged on all maps, since runtimes need results of fixed shapes. Only the map of
    the box's level has a weight other than 0.
    """

    def __init__(
        self, extractor: Any, maps: Sequence[Tensor], shape: tuple[int, int], operator: bool
    ) -> None:
        super().__init__()
        layers = extractor.roi_layers
        self.aligns = nn.ModuleList(
            RoIAlignOperator(layer, shape)
            if operator
            else RoIAlign(
                (x.shape[2], x.shape[3]),
                (shape[0] * layer.spatial_scale, shape[1] * layer.spatial_scale),
                layer.output_size,
                layer.sampling_ratio,
                layer.aligned,
            )
            for x, layer in zip(maps, layers, strict=False)
        )
        # Level i begins at finest_scale * 2^i; mmdet adds 1e-6 to the quotient.
        side = (shape[0] * shape[1]) ** 0.5
        self.bounds = [
            extractor.finest_scale * (2**level - 1e-6) / side for level in range(1, len(layers))
        ]

    def reach(self, boxes: Tensor) -> list[Tensor]:
        """Return 1 for boxes (N, 4) that are large enough for a level, else 0, for each level."""
        sides = boxes[:, 2:] - boxes[:, :2]
        scales = (sides[:, 0] * sides[:, 1]).sqrt()
        reached = [(scales >= bound).to(boxes.dtype) for bound in self.bounds]
        return [torch.ones_like(scales), *reached]

    def forward(self, maps: Sequence[Tensor], boxes: Tensor) -> Tensor:
        """Average maps (1, C, H, W) in boxes (N, 4) to (N, C, h, w)."""
        reached = self.reach(boxes)  # 1, ..., 1, 0, ..., 0
        higher = [*reached[1:], torch.zeros_like(reached[0])]
        weights = [low - high for low, high in zip(reached, higher, strict=True)]
        averages = [
            align(x, boxes, weight)
            for align, x, weight in zip(self.aligns, maps, weights, strict=False)
        ]
        return sum(averages[1:], averages[0]).permute(0, 3, 1, 2)


class TwoStageResults(Detections):
    """Maps and proposals of a two-stage detector to boxes, scores, labels and masks, as mmdet does.

    ``masks`` (1, N, h, w), for a model with a mask head, are the probability of the box's class at
    points within the box. A cascade has several stages: each takes the boxes of the one before, and
    logits and masks are averages of all.

    Args:
        model: An mmdet model; its heads are copied.
        raw: Outputs of the task, for their sizes.
        shape: Height and width of the image.
        options: ``proposals``, their number; ``max_detections``, the largest number of boxes.
        output_format: How results are written, and whether the runtime has operators for RoIAlign
            and NMS; NMS is always in the network.
    """

    pair_labels: Tensor
    first_masks: Tensor
    box_rois: Any
    box_heads: Any

    def __init__(
        self,
        model: Any,
        raw: Sequence[Tensor],
        shape: tuple[int, int],
        options: Options,
        output_format: OutputFormat,
    ) -> None:
        rpn, head = model.rpn_head, model.roi_head
        super().__init__(shape, options, output_format, head.with_mask)
        if head.with_mask:
            self.outputs[-1]['layout'] = 'NCHW'  # N masks, in every format
        self.levels = len(rpn.prior_generator.strides)
        operator = output_format.nms == 'operator'
        self._build_rpn(rpn, raw)
        maps = raw[: len(raw) - 2 * self.levels]

        def extractors(name: str) -> nn.ModuleList:
            stages = list_stages(getattr(head, name)) if hasattr(head, name) else []
            return nn.ModuleList(RoIExtractor(x, maps, shape, operator) for x in stages)

        self.box_rois = extractors('bbox_roi_extractor')
        self.box_heads = nn.ModuleList(deepcopy(list_stages(head.bbox_head)))
        self.mask_rois, self.mask_heads = nn.ModuleList(), nn.ModuleList()
        if head.with_mask:
            self.mask_rois = extractors('mask_roi_extractor')
            self.mask_heads = nn.ModuleList(deepcopy(list_stages(head.mask_head)))
        self.iou = head.test_cfg.nms.iou_threshold
        self.classes: int = self.box_head.num_classes
        self.proposals = min(options['proposals'], sum(self.candidates))
        self.pairs = min(self.proposals * self.classes, CANDIDATES)
        self.number = min(self.number, self.pairs)
        # Integers from tables: float16 does not have all above 2048, and Core ML divides in floats.
        labels, first = torch.arange(self.classes), torch.arange(self.number) * self.classes
        self.register_buffer('pair_labels', labels.repeat(self.proposals))
        self.register_buffer('first_masks', first)
        self.describe(read_test_cfg(head.test_cfg) or {}, proposals=self.proposals)

    @property
    def box_head(self) -> Any:
        """The head of the last stage."""
        return self.box_heads[-1]

    def _build_rpn(self, rpn: Any, raw: Sequence[Tensor]) -> None:
        config = rpn.test_cfg
        self.rpn_coder, self.rpn_iou = rpn.bbox_coder, config.nms.iou_threshold
        self.rpn_classes, self.rpn_sigmoid = rpn.cls_out_channels, rpn.use_sigmoid_cls
        sizes = [x.shape[2:] for x in raw[-self.levels :]]
        self.candidates: list[int] = []  # of each level
        for level, priors in enumerate(rpn.prior_generator.grid_priors(sizes, device='cpu')):
            self.register_buffer(f'priors{level}', priors / self.sides)
            most = config.get('nms_pre', -1)  # not positive: all of them
            self.candidates.append(min(most, len(priors)) if most > 0 else len(priors))
        self.least = config.get('min_bbox_size', -1)

    def forward(self, raw: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Propose boxes, classify and refine them, keep the best, and compute their masks."""
        maps = raw[: len(raw) - 2 * self.levels]
        proposals, valid, _ = self.propose(raw)
        boxes, scores, labels, _ = self.detect(maps, proposals, valid)
        results = self.write(boxes, scores, labels)
        if len(self.mask_heads):
            results.append(self.segment(maps, boxes, labels)[None])
        return tuple(results)

    def find_candidates(self, raw: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Return the RPN's best boxes (N, 4) of each level, as shares, and their logits (N,)."""
        candidates = []
        for level, number in enumerate(self.candidates):
            logits, deltas = (
                raw[level - part * self.levels].permute(0, 2, 3, 1) for part in (2, 1)
            )
            logits, deltas = logits.reshape(-1, self.rpn_classes), deltas.reshape(-1, 4)
            # If there are two classes, the second is the background. Logits order boxes as scores
            # do, but float16 rounds different scores to equal ones.
            logits = logits[:, 0] if self.rpn_sigmoid else logits[:, 0] - logits[:, 1]
            logits, best = logits.topk(number)
            priors = getattr(self, f'priors{level}').index_select(0, best)
            boxes = self.rpn_coder.decode(priors, deltas.index_select(0, best))
            boxes = boxes.clamp(0, 1) if self.rpn_coder.clip_border else boxes
            candidates.append((boxes, logits))
        return candidates

    def propose(self, raw: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return proposals (P, 4) as shares, whether each is in use, as 1 or 0, and logits."""
        candidates = self.find_candidates(raw)
        kept = []
        for boxes, _ in candidates:
            valid = None
            if self.least >= 0:
                sides = (boxes[:, 2:] - boxes[:, :2]) - self.least / self.sides[:2]
                valid = (sides.amin(1) > 0).to(boxes.dtype)
            kept.append(self.suppress(boxes, self.rpn_iou, valid=valid))
        boxes, logits = (torch.cat(values) for values in zip(*candidates, strict=True))
        valid = torch.cat(kept)
        # By logits, as above. Removed boxes come last.
        _, best = (logits * valid - REMOVED * (1 - valid)).topk(self.proposals)
        chosen = [x.index_select(0, best) for x in (boxes, valid, logits)]
        return chosen[0], chosen[1], chosen[2]

    def classify(self, maps: Sequence[Tensor], boxes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the last stage's boxes (P, 4), scores (P, K) and deltas.

        Deltas of proposals are (P * K, 4), or (P, 4) for all classes.
        """
        stages = [*zip(self.box_rois, self.box_heads, strict=True)]
        logits, deltas = self.box_heads[0](self.box_rois[0](maps, boxes))
        for (_, before), (rois, head) in pairwise(stages):
            boxes = self.refine(boxes, deltas, before)
            more, deltas = head(rois(maps, boxes))
            logits = logits + more
        logits = logits / len(stages) if len(stages) > 1 else logits
        return boxes, logits.softmax(1)[:, : self.classes], deltas.reshape(-1, 4)

    def detect(
        self, maps: Sequence[Tensor], proposals: Tensor, valid: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return boxes (N, 4), scores (N,), labels (N,) and indices (N,) of proposal and class."""
        proposals, scores, deltas = self.classify(maps, proposals)
        scores, pairs = (scores * valid[:, None]).flatten().topk(self.pairs)
        boxes = self._repeat(proposals).index_select(0, pairs)
        deltas = self._repeat(deltas).index_select(0, pairs)
        boxes = self.refine(boxes, deltas, self.box_head)
        labels = self.pair_labels.index_select(0, pairs)
        kept = self.suppress(boxes, self.iou, labels, self.classes)
        scores, best = (scores * kept).topk(self.number)
        boxes, labels, pairs = (x.index_select(0, best) for x in (boxes, labels, pairs))
        return boxes, scores, labels, pairs

    def _repeat(self, boxes: Tensor) -> Tensor:
        """Repeat boxes (N, 4) to (N * K, 4), unless each class already has its own."""
        if boxes.shape[0] == len(self.pair_labels):
            return boxes
        return boxes[:, None].expand(-1, self.classes, -1).reshape(-1, 4)

    def refine(self, proposals: Tensor, deltas: Tensor, head: Any) -> Tensor:
        """Return the boxes (N, 4) that proposals (N, 4) and a head's deltas (N, 4) give."""
        coder = head.bbox_coder
        boxes = coder.decode(proposals, deltas)
        return boxes.clamp(0, 1) if coder.clip_border else boxes

    def segment(self, maps: Sequence[Tensor], boxes: Tensor, labels: Tensor) -> Tensor:
        """Return the masks (N, h, w) of boxes (N, 4)."""
        stages = []
        for rois, head in zip(self.mask_rois, self.mask_heads, strict=True):
            masks = head(rois(maps, boxes))
            if masks.shape[1] > 1:
                masks = masks.flatten(0, 1).index_select(0, self.first_masks + labels)
            stages.append(masks.reshape(len(boxes), *masks.shape[-2:]).sigmoid())
        return sum(stages[1:], stages[0]) / len(stages) if len(stages) > 1 else stages[0]

    def max_error(self, raw: Sequence[Tensor], results: Sequence[Any]) -> float:
        """Compare a file's results with what the network's outputs allow.

        Roundings change which proposals are kept, where they overlap as much as the threshold or
        have equal scores, and everything after them. Each result is compared with what the heads
        make of any proposal.

        Returns:
            The largest of: the distance of a box and its score from the nearest ones that a
            proposal gives for its class; the distance of its mask from the mask that the heads
            compute for the box, as a root mean square over points, since float16 moves some points
            by 2e-2; what :meth:`_find_missing` returns; 1 for a surplus box.
        """
        maps = raw[: len(raw) - 2 * self.levels]
        rows = self.read_results(results)
        found = rows.used()
        errors = [self._find_strange(maps, raw, found), surplus(found, self.iou)]
        if len(self.mask_heads):
            masks = torch.stack(
                [self.segment(maps, x, rows.labels) for x in (rows.boxes, *round_sizes(rows.boxes))]
            )
            differences = (masks - torch.as_tensor(results[-1])[0]).square().mean((2, 3)).sqrt()
            errors.append(differences.amin(0)[rows.scores > 0])
        errors.append(self._find_missing(raw, found, rows.scores.min()))
        return torch.cat(errors).max().item()

    def _find_strange(
        self, maps: Sequence[Tensor], raw: Sequence[Tensor], found: Detected
    ) -> Tensor:
        """Return how far boxes and scores are from the nearest of all that candidates give (N,).

        In float16, a candidate at the bound of two levels may be taken from either.
        """
        candidates = torch.cat([boxes for boxes, _ in self.find_candidates(raw)])
        rounded = round_sizes(candidates)
        smaller, larger = (torch.stack(self.box_rois[0].reach(x)) for x in rounded)
        at_bound = (smaller != larger).any(0)
        candidates = torch.cat([candidates, *(x[at_bound] for x in rounded)])
        nearest = torch.full_like(found.scores, torch.inf)
        for part in candidates.split(256):  # all at once would take gigabytes
            part, scores, deltas = self.classify(maps, part)
            count = 1 if self.box_head.reg_class_agnostic else self.classes
            refined = self.refine(part.repeat_interleave(count, 0), deltas, self.box_head)
            refined = refined.reshape(len(part), count, 4)
            nearest = nearest.minimum(distances(found, refined, scores))
        return nearest

    def _find_missing(self, raw: Sequence[Tensor], found: Detected, least: Tensor) -> Tensor:
        """Return, for each expected box, by how much scores must change for it to be missing (N,).

        See :func:`leads_of_missing`. Other leads are: of its score over the last score of the file;
        of its proposal's logit over those of overlapping proposals, and over the last proposal's,
        as shares of the largest logit. Its own score is the least that its proposal has with the
        sizes of :func:`round_sizes`.

        Args:
            raw: Outputs of the network.
            found: Objects in the file.
            least: The last score of the file, 0 if it has unused rows.
        """
        from torchvision.ops import box_iou

        maps = raw[: len(raw) - 2 * self.levels]
        candidates = self.find_candidates(raw)
        proposals, valid, logits = self.propose(raw)
        boxes, scores, labels, pairs = self.detect(maps, proposals, valid)
        for part in round_sizes(proposals):
            _, their_scores, _ = self.classify(maps, part)
            scores = scores.minimum(their_scores.flatten()[pairs])
        largest = torch.cat([logits for _, logits in candidates]).abs().max()
        # Where proposals are unused, no last one stands in for another.
        last = logits[-1] if valid.all() else logits.new_tensor(-torch.inf)
        rows = pairs // self.classes
        proposals, logits = proposals[rows], logits[rows]
        rivals = torch.full_like(logits, -torch.inf)
        for others, their_logits in candidates:
            overlaps = box_iou(proposals, others)
            itself = overlaps > 1 - 1e-6
            near = (overlaps > (1 - IOU_MARGIN) * self.rpn_iou) & ~itself & itself.any(1, True)
            rivals = rivals.maximum(their_logits.where(near, -torch.inf).amax(1))
        leads = [scores - least, (logits - rivals) / largest, (logits - last) / largest]
        wanted = Detected(boxes, scores, labels)
        return leads_of_missing(wanted, found, self.iou, torch.stack(leads, 1))
