"""Comparison of exported files with PyTorch."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmcare.export.postprocessing import largest_deviation
from mmcare.export.spec import ExportSpec, Run

LEAST_SNR = 10.0  # of every output, in dB: below it, results are useless
FINE = 30.0  # dB; from here on roundings alone make more difference
AGREEMENT = 1.0  # dB between a file and its cross-check, which round differently
FLOAT16 = 2e-2  # tolerance where a runtime computes in float16


class ExportError(RuntimeError):
    """An exported file does not compute what the network computes."""


@torch.no_grad()
def verify(
    run: Run, spec: ExportSpec, runtime: str, file: str, tolerance: float
) -> dict[str, float | str]:
    """Compare outputs with the network's, as shares of each output's largest magnitude.

    Return the largest deviation for each image, as text if it is not finite. Raise an ExportError
    if it is above the tolerance on an image that is enforced.
    """
    compare = spec.decoder.deviation if spec.decoder else largest_deviation
    deviations: dict[str, float | str] = {}
    for name, image in spec.images.items():
        expected, found = spec.reference_outputs(name), run(image.tensor)
        deviation = float(f'{compare(expected, found):.2g}')
        if image.enforced and not deviation <= tolerance:
            raise ExportError(
                f"{runtime}'s outputs differ from PyTorch's by {deviation:.1e} of the largest "
                f'magnitude ({name}), more than {tolerance}; {file} is not written'
            )
        deviations[name] = deviation if np.isfinite(deviation) else str(deviation)
    return deviations


@torch.no_grad()
def check_sqnr(
    run: Run, spec: ExportSpec, file: str, cross_check: Run | None, cross_check_name: str
) -> dict[str, Any]:
    """Compare a quantized file with PyTorch on pictures, since on noise it is far off.

    Without pictures, the smooth image takes their place.

    Returns:
        ``images``: the number of images that the file was calibrated with; ``snr`` of each output.

    Raises:
        ExportError: If an output has less than ``LEAST_SNR``, or if file and cross-check differ.
    """
    names = [name for name, image in spec.images.items() if image.is_picture] or ['smooth']
    pictures = [spec.images[name].tensor for name in names]
    expected = [spec.reference_outputs(name) for name in names]
    ratios = signal_to_noise(expected, [*map(run, pictures)])
    others = signal_to_noise(expected, [*map(cross_check, pictures)]) if cross_check else ratios
    for output, snr, other in zip(spec.output_names, ratios, others, strict=True):
        if not abs(min(snr, FINE) - min(other, FINE)) <= AGREEMENT:
            raise ExportError(
                f'{output} has {snr:.1f} dB in the file and {other:.1f} dB in '
                f'{cross_check_name}, on pictures: they compute different things; {file} '
                'is not written'
            )
        if not snr >= LEAST_SNR:
            raise ExportError(
                f'{output} keeps {snr:.1f} dB of signal to noise, less than {LEAST_SNR:g}: for '
                'int8, give more pictures, like those of the application (--calibration, '
                f'--images), or compress the weights less; {file} is not written'
            )
    rounded = dict(zip(spec.output_names, np.round(ratios, 1).tolist(), strict=True))
    return dict(images=len(spec.calibration), snr=rounded)


def signal_to_noise(
    expected: Sequence[Sequence[Tensor]], found: Sequence[Sequence[Any]]
) -> list[float]:
    """Compute each output's 10 log10(sum of expected^2 / sum of (expected - found)^2), in dB.

    Both arguments hold the outputs for each image; sums are over all images.
    """
    ratios = []
    for wanted, given in zip(zip(*expected, strict=True), zip(*found, strict=True), strict=True):
        signal = np.concatenate([np.ravel(output) for output in wanted]).astype(np.float64)
        noise = signal - np.concatenate([np.ravel(output) for output in given])
        ratios.append(float(10 * np.log10((signal**2).sum() / max((noise**2).sum(), 1e-30))))
    return ratios
