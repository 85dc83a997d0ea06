"""Compare exported files with PyTorch."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmcare.export.errors import Argument, ExportError

RunFile = Callable[[Tensor], Sequence[Any]]  # an input of the file (B, C, H, W) to its outputs

MIN_SQNR_DB = 10.0  # for every output; below it, results are useless
# Above this ratio, rounding alone makes ratios differ by more than AGREEMENT_DB.
FINE_SQNR_DB = 30.0
# Between a file and its cross-check, which round differently: in two pictures' maps of 4x4 cells,
# 22.1 and 19.4 dB were seen. An engine that computes something else loses 10 dB or more.
AGREEMENT_DB = 6.0
# The tolerance where a runtime computes in float16. The demo's Mask R-CNN is off by 1.7e-2 in Core
# ML, and loses 0.6 points of box AP.
FLOAT16 = 2e-2
QUANTIZED_RESULTS = 1e-2  # tolerance of a quantized file's results, decoded from its own outputs
# The tolerance if layers follow these outputs, since those layers are quantized as well: the demo's
# Mask R-CNN is off by 4e-2 in its boxes, scores and masks.
QUANTIZED_LAYERS = 1e-1


@dataclass(frozen=True)
class Checker:
    """Compares what runtimes compute for a file with what PyTorch computes."""

    file: str  # for messages
    inputs: Mapping[str, Tensor]  # of the file, by the name of the image
    enforced: Collection[str]  # images on which an error above the tolerance raises
    pictures: Sequence[str]  # images on which quantized files are compared
    expected: Callable[[str], Sequence[Tensor]]  # the network's outputs for an image
    max_error: Callable[[Sequence[Tensor], Sequence[Any]], float]
    output_names: Sequence[str]

    @torch.no_grad()
    def max_rel_errors(
        self,
        run: RunFile,
        tolerance: float,
        runtime: str,
        expected: Callable[[str], Sequence[Tensor]] | None = None,
    ) -> dict[str, float | str]:
        """Compare outputs; errors are shares of each output's largest magnitude.

        Args:
            run: Computes the file.
            tolerance: The largest error that is allowed.
            runtime: Name of the runtime, for messages.
            expected: What to compare with, in place of the network's outputs.

        Returns:
            The largest error for each image, as text if it is not finite.

        Raises:
            ExportError: If the error is above the tolerance on an enforced image.
        """
        errors: dict[str, float | str] = {}
        for name, image in self.inputs.items():
            try:
                outputs = run(image)
            except ExportError:  # ONNX Runtime's RoiAlign refuses what overflows float16
                if name in self.enforced:
                    raise
                error = np.inf
            else:
                error = self.max_error((expected or self.expected)(name), outputs)
            if name in self.enforced and not error <= tolerance:
                raise ExportError(
                    f"{runtime}'s outputs differ from PyTorch's by {error:.1e} of the largest "
                    f'magnitude ({name}), more than {tolerance}; {self.file} is not written'
                )
            errors[name] = float(f'{error:.2g}') if np.isfinite(error) else str(error)
        return errors

    @torch.no_grad()
    def sqnr_db(
        self,
        run: RunFile,
        cross_check: RunFile | None = None,
        cross_check_name: str = '',
        may_be_better: bool = False,
        run_name: str = 'the file',
    ) -> dict[str, float]:
        """Compare a quantized file on pictures, since its error on noise is large.

        Args:
            run: Computes the file.
            cross_check: Computes the same as the file.
            cross_check_name: Name of the cross-check, for messages.
            may_be_better: Whether only a lower ratio than the cross-check's is an error.
            run_name: What computes the file, for messages.

        Returns:
            The signal-to-quantization-noise ratio of each output, in dB.

        Raises:
            ExportError: If a ratio is below ``MIN_SQNR_DB``, or if file and cross-check differ.
        """
        inputs = [self.inputs[name] for name in self.pictures]
        expected = [self.expected(name) for name in self.pictures]
        ratios = sqnr_db(expected, [*map(run, inputs)])
        others = sqnr_db(expected, [*map(cross_check, inputs)]) if cross_check else ratios
        for output, ratio, other in zip(self.output_names, ratios, others, strict=True):
            gain = min(ratio, FINE_SQNR_DB) - min(other, FINE_SQNR_DB)
            if not (gain >= -AGREEMENT_DB and (may_be_better or gain <= AGREEMENT_DB)):
                raise ExportError(
                    f'{output} has {ratio:.1f} dB in {run_name} and {other:.1f} dB in '
                    f'{cross_check_name}, on pictures: they compute different things; {self.file} '
                    'is not written'
                )
            if not ratio >= MIN_SQNR_DB:
                raise ExportError(
                    f'{output} keeps {ratio:.1f} dB of signal to noise, less than '
                    f'{MIN_SQNR_DB:g}: for int8, give more pictures, like those of the application '
                    '(',
                    Argument('calibration'),
                    ', ',
                    Argument('images'),
                    f'), or compress the weights less; {self.file} is not written',
                )
        return dict(zip(self.output_names, np.round(ratios, 1).tolist(), strict=True))


def sqnr_db(expected: Sequence[Sequence[Tensor]], outputs: Sequence[Sequence[Any]]) -> list[float]:
    """Compute each output's 10 log10(sum of expected^2 / sum of (expected - output)^2).

    Both arguments hold the outputs for each image; sums are over all images.
    """
    ratios = []
    for wanted, got in zip(zip(*expected, strict=True), zip(*outputs, strict=True), strict=True):
        signal = np.concatenate([np.ravel(output) for output in wanted]).astype(np.float64)
        noise = signal - np.concatenate([np.ravel(output) for output in got])
        ratios.append(float(10 * np.log10((signal**2).sum() / max((noise**2).sum(), 1e-30))))
    return ratios
