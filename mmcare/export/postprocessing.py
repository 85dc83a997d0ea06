"""What files with decoded outputs compute after the network, so that apps get results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

CANDIDATES = 1000  # of a detector, which take part in NMS
MAX_DETECTIONS = 100
# After n rounds, boxes are right whose chain of overlapping better boxes is at most n long.
ROUNDS = 16
NMS_OPTIONS = {
    'max_detections': dict(
        type=int,
        metavar='N',
        help=f'boxes of decoded detectors with NMS in the file; default: {MAX_DETECTIONS}',
    )
}


@dataclass(frozen=True)
class Style:
    """How the users of a backend expect results."""

    # 'matrix': in the network, by matrix products; 'operator': by the backend's operator;
    # 'pipeline': in the file, after the network; 'outside': left to the app.
    nms: str = 'matrix'
    box_format: str = 'xyxy'  # or 'cxcywh'
    relative: bool = False  # boxes are shares of width and height, not pixels
    names: Mapping[str, str] = field(default_factory=dict)  # of kinds of results
    labels: torch.dtype = torch.int32  # of boxes
    label_map: torch.dtype = torch.uint8


class Decoder(nn.Module):
    """Turn the outputs of a network, for one image, into results."""

    outputs: list[dict[str, Any]]  # of each result: name, kind and what else there is to say
    metadata: Mapping[str, Any] = {}  # for the description

    def deviation(self, raw: Sequence[Tensor], found: Sequence[Any]) -> float:
        """Compare a file's results with those of the network's outputs."""
        return largest_deviation(self(raw), found)


class Probabilities(Decoder):
    """Logits (1, K) to probabilities."""

    def __init__(self, activation: str) -> None:
        super().__init__()
        self.activation = activation
        name = 'probabilities'
        self.outputs = [dict(name=name, kind=name, activation=activation)]

    def forward(self, raw: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (raw[0].sigmoid() if self.activation == 'sigmoid' else raw[0].softmax(1),)


class LabelMap(Decoder):
    """Logits (1, K, h, w) to the class of each pixel (1, H, W); one channel to 0 and 1."""

    classes: Tensor

    def __init__(self, head: Any, channels: int, shape: tuple[int, int], dtype: torch.dtype):
        super().__init__()
        self.shape, self.align_corners = shape, head.align_corners
        self.dtype = torch.int32 if channels > 256 and dtype == torch.uint8 else dtype
        self.outputs = [dict(name='labels', kind='labels')]
        self.threshold = head.threshold
        self.register_buffer('classes', torch.arange(max(channels, 2)).float()[None, :, None, None])

    def enlarge(self, logits: Tensor) -> Tensor:
        """Resize logits to the image, with those of class 0 if there is one channel."""
        logits = F.interpolate(logits, self.shape, None, 'bilinear', self.align_corners)
        if logits.shape[1] > 1:
            return logits
        least = torch.logit(torch.tensor(self.threshold)).item()
        return torch.cat([torch.full_like(logits, least), logits], 1)

    def forward(self, raw: Sequence[Tensor]) -> tuple[Tensor, ...]:
        logits = self.enlarge(raw[0])
        if self.dtype != torch.float32:
            return (logits.argmax(1).to(self.dtype),)
        # ncnn has no argmax: 0 where a logit is the largest, else 1, also where it is 1e-9 below.
        below = logits.amax(1, keepdim=True) - logits
        for _ in range(2):  # each factor is within the range of float16
            below = (below * 60000.0).clamp(max=1)
        return (((1 - below) * self.classes).amax(1),)

    def deviation(self, raw: Sequence[Tensor], found: Sequence[Any]) -> float:
        """Return how far chosen logits are below the best, as a share of the largest magnitude."""
        logits = self.enlarge(raw[0])
        chosen = logits.gather(1, torch.as_tensor(found[0])[:, None].long())
        return ((logits.amax(1, keepdim=True) - chosen).max() / logits.abs().max()).item()


class Boxes(Decoder):
    """Maps of a one-stage detector to boxes, scores and labels, as mmdet's base head decodes them.

    ``boxes`` (1, N, 4), ``scores`` (1, N) and ``labels`` (1, N), the best first; rows that are left
    over have score 0. Without NMS all ``boxes`` (P, 4), and ``scores`` (P, K) of each class.
    """

    priors: Tensor
    sides: Tensor

    def __init__(
        self, head: Any, raw: Sequence[Tensor], shape: tuple[int, int], number: int, style: Style
    ) -> None:
        super().__init__()
        generator, config = head.prior_generator, head.test_cfg
        self.levels, self.style = len(generator.strides), style
        self.classes, self.is_sigmoid = head.cls_out_channels, head.use_sigmoid_cls
        self.decode = head.bbox_coder.decode
        sizes = [output.shape[2:] for output in raw[: self.levels]]
        priors = torch.cat(generator.grid_priors(sizes, device='cpu'))
        height, width = shape
        self.register_buffer('priors', priors)
        self.register_buffer('sides', torch.tensor([width, height, width, height]).float())
        most = config.get('nms_pre', -1)  # not positive: all of them
        self.candidates = min(most if most > 0 else CANDIDATES, CANDIDATES, len(priors))
        self.number, self.iou = min(number, self.candidates), config.nms.iou_threshold
        self.least = config.get('min_bbox_size', -1)
        boxes: dict[str, Any] = dict(box_format=style.box_format)
        boxes['scale'] = self.sides.tolist() if style.relative else [1.0] * 4
        self.suppresses = style.nms in ('matrix', 'operator')
        kinds = ['boxes', 'scores'] + ['labels'] * self.suppresses
        kinds += ['count'] * (style.labels == torch.float32)
        self.outputs = [dict(name=style.names.get(kind, kind), kind=kind) for kind in kinds]
        self.outputs[0] |= boxes
        self.metadata = dict(nms=style.nms, test_cfg=config)

    def read(self, raw: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return all boxes (P, 4), x1, y1, x2, y2 as shares of the image, and scores (P, K)."""

        def rows(start: int, values: int) -> Tensor:
            maps = raw[start * self.levels : (start + 1) * self.levels]
            return torch.cat([x.permute(0, 2, 3, 1).reshape(-1, values) for x in maps])

        scores = rows(0, self.classes)
        scores = scores.sigmoid() if self.is_sigmoid else scores.softmax(1)[:, :-1]
        if len(raw) > 2 * self.levels:
            scores = scores * rows(2, 1).sigmoid()
        return (self.decode(self.priors, rows(1, 4)) / self.sides).clamp(0, 1), scores

    def forward(self, raw: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Decode, then keep the best where NMS is inside."""
        boxes, scores = self.read(raw)
        if not self.suppresses:
            return self.write(boxes), scores
        if self.least >= 0:  # boxes outside of the image have no area
            sizes = (boxes[:, 2:] - boxes[:, :2]) * self.sides[:2]
            scores = scores * (sizes.amin(1, True) > self.least).float()
        best = scores.amax(1).topk(self.candidates).indices
        number_of_classes = scores.shape[1]
        scores, pairs = scores.index_select(0, best).flatten().topk(self.candidates)
        rows = torch.div(pairs, number_of_classes, rounding_mode='floor')
        boxes = boxes.index_select(0, best).index_select(0, rows)
        labels = pairs % number_of_classes  # in integers, which float16 does not have above 2048
        scores, order = (scores * self.suppress(boxes, scores, labels)).topk(self.number)
        boxes, labels = self.write(boxes.index_select(0, order)), labels.index_select(0, order)
        results = [boxes[None], scores[None], labels[None].to(self.style.labels)]
        return *results, *[(scores > 0).float().sum()[None]] * (len(self.outputs) - 3)

    def suppress(self, boxes: Tensor, scores: Tensor, labels: Tensor) -> Tensor:
        """Return 1 for boxes (N, 4) that stay, from the best to the worst, and 0 for others."""
        from torchvision.ops import box_iou, nms  # which backbones do without

        if self.style.nms == 'operator':
            kept = nms(boxes + 2.0 * labels[:, None], scores, self.iou)  # classes lie apart
            return torch.zeros_like(scores).index_fill(0, kept, 1.0)
        same = labels[:, None] == labels
        worse = ((box_iou(boxes, boxes) > self.iou) & same).float().triu(1)
        kept = torch.ones_like(scores)[None]
        for _ in range(ROUNDS):  # a box stays unless one that stays overlaps it
            kept = torch.relu(1 - kept @ worse)
        return kept[0]

    def write(self, boxes: Tensor) -> Tensor:
        """Write boxes (N, 4) as the style says."""
        if self.style.box_format == 'cxcywh':
            low, high = boxes.chunk(2, 1)
            boxes = torch.cat([(low + high) / 2, high - low], 1)
        return boxes if self.style.relative else boxes * self.sides

    def deviation(self, raw: Sequence[Tensor], found: Sequence[Any]) -> float:
        """Compare a file's results with candidates and with the results that it should have.

        Elements cannot be compared one by one, since roundings change the order of equal scores
        and, at the threshold, which boxes overlap.

        Returns:
            The largest of: the distance of a box with its score from the nearest candidate of its
            class; the score of a missing box above those of its neighbours; 1 for a box too many.
        """
        from torchvision.ops import box_iou

        if not self.suppresses:
            return super().deviation(raw, found)

        def read(results: Sequence[Any]) -> list[Tensor]:
            boxes, scores, labels = (torch.as_tensor(x)[0] for x in results[:3])
            return [boxes if self.style.relative else boxes / self.sides, scores, labels.long()]

        boxes, scores, labels = read(found)
        least, used = scores.min(), scores > 0
        boxes, scores, labels = boxes[used], scores[used], labels[used]
        candidates, their_scores = self.read(raw)
        differences = (their_scores[:, labels].T - scores[:, None]).abs()
        strange = torch.cdist(boxes, candidates, torch.inf).maximum(differences).amin(1)
        wanted, wanted_scores, wanted_labels = read(self(raw))
        near = ~(box_iou(wanted, boxes) <= 0.9 * self.iou) & (wanted_labels[:, None] == labels)
        lower = (wanted_scores[:, None] - scores).masked_fill(~near, torch.inf)
        missing = torch.cat([lower, (wanted_scores - least)[:, None]], 1).clamp(min=0).amin(1)
        near = (box_iou(boxes, boxes) > 1.1 * self.iou) & (labels[:, None] == labels)
        return torch.cat([strange, missing, near.triu(1).any().float()[None]]).max().item()


def build_decoder(
    model: Any,
    raw: Sequence[Tensor],
    shape: tuple[int, int],
    described: Mapping[str, Any],
    number: int,
    style: Style,
) -> Decoder:
    """Choose what turns a model's outputs into results; ``described`` has activation and decode."""
    if hasattr(model, 'bbox_head'):
        return Boxes(model.bbox_head, raw, shape, number, style)
    if hasattr(model, 'decode_head'):
        return LabelMap(model.decode_head, raw[0].shape[1], shape, style.label_map)
    return Probabilities(described['activation'])


def largest_deviation(expected: Sequence[Tensor], found: Sequence[Any]) -> float:
    """Return the largest deviation of outputs, as a share of each one's largest magnitude."""
    # Not max(): it would pass over a NaN.
    return np.max(
        [
            np.abs(wanted.numpy() - output).max() / max(wanted.abs().max().item(), 1e-30)
            for wanted, output in zip(expected, found, strict=True)
        ]
    )
