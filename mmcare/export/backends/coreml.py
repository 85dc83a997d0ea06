"""Core ML's ML Program, computed by PyTorch where Core ML is missing."""

import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from mmcare.export.backends.base import Backend, Exported, WriteResult
from mmcare.export.backends.mil import open_package
from mmcare.export.rewrites import COREML, aten, export_program
from mmcare.export.spec import ExportSpec

TARGETS = ('iOS16', 'iOS17', 'iOS18')
COMPRESSIONS = ('palettize4', 'palettize8', 'int8')
RUNTIME = 'PyTorch, with sums in float32; not Core ML'  # on every system
LICENSE = 'mmcare: Apache-2.0; the published CARE weights: MIT'


class CoreML(Backend):
    """``.mlpackage``, an ML Program."""

    name = 'coreml'
    ending = '.mlpackage'
    # The second is its native code, the third compresses.
    packages = ('coremltools', 'coremltools.libmilstoragepython', 'sklearn')
    systems = ' (macOS, and Linux on x86_64)'
    input_kind = 'image'
    precisions: ClassVar = {'float16': 1e-2, **Backend.precisions}
    says_type = True
    runtime = 'the interpreter of ML Programs'
    options: ClassVar = {
        'target': dict(choices=TARGETS, help=f'oldest iOS for Core ML; default: {TARGETS[0]}'),
        'compress': dict(choices=COMPRESSIONS, help='how weights are compressed for Core ML'),
    }

    def write(self, spec: ExportSpec, path: Path, description: Mapping[str, Any]) -> WriteResult:
        """Write an ML Program."""
        target, compression = spec.options.get('target', TARGETS[0]), description.get('compress')
        model = convert_coreml(spec, description['precision'], target)
        if compression:
            model = compress_coreml(model, compression)
        model.short_description = 'CARE {arch}: {part}'.format(**description)
        model.license = LICENSE
        model.version = description['mmcare_version']
        model.user_defined_metadata['mmcare'] = json.dumps(description)
        model.save(str(path))
        # Not part of the package; as large as a small network.
        path.joinpath('executorch_debug_handle_mapping.json').unlink(missing_ok=True)
        return WriteResult(dict(target=target, runtime=RUNTIME))

    def open(self, path: Path) -> Exported:
        """Open a package in the interpreter of :mod:`mmcare.export.backends.mil`."""
        return open_package(path)


def convert_coreml(spec: ExportSpec, precision: str = 'float16', target: str = 'iOS16') -> Any:
    """Convert a network to a ``coremltools.models.MLModel``, all in one precision."""
    import coremltools as ct

    half = precision == 'float16'
    dtype = np.float16 if half else np.float32
    if spec.normalization is None or spec.input_kind == 'tensor':
        image = ct.TensorType(name='image', shape=spec.input_shape, dtype=dtype)
    else:
        layout = getattr(ct.colorlayout, spec.normalization.channels)
        image = ct.ImageType(name='image', shape=spec.input_shape, color_layout=layout)
    decompositions = {**torch.export.default_decompositions(), **COREML}
    del decompositions[aten.matmul.default]  # ML Programs have it
    program = export_program(spec.network, spec.input_shape).run_decompositions(decompositions)
    # ML Programs have log(x + 1) as one operator; the converter takes it from log1p alone.
    for node in program.graph.find_nodes(op='call_function', target=aten.log.default):
        (source,) = node.args
        if source.target is aten.add.Tensor and source.args[1:] == (1.0,):
            node.target, node.args = aten.log1p.default, source.args[:1]
    return ct.convert(
        program,
        inputs=[image],
        outputs=[ct.TensorType(name=name, dtype=dtype) for name in spec.output_names],
        convert_to='mlprogram',
        minimum_deployment_target=getattr(ct.target, target),
        compute_precision=ct.precision.FLOAT16 if half else ct.precision.FLOAT32,
        skip_model_load=platform.system() != 'Darwin',
    )


def compress_coreml(model: Any, compression: str) -> Any:
    """Compress weights to 16 or 256 values by k-means, or to int8 with a scale for each channel."""
    import coremltools.optimize.coreml as optimize

    if compression == 'int8':
        config = optimize.OpLinearQuantizerConfig(mode='linear_symmetric')
        compress = optimize.linear_quantize_weights
    else:
        config = optimize.OpPalettizerConfig(mode='kmeans', nbits=int(compression[-1]))
        compress = optimize.palettize_weights
    return compress(model, optimize.OptimizationConfig(global_config=config))
