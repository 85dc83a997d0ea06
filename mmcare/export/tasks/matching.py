"""Match a file's boxes with those that PyTorch computes.

Boxes cannot be compared one by one: roundings change the order of equal scores and, at the
threshold of non-maximum suppression, which boxes overlap.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# Near NMS's threshold, rounding decides. Boxes whose overlap is within a tenth of the threshold may
# be kept or removed.
IOU_MARGIN = 0.1
PART = 1024  # candidates that are compared at once; all at once would take gigabytes


class Detected(NamedTuple):
    """Objects: boxes (N, 4) as shares of the image, scores (N,) and labels (N,)."""

    boxes: Tensor
    scores: Tensor
    labels: Tensor

    def used(self) -> 'Detected':
        """Return the objects without unused rows."""
        used = self.scores > 0
        return Detected(*(values[used] for values in self))


def distances(
    found: Detected, boxes: Tensor, scores: Tensor, below: Tensor | None = None
) -> Tensor:
    """Return how far boxes and scores are from the nearest candidate of their class (N,).

    Distances of coordinates outside of the image are shares of the coordinate.

    Args:
        found: Objects in a file.
        boxes: Of candidates, (P, K, 4) for each class, or (P, 1, 4).
        scores: Of candidates, (P, K).
        below: By how much each score must change for its class to be chosen, (P, K); None: 0.
    """
    nearest = torch.full_like(found.scores, torch.inf)
    labels = found.labels if boxes.shape[1] > 1 else torch.zeros_like(found.labels)
    sides = found.boxes.abs().clamp(min=1)  # boxes that are not clipped can be far outside
    below = torch.zeros_like(scores) if below is None else below
    parts = zip(boxes.split(PART), scores.split(PART), below.split(PART), strict=True)
    for part, part_scores, part_below in parts:
        moved = ((part[:, labels] - found.boxes).abs() / sides).amax(2)
        changed = (part_scores[:, found.labels] - found.scores).abs()
        changed = changed.maximum(part_below[:, found.labels])
        nearest = nearest.minimum(moved.maximum(changed).amin(0))
    return nearest


def nearest_rows(wanted: Detected, boxes: Tensor, best: Tensor) -> Tensor:
    """Return the row of the candidate that each object is (W,).

    Args:
        wanted: Objects that are among the candidates.
        boxes: Of candidates, (P, 4).
        best: The score of each candidate's class, (P, 1).
    """
    values = torch.cat([wanted.boxes, wanted.scores[:, None]], 1)
    return torch.cdist(values, torch.cat([boxes, best], 1), p=torch.inf).argmin(1)


def changes_of_classes(scores: Tensor, found: Tensor) -> Tensor:
    """Return by how much scores must change for a file to keep the classes that it keeps (P, K).

    Args:
        scores: Of all classes, (P, K).
        found: What the file keeps of them: the best class of each row, others are 0.
    """
    first, second = scores.topk(2, 1).values.split(1, 1)
    kept = (found - scores).abs().maximum(first - scores)
    dropped = (found.amax(1, True) - first).abs().maximum(scores - second)
    return torch.where(found > 0, kept, dropped)


def leads_of_missing(wanted: Detected, found: Detected, iou: float, leads: Tensor) -> Tensor:
    """Return by how much scores must change for each expected object to be missing (W,).

    It may be missing if a neighbour of its class has nearly its score, or if it nearly was not
    chosen; its lead is 0 if it is there.

    Args:
        wanted: Objects that PyTorch finds.
        found: Objects in a file.
        iou: Threshold of NMS.
        leads: (W, n), other leads that rounding may turn around.
    """
    from torchvision.ops import box_iou  # here, since torchvision imports PyTorch's compiler

    same = wanted.labels[:, None] == found.labels
    near = ~(box_iou(wanted.boxes, found.boxes) <= (1 - IOU_MARGIN) * iou) & same
    lower = (wanted.scores[:, None] - found.scores).masked_fill(~near, torch.inf)
    return torch.cat([lower, leads], 1).clamp(min=0).amin(1)


def surplus(found: Detected, iou: float) -> Tensor:
    """Return 1 if NMS should have removed one of the objects, else 0, (1,)."""
    from torchvision.ops import box_iou  # here, since torchvision imports PyTorch's compiler

    same = found.labels[:, None] == found.labels
    near = (box_iou(found.boxes, found.boxes) > (1 + IOU_MARGIN) * iou) & same
    return near.triu(1).any().float()[None]
