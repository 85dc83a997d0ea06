"""Memory that a training step keeps for its backward pass, measured on the CPU.

Autograd keeps tensors of the forward pass until the backward pass has used them. Their bytes are
counted as they are kept, each storage once, with ``torch.autograd.graph.saved_tensors_hooks``:
https://pytorch.org/docs/stable/autograd.html#torch.autograd.graph.saved_tensors_hooks. What does
not grow with the batch (weights, their copies in bfloat16, running statistics) is in a batch of
two images as in one of one, so the difference of the two is an image's share.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from mmcare.analysis.counting import check_shape
from mmcare.models import CARE
from mmcare.models.backbones.care import TOTAL_STRIDE

PRECISIONS = {'float32': None, 'bfloat16': torch.bfloat16}
DROP_PATH_RATE = 0.1  # of the shipped configs


@dataclass(frozen=True)
class Activations:
    """What a backbone keeps for the backward pass, in bytes an image.

    Attributes:
        arch: Of the backbone.
        shape: Height and width of the image, in pixels.
        precision: ``'float32'``, or ``'bfloat16'`` under autocast.
        plain: Everything, all blocks at once.
        with_cp: With ``with_cp=True``: the inputs of the blocks, and what is not in blocks.
        largest_block: What ``with_cp`` recomputes at once in the backward pass, at most.
    """

    arch: str
    shape: tuple[int, int]
    precision: str
    plain: int
    with_cp: int
    largest_block: int

    @property
    def with_cp_peak(self) -> int:
        """What ``with_cp=True`` needs at once, at most: inputs, and one block recomputed."""
        return self.with_cp + self.largest_block


def check_image(shape: Sequence[int]) -> tuple[int, int]:
    """Check the height and width of an image to train on.

    Raises:
        TypeError: If these are not two integers.
        ValueError: If the last map would have a single position, which batch norm refuses.
    """
    height, width = check_shape(shape)
    if max(height, width) <= TOTAL_STRIDE:
        raise ValueError(
            f'height or width must be above {TOTAL_STRIDE}, got {(height, width)}: batch norm '
            'cannot train on a map of one position'
        )
    return height, width


def measure_activations(arch: str, shape: Sequence[int], precision: str) -> Activations:
    """Measure a training step of a backbone, forward only.

    Args:
        arch: One of ``CARE.arch_zoo``.
        shape: Height and width of the image, in pixels.
        precision: One of :data:`PRECISIONS`.

    Raises:
        ValueError: If an argument is not one of these, or the image is too small.
    """
    height, width = check_image(shape)
    sizes = _bytes_per_image(arch, (height, width), _checked(precision))
    return _activations(arch, (height, width), precision, sizes)


def extrapolate_activations(arch: str, shape: Sequence[int], precision: str) -> Activations:
    """Find the same as :func:`measure_activations` from two small images, at once for any size.

    The backbone pads images to tiles of 32 x 32, and every map has a fixed number of positions for
    each tile: an image keeps a constant, and a share for each tile.
    """
    height, width = check_image(shape)
    tiles = -(-height // TOTAL_STRIDE) * -(-width // TOTAL_STRIDE)
    two, three = (
        _bytes_per_image(arch, (TOTAL_STRIDE, number * TOTAL_STRIDE), _checked(precision))
        for number in (2, 3)
    )
    sizes = [small + (large - small) * (tiles - 2) for small, large in zip(two, three, strict=True)]
    return _activations(arch, (height, width), precision, sizes)


def _checked(precision: str) -> str:
    if precision not in PRECISIONS:
        raise ValueError(f'precision={precision!r} must be one of {list(PRECISIONS)}')
    return precision


def _activations(
    arch: str, shape: tuple[int, int], precision: str, sizes: Sequence[int]
) -> Activations:
    plain, with_cp, *blocks = sizes
    return Activations(arch, shape, precision, plain, with_cp, max(blocks))


@cache
def _bytes_per_image(arch: str, shape: tuple[int, int], precision: str) -> tuple[int, ...]:
    """Bytes an image: of everything, of everything with ``with_cp``, and of each block."""
    found = []
    for with_cp in (False, True):
        backbone = CARE(arch, drop_path_rate=DROP_PATH_RATE, with_cp=with_cp).train()
        one, two = (_kept(backbone, batch, shape, precision) for batch in (1, 2))
        found.append([second - first for first, second in zip(one, two, strict=True)])
    (plain, *blocks), (with_cp_total, *_) = found
    return plain, with_cp_total, *blocks


def _kept(backbone: CARE, batch: int, shape: tuple[int, int], precision: str) -> list[int]:
    """Bytes that a batch keeps: of all, then of each block."""
    dtype = PRECISIONS[precision]
    images = torch.zeros(batch, backbone.in_channels, *shape)
    with (
        _counting() as storages,
        torch.autocast('cpu', dtype, enabled=dtype is not None),
        _marks(backbone, storages) as marks,
    ):
        outputs = backbone(images)
    del outputs
    sizes = [storage.nbytes() for storage in storages.values()]
    return [sum(sizes), *(sum(sizes[start:end]) for start, end in marks)]


@contextmanager
def _counting() -> Iterator[dict[int, torch.UntypedStorage]]:
    """Collect the storages of saved tensors; they live on, so that no address is used twice."""
    storages: dict[int, torch.UntypedStorage] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages.setdefault(storage.data_ptr(), storage)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield storages


@contextmanager
def _marks(backbone: CARE, storages: dict) -> Iterator[list[tuple[int, int]]]:
    """Collect for each block how many storages there were before and behind it."""
    marks: list[tuple[int, int]] = []
    starts: list[int] = []

    def before(block: nn.Module, inputs: tuple) -> None:
        starts.append(len(storages))

    def behind(block: nn.Module, inputs: tuple, output: Tensor) -> None:
        marks.append((starts.pop(), len(storages)))

    blocks = [block for stage in backbone.stages for block in stage.blocks]
    handles = [block.register_forward_pre_hook(before) for block in blocks]
    handles += [block.register_forward_hook(behind) for block in blocks]
    try:
        yield marks
    finally:
        for handle in handles:
            handle.remove()
