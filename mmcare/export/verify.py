"""Comparison of an exported network with PyTorch."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from mmcare.export.runtime import open_exported

TOLERANCE = 1e-4  # of each output's largest magnitude, on random images


class ExportError(RuntimeError):
    """An exported file does not compute what the network computes."""


def trial_images(channels: int, shape: tuple[int, int]) -> dict[str, Tensor]:
    """Draw normalised images (1, C, H, W): random ones, and extremes."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1, channels, *shape, generator=generator)
    return dict(
        random=noise,
        zeros=torch.zeros_like(noise),
        black_and_white=2.5 * noise.sign(),
        hundredfold=100 * noise,
    )


def verify(
    path: Path, reference: nn.Module, images: Mapping[str, Tensor], runtime: str
) -> dict[str, float]:
    """Run a file, and compare its outputs with the network's.

    Args:
        path: A ``.onnx`` or ``.pte`` file.
        reference: What the file should compute.
        images: See :func:`compare`; only those whose name begins with random can fail.
        runtime: Its name, for the message.

    Returns:
        The deviations by name.

    Raises:
        ExportError: If the outputs differ.
    """
    deviations = compare(reference, open_exported(path).run, images)
    for name, deviation in deviations.items():
        if name.startswith('random') and not deviation <= TOLERANCE:
            raise ExportError(
                f"{runtime}'s outputs differ from PyTorch's by {deviation:.1e} of the largest "
                f'magnitude ({name}), more than {TOLERANCE}; nothing is written'
            )
    return deviations


@torch.no_grad()
def compare(
    network: Callable[[Tensor], Sequence[Tensor]],
    run: Callable[[Tensor], list[np.ndarray]],
    images: Mapping[str, Tensor],
) -> dict[str, float]:
    """Compute the largest deviation for each image, as a share of each output's maximum.

    Args:
        network: Maps images to a tuple of outputs.
        run: Runs the exported file on an image; returns as many outputs.
        images: By name, each (1, C, H, W).
    """
    deviations = {}
    for name, image in images.items():
        pairs = zip(network(image), run(image), strict=True)
        # Not max(): it would pass over a NaN.
        deviations[name] = np.max(
            [
                np.abs(expected.numpy() - found).max() / max(expected.abs().max().item(), 1e-30)
                for expected, found in pairs
            ]
        ).item()
    return deviations
