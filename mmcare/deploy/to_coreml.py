"""Export to Core ML's ML Program."""

import platform
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmcare.deploy.parts import Behind, Graph, attach
from mmcare.deploy.requirements import require
from mmcare.deploy.stage_maps import (
    Normalization,
    StageMaps,
    use_few_operators,
    use_float16_attention,
)
from mmcare.deploy.to_onnx import compare, extreme_images
from mmcare.models import CARE
from mmcare.output import moved_into_place

PRECISIONS = ('float16', 'float32')
TARGETS = ('iOS16', 'iOS17', 'iOS18')
COMPRESSIONS = ('palettize4', 'palettize8', 'int8')
LICENSE = 'mmcare: Apache-2.0; the published CARE weights: MIT'


def check_coreml(compression: str | None = None) -> None:
    """Raise an ImportError unless everything for the export to Core ML is installed."""
    require('coremltools', 'export to Core ML')
    if compression is not None and compression.startswith('palettize'):
        require('sklearn', f'compression by {compression}, through scikit-learn,')


def prepare_coreml(
    backbone: CARE,
    shape: tuple[int, int],
    precision: str,
    normalization: Normalization | None,
    behind: Behind | None = None,
) -> StageMaps | Graph:
    """Make the graph that is converted: of few operators and, for float16, within its range.

    Args:
        backbone: Folded or not; an unfolded one stays as it is, for comparison.
        shape: Height and width.
        precision: One of :data:`PRECISIONS`.
        normalization: For images as input; None for normalised tensors.
        behind: Neck or head to go with it.
    """
    maps = StageMaps(backbone, shape, normalization)
    if backbone.deploy:
        use_few_operators(maps.backbone)
        if precision == 'float16':
            use_float16_attention(maps.backbone)
    return attach(maps, behind)


def convert_coreml(
    maps: StageMaps | Graph,
    shape: tuple[int, int],
    precision: str = 'float16',
    target: str = 'iOS16',
    channels: str | None = None,
) -> Any:
    """Convert to an ML Program, with outputs named as the graph has them.

    Args:
        maps: See :func:`prepare_coreml`.
        shape: Height and width.
        precision: ``'float16'``, inputs and outputs included, or ``'float32'``.
        target: Oldest system that is to run it, one of :data:`TARGETS`.
        channels: ``'RGB'`` or ``'BGR'``: the input is an image with channels in this order. None:
            it is a tensor (1, C, H, W).

    Returns:
        The ``coremltools.models.MLModel``.
    """
    check_coreml()
    import coremltools as ct

    from mmcare.deploy import coreml_passes  # noqa: F401 (registers a pass)

    size = 1, maps.backbone.in_channels, *shape
    half = precision == 'float16'
    dtype = np.float16 if half else np.float32
    if channels is None:
        image = ct.TensorType(name='image', shape=size, dtype=dtype)
    else:
        layout = getattr(ct.colorlayout, channels)
        image = ct.ImageType(name='image', shape=size, color_layout=layout)
    pipeline = ct.PassPipeline.DEFAULT
    if half:
        index = pipeline.passes.index('common::add_fp16_cast')
        pipeline.insert_pass(index - 1, 'mmcare::fuse_scale_and_shift')
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter('ignore')  # tracing is deprecated, but what coremltools takes
        traced = torch.jit.trace(maps, torch.zeros(size), check_trace=False)
        return ct.convert(
            traced,
            inputs=[image],
            outputs=[ct.TensorType(name=name, dtype=dtype) for name in maps.names],
            convert_to='mlprogram',
            minimum_deployment_target=getattr(ct.target, target),
            compute_precision=ct.precision.FLOAT16 if half else ct.precision.FLOAT32,
            pass_pipeline=pipeline,
            skip_model_load=platform.system() != 'Darwin',
        )


def compress_coreml(model: Any, compression: str) -> Any:
    """Compress the weights of a model, as coremltools does it without data.

    Args:
        model: A ``coremltools.models.MLModel``.
        compression: ``'palettize4'`` and ``'palettize8'``: 16 and 256 values a weight, found by
            k-means; ``'int8'``: linear, symmetric, a scale for each output channel.
    """
    check_coreml(compression)
    import coremltools.optimize.coreml as optimize

    if compression == 'int8':
        config = optimize.OpLinearQuantizerConfig(mode='linear_symmetric')
        return optimize.linear_quantize_weights(
            model, optimize.OptimizationConfig(global_config=config)
        )
    config = optimize.OpPalettizerConfig(
        mode='kmeans', nbits=int(compression.removeprefix('palettize'))
    )
    return optimize.palettize_weights(model, optimize.OptimizationConfig(global_config=config))


def save_coreml(model: Any, path: Path, metadata: Mapping[str, str]) -> int:
    """Write a model with its metadata.

    Args:
        model: A ``coremltools.models.MLModel``.
        path: ``.mlpackage``, replaced if it exists.
        metadata: Names and values, with ``arch``, ``part`` and ``version``.

    Returns:
        The size in bytes.
    """
    model.short_description = f'CARE {metadata["arch"]}: {metadata["part"]}'
    model.license = LICENSE
    model.version = metadata['version']
    for name, value in metadata.items():
        model.user_defined_metadata[f'mmcare.{name}'] = value
    with moved_into_place(path) as temporary:
        model.save(str(temporary))
        size = sum(file.stat().st_size for file in temporary.rglob('*') if file.is_file())
    return size


def count_operators(model: Any) -> dict[str, int]:
    """Count the operators of an ML Program by type, besides constants (and packed weights)."""
    function = model.get_spec().mlProgram.functions['main']
    block = function.block_specializations[function.opset]
    types = Counter(operation.type.split('.')[-1] for operation in block.operations)
    return {
        name: number
        for name, number in types.most_common()
        if name != 'const' and not name.startswith('constexpr')
    }


def run_coreml(
    model: Any, network: torch.nn.Module, channels: int, shape: tuple[int, int]
) -> dict[str, float]:
    """Compute the deviation from PyTorch on macOS, for a model with a tensor as input.

    Args:
        model: A ``coremltools.models.MLModel``.
        network: What it should compute.
        channels: Of the images.
        shape: Height and width.
    """
    names = [output.name for output in model.get_spec().description.output]

    def run(image: torch.Tensor) -> list[np.ndarray]:
        outputs = model.predict({'image': image.numpy()})
        return [np.asarray(outputs[name], np.float32) for name in names]

    return compare(network, run, extreme_images(channels, shape))
