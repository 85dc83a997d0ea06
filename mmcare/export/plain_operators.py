"""Non-maximum suppression and RoIAlign in plain operators, which all runtimes have.

Non-maximum suppression is also here as one operator, for runtimes that have this operator.

Boxes are shares of the image here: areas in pixels would leave the range of float16, 65504.
"""

import torch
from torch import Tensor, nn

# Each round decides the boxes whose better neighbours are decided. Measured at an IoU of 0.7 on
# 1000 anchors of a level with smooth scores: if boxes differ from anchors by 5 % of their sides or
# more, all are right after 16 rounds, in 96 of 96 draws. If a network has learned nothing, so that
# boxes are the anchors, up to 118 of 1000 are wrong, nearly all after the first 100 that are kept.
NMS_ROUNDS = 16
# Boxes are compared in this unit: areas of 2 x 2 pixels in images of 1000 x 1000 are 4e-6 as
# shares, which float16 rounds by a percent.
NMS_SCALE = 64.0
ROUNDING = 1e-5  # share of a bin's size: a bin of 13.0001 cells has 13 samples, as one of 13
# Samples on the map's ends count: boxes with round coordinates often have samples there.
SLACK = 1e-4
SMALLEST_STEP = 6.2e-5  # between samples, in cells; float16's smallest normal value is 6.1e-5


def nms_mask(
    boxes: Tensor, iou_threshold: float, labels: Tensor | None = None, valid: Tensor | None = None
) -> Tensor:
    """Mark the boxes that non-maximum suppression keeps, by matrix products.

    The result must equal that of :func:`nms_mask_operator`, of ``nms`` in
    :mod:`mmcare_runtime.results`, and of the page for phones (``decode.js``). A test in
    ``tests/test_export/test_instances.py`` compares the three here.

    Args:
        boxes: (N, 4), x1, y1, x2, y2 as shares of the image, from the best to the worst.
        iou_threshold: A box is removed if its IoU with a better box that is kept is larger.
        labels: (N,); only boxes of the same label suppress each other. None: all boxes do.
        valid: (N,), 1 or 0; boxes with 0 are removed, and suppress none.

    Returns:
        (N,) floats, 1 for boxes that stay and 0 for others. If a chain of boxes, in which each
        suppresses the next, is longer than ``NMS_ROUNDS``, its end may be wrong.
    """
    x1, y1, x2, y2 = (boxes * NMS_SCALE).unsqueeze(1).unbind(2)  # (N, 1) each
    widths = torch.relu(torch.minimum(x2, x2.mT) - torch.maximum(x1, x1.mT))
    heights = torch.relu(torch.minimum(y2, y2.mT) - torch.maximum(y1, y1.mT))
    areas = (x2 - x1) * (y2 - y1) * (iou_threshold / (1 + iou_threshold))
    # intersection / (area + other area - intersection) > threshold, without a division
    overlaps = (widths * heights > areas + areas.mT).to(boxes.dtype).triu(1)
    if labels is not None:
        overlaps = overlaps * (labels[:, None] == labels).to(boxes.dtype)
    valid = torch.ones_like(x1.mT) if valid is None else valid[None]
    kept = valid
    for _ in range(NMS_ROUNDS):  # a box stays unless one that stays overlaps it
        kept = torch.relu(valid - kept @ overlaps)
    return kept[0]


@torch.library.custom_op('mmcare::nms_mask', mutates_args=())
def nms_mask_operator(
    boxes: Tensor,
    iou_threshold: float,
    labels: Tensor | None,
    classes: int,
    valid: Tensor | None,
) -> Tensor:
    """Mark the boxes that non-maximum suppression keeps, as :func:`nms_mask` does, exactly.

    Backends translate this operator to theirs, with the same result. Boxes are in order, so that
    no score is needed: an engine's sigmoid can be 0 for a box that is one.

    Args:
        boxes: (N, 4), x1, y1, x2, y2 as shares of the image, from the best to the worst.
        iou_threshold: A box is removed if its IoU with a better box that is kept is larger.
        labels: (N,), from 0 to ``classes`` - 1; only boxes of the same label suppress each other.
            None: all boxes do.
        classes: Number of classes.
        valid: (N,), 1 or 0; boxes with 0 are removed, and suppress none.

    Returns:
        (N,) floats, 1 for boxes that stay and 0 for others.
    """
    from torchvision.ops import nms  # here, since backbones do not need it

    kept = boxes.new_zeros(len(boxes))
    ranks = torch.arange(len(boxes), 0, -1, dtype=boxes.dtype)
    use = torch.ones_like(kept) if valid is None else valid
    for label in range(classes):  # not batched_nms, which adds labels to boxes
        rows = (use > 0 if labels is None else (use > 0) & (labels == label)).nonzero()[:, 0]
        kept[rows[nms(boxes[rows], ranks[rows], iou_threshold)]] = 1
    return kept


