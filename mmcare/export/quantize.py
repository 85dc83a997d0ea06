"""Static int8 quantization of a program's convolutions, for XNNPACK."""

from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from mmcare.export.runtime import open_exported
from mmcare.export.verify import ExportError, signal_to_noise

RECIPE = (
    'int8, static: convolutions with a scale for each output channel; large depth-wise kernels '
    'and attention in float32'
)
LEAST_SNR = 10.0  # of every output, in dB: below it, results are of no use
AGREEMENT = 0.3  # of the file and the quantized program in PyTorch, in dB
FINE = 30.0  # dB; from here on roundings alone make more difference


@torch.no_grad()
def quantize(program: ExportedProgram, images: Sequence[Tensor]) -> ExportedProgram:
    """Quantize the convolutions of a program by PT2E, with XNNPACK's quantizer.

    Args:
        program: Decomposed, with constants propagated: after quantization that would turn int8
            weights into float32. Convolutions that are to stay in float32 are
            ``aten.convolution``, the others ``aten.conv2d``.
        images: Pictures (1, C, H, W) that show the ranges of activations, normalised.

    Returns:
        A program with quantize and dequantize operators, which PyTorch computes in float32.

    Raises:
        ValueError: If there is no image, or nothing to quantize.
    """
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    if not images:
        raise ValueError('no pictures to calibrate with')
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
    if not any('quantize_per' in str(node.target) for node in module.graph.nodes):
        raise ValueError('the program has no convolution to quantize')
    # Not the images themselves: their strides would be those that the program takes.
    return torch.export.export(module, program.example_inputs[0])


@torch.no_grad()
def check_quantized(
    path: Path,
    names: Sequence[str],
    reference: nn.Module,
    quantized: nn.Module,
    images: Mapping[str, Tensor],
) -> dict[str, float]:
    """Compare a quantized file with the network in float32 and with the quantized program.

    Of the images those are used whose names begin with ``picture``: on noise int8 is far off.

    Returns:
        Signal to noise of the file, in dB, by output.

    Raises:
        ExportError: If an output has less than ``LEAST_SNR``, or file and program differ.
    """
    program = open_exported(path)
    pictures = [image for name, image in images.items() if name.startswith('picture')]
    expected = [reference(image) for image in pictures]
    found = signal_to_noise(expected, [program.run(image) for image in pictures])
    wanted = signal_to_noise(expected, [[*quantized(image)] for image in pictures])
    for name, snr, other in zip(names, found, wanted, strict=True):
        if not abs(min(snr, FINE) - min(other, FINE)) <= AGREEMENT:
            raise ExportError(
                f'{name} has {snr:.1f} dB in the file and {other:.1f} dB in PyTorch, on pictures: '
                f'ExecuTorch computes something else; {path.name} is not written'
            )
        if not snr >= LEAST_SNR:
            raise ExportError(
                f'{name} keeps {snr:.1f} dB in int8, on pictures, less than {LEAST_SNR:g}: give '
                'more pictures, like those of the application (--calibration, --images); '
                f'{path.name} is not written'
            )
    return dict(zip(names, (round(snr, 1) for snr in found), strict=True))
