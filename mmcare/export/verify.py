"""Comparison of exported files with PyTorch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mmcare.export.formats.base import Format, Job, Run, Written

LEAST_SNR = 10.0  # of every output, in dB: below it, results are useless
FINE = 30.0  # dB; from here on roundings alone make more difference
AGREEMENT = 1.0  # dB between a file and its twin, which round differently
FLOAT16 = 2e-2  # share of an output's largest magnitude, where a runtime computes in float16
NO_FLOAT16 = 'not compared: nothing here computes it in float16'
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


def check_file(
    form: Format, job: Job, path: Path, description: Mapping[str, Any], written: Written
) -> dict[str, Any]:
    """Compare a file, and its twin, with PyTorch, or raise an ExportError.

    Return ``deviations`` by image, and ``deviations_float16`` where phones choose the type; in int8
    and with compressed weights ``quantization``.
    """
    run, limit = form.open(path).run, form.precisions[description['precision']]
    half = None if form.says_type else form.open_float16(path)
    compared: dict[str, Any]
    if limit is None or 'compress' in description:
        compared = dict(quantization=check_decibels(run, job, path.name, written))
        if half:
            in_float16 = check_decibels(half.run, job, path.name, Written({}, run, 'float32'))
            compared['quantization']['snr_float16'] = in_float16['snr']
    else:
        if written.twin:
            verify(written.twin, job, written.name, path.name, limit)
        compared = dict(deviations=verify(run, job, form.runtime, path.name, limit))
        if half:
            name = f'{form.runtime} in float16'
            compared['deviations_float16'] = verify(half.run, job, name, path.name, FLOAT16)
    if not half and not form.says_type:
        compared['deviations_float16'] = NO_FLOAT16
    return compared


@torch.no_grad()
def verify(run: Run, job: Job, runtime: str, file: str, limit: float) -> dict[str, float | str]:
    """Compare outputs with the network's, as shares of each output's largest magnitude.

    Returns:
        The largest deviation for each image; as text if it is not finite.

    Raises:
        ExportError: If it is above the limit on an image whose name begins as ``JUDGED`` says.
    """
    deviations: dict[str, float | str] = {}
    for name, image in job.images.items():
        pairs = zip(job.expected[name], run(image), strict=True)
        # Not max(): it would pass over a NaN.
        shares = [
            np.abs(expected.numpy() - found).max() / max(expected.abs().max().item(), 1e-30)
            for expected, found in pairs
        ]
        deviation = float(f'{np.max(shares):.2g}')
        if name.startswith(JUDGED) and not deviation <= limit:
            raise ExportError(
                f"{runtime}'s outputs differ from PyTorch's by {deviation:.1e} of the largest "
                f'magnitude ({name}), more than {limit}; {file} is not written'
            )
        deviations[name] = deviation if np.isfinite(deviation) else str(deviation)
    return deviations


@torch.no_grad()
def check_decibels(run: Run, job: Job, file: str, written: Written) -> dict[str, Any]:
    """Compare a quantized file with PyTorch on pictures, since on noise it is far off.

    Without pictures, the smooth trial image takes their place.

    Raises:
        ExportError: If an output has less than ``LEAST_SNR``, or file and twin differ.
    """
    pictures = [key for key in job.images if key.startswith('picture')] or ['smooth']
    expected = [job.expected[key] for key in pictures]
    found, wanted = (
        signal_to_noise(expected, [one(job.images[key]) for key in pictures])
        for one in (run, written.twin or run)
    )
    for output, snr, ratio in zip(job.names, found, wanted, strict=True):
        if not abs(min(snr, FINE) - min(ratio, FINE)) <= AGREEMENT:
            raise ExportError(
                f'{output} has {snr:.1f} dB in the file and {ratio:.1f} dB in {written.name}, on '
                f'pictures: they compute different things; {file} is not written'
            )
        if not snr >= LEAST_SNR:
            raise ExportError(
                f'{output} keeps {snr:.1f} dB of signal to noise, less than {LEAST_SNR:g}: for '
                'int8, give more pictures, like those of the application (--calibration, '
                f'--images), or compress the weights less; {file} is not written'
            )
    ratios = dict(zip(job.names, (round(snr, 1) for snr in found), strict=True))
    return dict(images=len(job.calibration), snr=ratios)


def signal_to_noise(
    expected: Sequence[Sequence[Tensor]], found: Sequence[Sequence[Any]]
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