@nms_mask_operator.register_fake
def _(
    boxes: Tensor,
    iou_threshold: float,
    labels: Tensor | None,
    classes: int,
    valid: Tensor | None,
) -> Tensor:
    return boxes.new_empty(len(boxes))


class BinWeights(nn.Module):
    """The weights with which RoIAlign averages the cells of one axis of a map.

    RoIAlign averages bilinear samples on a grid in each bin. The weight of such a sample
    is a weight for the row times a weight for the column, and so is the average over the grid:
    ``rows (bins, H) @ map (H, W) @ columns (W, bins)`` is RoIAlign, exactly.

    Samples of a bin are evenly spaced, so that their weights are summed up in closed form, whatever
    their number: a sample at p has weight max(0, 1 - |p - j|) for cell j, which is c(j + 1) - c(j)
    with c(t) = min(max(t - p, 0), 1), and the sum of c over samples follows from how many are below
    t and t - 1.

    Args:
        cells: Length of the axis of the map.
        length: Length of the image, in cells.
        bins: Number of bins.
        sampling_ratio: Samples in a bin; 0: its length in cells, rounded up.
        aligned: Whether cells are pixels' centres, so that coordinates shift by half a cell.
    """

    edges: Tensor
    bins: Tensor

    def __init__(
        self, cells: int, length: float, bins: int, sampling_ratio: int, aligned: bool
    ) -> None:
        super().__init__()
        self.length, self.sampling_ratio, self.aligned = length, sampling_ratio, aligned
        edges = torch.arange(-1.0, cells + 1)
        edges[0] -= SLACK
        edges[-1] += SLACK
        self.register_buffer('edges', edges)
        self.register_buffer('bins', torch.arange(float(bins)))

    def forward(self, low: Tensor, high: Tensor) -> Tensor:
        """Map the ends of RoIs (N,), as shares of the image, to weights (N, bins, cells)."""
        start, extent = low * self.length, (high - low) * self.length
        if self.aligned:
            start = start - 0.5
        else:
            extent = extent.clamp(min=1)
        size = (extent / len(self.bins))[:, None]  # of a bin
        if self.sampling_ratio > 0:
            number = torch.full_like(size, self.sampling_ratio)
        else:
            # An empty RoI has no samples, and gives 0
            number = torch.relu(torch.ceil(size * (1 - ROUNDING)))
        step = size / number.clamp(min=1)
        first = (start[:, None] + size * self.bins + step / 2)[:, :, None]
        step, number = step.clamp(min=SMALLEST_STEP)[:, :, None], number[:, :, None]
        distances = self.edges - first
        # How many samples are below each edge
        counts = torch.minimum(torch.relu(torch.ceil(distances / step)), number)
        fewer, more = counts[:, :, 1:-2], counts[:, :, 2:-1]  # at t - 1 and t, from 1 to cells - 1
        middle = distances[:, :, 2:-1] - step * ((fewer + more - 1) / 2)
        # Samples more than a cell outside of the map are 0; nearer ones get the border's value.
        inside = fewer + (more - fewer) * middle
        sums = torch.cat([counts[:, :, :1], inside, counts[:, :, -1:]], 2)
        return (sums[:, :, 1:] - sums[:, :, :-1]) / number.clamp(min=1)


class RoIAlign(nn.Module):
    """RoIAlign of one map by two matrix products; see :class:`BinWeights`.

    Args:
        map_size: Height and width of the map.
        image_size: Height and width of the image, in cells of the map.
        output_size: Rows and columns of bins.
        sampling_ratio: Samples along each side of a bin; 0: its length in cells, rounded up.
        aligned: See :class:`BinWeights`.
    """

    def __init__(
        self,
        map_size: tuple[int, int],
        image_size: tuple[float, float],
        output_size: tuple[int, int],
        sampling_ratio: int,
        aligned: bool,
    ) -> None:
        super().__init__()
        self.rows, self.columns = (
            BinWeights(*sides, sampling_ratio, aligned)
            for sides in zip(map_size, image_size, output_size, strict=True)
        )

    def forward(self, x: Tensor, boxes: Tensor, weights: Tensor | None = None) -> Tensor:
        """Average a map in boxes.

        Args:
            x: (1, C, H, W).
            boxes: (N, 4), x1, y1, x2, y2 as shares of the image.
            weights: (N,), with which outputs are multiplied.

        Returns:
            (N, h, w, C).
        """
        _, channels, height, width = x.shape
        x1, y1, x2, y2 = boxes.unbind(1)
        rows, columns = self.rows(y1, y2), self.columns(x1, x2)
        if weights is not None:
            rows = rows * weights[:, None, None]
        number, bins, _ = rows.shape
        cells = x.permute(0, 2, 3, 1).reshape(height, width * channels)
        averaged = rows.reshape(number * bins, height) @ cells
        return columns[:, None] @ averaged.reshape(number, bins, width, channels)
