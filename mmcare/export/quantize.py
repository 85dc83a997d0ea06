"""Static int8 quantization of a program's convolutions, for XNNPACK."""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from mmcare.export.formats.base import Job
from mmcare.export.verify import ExportError, signal_to_noise

LEAST_SNR = 10.0  # of every output, in dB: below it, results are useless
AGREEMENT = 0.3  # of the file and what computes the same, in dB
FINE = 30.0  # dB; from here on roundings alone make more difference
Run = Callable[[Tensor], Sequence[Any]]  # images to outputs


@torch.no_grad()
def quantize(program: ExportedProgram, images: Sequence[Tensor]) -> ExportedProgram:
    """Quantize the convolutions of a program by PT2E, with XNNPACK's quantizer.

    Args:
        program: Decomposed, with constants propagated: after quantization that would turn int8
            weights into float32. Convolutions that are to stay in float32 are
            ``aten.convolution``, the others ``aten.conv2d``.
        images: Pictures (1, C, H, W) that show the ranges of activations, normalised.
    """
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    quantizer = XNNPACKQuantizer()
    quantizer.set_operator_type(
        torch.ops.aten.conv2d.default, get_symmetric_quantization_config(is_per_channel=True)
    )
    module: Any = program.module()
    # The quantizer passes over a convolution whose weight another one has, as those of heads for
    # several levels, and ExecuTorch (1.5.1) would quantize their bias for the first one's input:
    # each gets a copy. Files hold equal weights once.
    for node in module.graph.find_nodes(op='get_attr'):
        for user in [*node.users][1:]:
            with module.graph.inserting_before(user):
                own = module.graph.node_copy(node)
            own.target = own.name
            module.register_buffer(own.target, attrgetter(node.target)(module).clone())
            user.replace_input_with(node, own)
    module = prepare_pt2e(module, quantizer)
    for image in images:
        module(image)
    module = convert_pt2e(module)
    # Not the images themselves: their strides would be those that the program takes.
    return torch.export.export(module, program.example_inputs[0])


@torch.no_grad()
def check_quantized(
    run: Run, job: Job, other: Run, name: str, file: str, recipe: str, agreement: float = AGREEMENT
) -> dict[str, Any]:
    """Compare a quantized file with PyTorch on the pictures of a job: on noise it is far off.

    ``other`` (``name``) computes the same, in int8. Return entries of the report.

    Raises:
        ExportError: If an output has less than ``LEAST_SNR``, or file and ``other`` differ.
    """
    pictures = [image for key, image in job.images.items() if key.startswith('picture')]
    expected = [job.reference(image) for image in pictures]
    found = signal_to_noise(expected, [[*run(image)] for image in pictures])
    wanted = signal_to_noise(expected, [[*other(image)] for image in pictures])
    for output, snr, ratio in zip(job.names, found, wanted, strict=True):
        if not abs(min(snr, FINE) - min(ratio, FINE)) <= agreement:
            raise ExportError(
                f'{output} has {snr:.1f} dB in the file and {ratio:.1f} dB in {name}, on '
                f'pictures: they compute different things; {file} is not written'
            )
        if not snr >= LEAST_SNR:
            raise ExportError(
                f'{output} keeps {snr:.1f} dB in int8, on pictures, less than {LEAST_SNR:g}: give '
                'more pictures, like those of the application (--calibration, --images); '
                f'{file} is not written'
            )
    ratios = dict(zip(job.names, (round(snr, 1) for snr in found), strict=True))
    return dict(
        quantization=dict(recipe=recipe, images=len(job.calibration or ()), snr=ratios),
        deviations='quantized: compared by decibels, on pictures',
    )
