"""Comparison of an exported network with PyTorch."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mmcare.export.formats.base import Job

TOLERANCE = 1e-4  # of each output's largest magnitude
# Images on which a file must agree; others are reported.
JUDGED = ('random', 'smooth', 'picture')


class ExportError(RuntimeError):
    """An exported file does not compute what the network computes."""


def trial_images(channels: int, shape: tuple[int, int]) -> dict[str, Tensor]:
    """Draw normalised images (1, C, H, W): random ones, one as smooth as pictures, and extremes."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1, channels, *shape, generator=generator)
    coarse = torch.randn(1, channels, 8, 8, generator=generator)
    return dict(
        random=noise,
        smooth=F.interpolate(coarse, shape, mode='bilinear') + 0.02 * noise,
        zeros=torch.zeros_like(noise),
        black_and_white=2.5 * noise.sign(),
        hundredfold=100 * noise,
    )


def verify(
    run: Callable[[Tensor], list[np.ndarray]], job: Job, runtime: str, file: str
) -> dict[str, float]:
    """Compare the outputs of a file with the network's, and return the deviations by image.

    Args:
        run: Runs the file; ``runtime`` and ``file`` name both in the message.

    Raises:
        ExportError: If the outputs differ on an image whose name begins as ``JUDGED`` says.
    """
    deviations = compare(job.reference, run, job.images)
    for name, deviation in deviations.items():
        if name.startswith(JUDGED) and not deviation <= TOLERANCE:
            raise ExportError(
                f"{runtime}'s outputs differ from PyTorch's by {deviation:.1e} of the largest "
                f'magnitude ({name}), more than {TOLERANCE}; {file} is not written'
            )
    return deviations


@torch.no_grad()
def compare(
    network: Callable[[Tensor], Sequence[Tensor]],
    run: Callable[[Tensor], list[np.ndarray]],
    images: Mapping[str, Tensor],
) -> dict[str, float]:
    """Compute the largest deviation for each image (1, C, H, W), as a share of outputs' maxima."""
    deviations = {}
    for name, image in images.items():
        pairs = zip(network(image), run(image), strict=True)
        # Not max(): it would pass over a NaN.
        shares = [
            np.abs(expected.numpy() - found).max() / max(expected.abs().max().item(), 1e-30)
            for expected, found in pairs
        ]
        deviations[name] = float(f'{np.max(shares):.2g}')
    return deviations


def signal_to_noise(
    expected: Sequence[Sequence[Tensor]], found: Sequence[Sequence[Tensor | np.ndarray]]
) -> list[float]:
    """Compute each output's 10 log10(sum of expected^2 / sum of (expected - found)^2), in dB.

    Both have the outputs of each image; sums are over all images.
    """
    ratios = []
    for outputs, others in zip(zip(*expected, strict=True), zip(*found, strict=True), strict=True):
        signal = np.concatenate([np.ravel(one) for one in outputs]).astype(np.float64)
        noise = signal - np.concatenate([np.ravel(one) for one in others])
        ratios.append(float(10 * np.log10((signal**2).sum() / max((noise**2).sum(), 1e-30))))
    return ratios
