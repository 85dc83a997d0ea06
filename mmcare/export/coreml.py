"""Export to Core ML's ML Program."""

import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mmcare.export.load import Network, Normalization
from mmcare.export.program import COREML, export_program
from mmcare.export.verify import compare, trial_images
from mmcare.files import moved_into_place
from mmcare.models.backbones.care import TOTAL_STRIDE, LinearAttention
from mmcare.models.folding import fold

PRECISIONS = ('float16', 'float32')
TARGETS = ('iOS16', 'iOS17', 'iOS18')
COMPRESSIONS = ('palettize4', 'palettize8', 'int8')
LICENSE = 'mmcare: Apache-2.0; the published CARE weights: MIT'
NOT_RUN = 'converted, but not run: that needs macOS'


def write_coreml(
    network: Network,
    names: Sequence[str],
    path: Path,
    shape: tuple[int, int],
    precision: str,
    target: str,
    normalization: Normalization | None,
    compression: str | None,
    metadata: Mapping[str, str],
    reference: nn.Module,
) -> dict[str, Any]:
    """Write an ML Program; on macOS compare it with PyTorch if it takes a tensor.

    Args:
        network, names, shape, precision, target, normalization: See :func:`convert_coreml`.
        path: ``.mlpackage`` to write, replaced if it exists.
        compression: See :func:`compress_coreml`; None for weights as they are.
        metadata: Names and values to be stored, with ``arch``, ``part`` and ``version``.
        reference: What the file should compute.

    Returns:
        Entries of the report: operators by type, deviations and options.
    """
    model = convert_coreml(network, names, shape, precision, target, normalization)
    if compression:
        model = compress_coreml(model, compression)
    model.short_description = f'CARE {metadata["arch"]}: {metadata["part"]}'
    model.license = LICENSE
    model.version = metadata['version']
    for name, value in metadata.items():
        model.user_defined_metadata[f'mmcare.{name}'] = value
    deviations: str | dict[str, float] = NOT_RUN
    if platform.system() == 'Darwin' and normalization is not None:
        deviations = 'not measured for images as input: export with --input tensor to measure them'
    elif platform.system() == 'Darwin':

        def run(image: Tensor) -> list[np.ndarray]:
            outputs = model.predict({'image': image.numpy()})
            return [np.asarray(outputs[name], np.float32) for name in names]

        deviations = compare(reference, run, trial_images(network.in_channels, shape))
    with moved_into_place(path) as temporary:
        model.save(str(temporary))
        # Not part of the package; as large as a small network.
        temporary.joinpath('executorch_debug_handle_mapping.json').unlink(missing_ok=True)
    return dict(
        precision=precision,
        target=target,
        input=f'image ({normalization.channels})' if normalization else 'tensor, normalised',
        compression=compression or 'none',
        operators=count_operators(model),
        deviations=deviations,
    )


def convert_coreml(
    network: Network,
    names: Sequence[str],
    shape: tuple[int, int],
    precision: str = 'float16',
    target: str = 'iOS16',
    normalization: Normalization | None = None,
) -> Any:
    """Convert a folded network to an ML Program.

    Args:
        network: It is copied.
        names: Of its outputs.
        shape: Height and width.
        precision: ``'float16'``, inputs and outputs included, or ``'float32'``.
        target: Oldest system that is to run it, one of :data:`TARGETS`.
        normalization: The input is an image, whose pixels the program normalises. None: it is a
            normalised tensor (1, C, H, W).

    Returns:
        The ``coremltools.models.MLModel``.
    """
    import coremltools as ct

    size = 1, network.in_channels, *shape
    half = precision == 'float16'
    dtype = np.float16 if half else np.float32
    network = deepcopy(network).requires_grad_(False)
    for module in network.modules():
        if isinstance(module, LinearAttention) and half:
            module.eps = LinearAttention.FLOAT16_EPS
    graph: nn.Module = network
    if normalization is None:
        image = ct.TensorType(name='image', shape=size, dtype=dtype)
    else:
        graph = take_pixels(network, shape, normalization)
        layout = getattr(ct.colorlayout, normalization.channels)
        image = ct.ImageType(name='image', shape=size, color_layout=layout)
    program = export_program(graph, network.in_channels, shape)
    return ct.convert(
        program.run_decompositions({**torch.export.default_decompositions(), **COREML}),
        inputs=[image],
        outputs=[ct.TensorType(name=name, dtype=dtype) for name in names],
        convert_to='mlprogram',
        minimum_deployment_target=getattr(ct.target, target),
        compute_precision=ct.precision.FLOAT16 if half else ct.precision.FLOAT32,
        skip_model_load=platform.system() != 'Darwin',
    )


def take_pixels(
    network: Network, shape: tuple[int, int], normalization: Normalization
) -> nn.Module:
    """Return a network of images with pixels from 0 to 255; the given one may be changed.

    Core ML's own image input knows one scale for all channels.
    """
    norm = nn.BatchNorm2d(len(normalization.mean), eps=0, affine=False).eval()
    norm.running_mean = torch.tensor(normalization.mean)
    norm.running_var = torch.tensor(normalization.std) ** 2
    if any(side % TOTAL_STRIDE for side in shape):
        return nn.Sequential(norm, network)  # CARE pads with zeros of normalised pixels
    fold(network.backbone.stem.conv, norm, norm_first=True)
    return network


def compress_coreml(model: Any, compression: str) -> Any:
    """Compress the weights of a model, without data.

    Args:
        model: A ``coremltools.models.MLModel``.
        compression: ``'palettize4'`` and ``'palettize8'``: 16 and 256 values a weight, found by
            k-means; ``'int8'``: linear, symmetric, a scale for each output channel.
    """
    import coremltools.optimize.coreml as optimize

    if compression == 'int8':
        config = optimize.OpLinearQuantizerConfig(mode='linear_symmetric')
        compress = optimize.linear_quantize_weights
    else:
        bits = int(compression.removeprefix('palettize'))
        config = optimize.OpPalettizerConfig(mode='kmeans', nbits=bits)
        compress = optimize.palettize_weights
    return compress(model, optimize.OptimizationConfig(global_config=config))


def count_operators(model: Any) -> dict[str, int]:
    """Count the operators of an ML Program by type, constants and packed weights left out."""
    function = model.get_spec().mlProgram.functions['main']
    block = function.block_specializations[function.opset]
    types = Counter(operation.type.split('.')[-1] for operation in block.operations)
    return {
        name: number
        for name, number in types.most_common()
        if name != 'const' and not name.startswith('constexpr')
    }
