"""Core ML's ML Programs, which Core ML computes on a Mac, and PyTorch elsewhere."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np
import torch

from mmcare.export.backends.base import AUTHORS, Backend, Inputs, WriteResult
from mmcare.export.backends.coreml_nms import ON_MAC, append_nms, check_nms, split_pipeline
from mmcare.export.backends.mil import open_package, refuse_options
from mmcare.export.check import FLOAT16
from mmcare.export.graph import Graph
from mmcare.export.rewrites import COREML, aten, with_torchvision
from mmcare.export.tasks import OutputFormat
from mmcare.export.tasks.base import Description, Options
from mmcare_runtime import Model, open_exported
from mmcare_runtime.text import tell_apart

TARGETS = ('iOS16', 'iOS17', 'iOS18', 'iOS26')
COMPRESSIONS = ('palettize4', 'palettize8', 'int8')
RUNTIME = 'Core ML' if ON_MAC else 'PyTorch, with sums in float32; not Core ML'
TEXTS = {  # of inputs and outputs, for Xcode
    'image': 'An image, prepared as the description "mmcare" in the metadata says.',
    'classLabel': 'The most probable class.',
    'classLabel_probs': 'The probability of each class.',
    'labels': 'The class of each pixel.',
    'coordinates': "A box's centre (x, y), width and height, as shares of the image.",
    'confidence': 'The score of each class for a box.',
    'iouThreshold': 'Optional: the overlap (IoU) above which the worse of two boxes is dropped.',
    'confidenceThreshold': 'Optional: the least score of a box.',
    'maps': 'An output of the network.',
}
OBJECT_TEXTS = {  # of two-stage detectors
    'boxes': 'x1, y1, x2, y2 of each object, in pixels of the image; the best first.',
    'scores': 'The score of each object; 0 in unused rows.',
    'labels': 'The class of each object.',
    'masks': 'The probability of each object at points within its box.',
}
PREVIEW = 'com.apple.coreml.model.preview'  # in Xcode


class CoreML(Backend):
    """``.mlpackage``, an ML Program."""

    name = 'coreml'
    suffix = '.mlpackage'
    # The second is native code of the first, the third compresses weights.
    packages = ('coremltools', 'coremltools.libmilstoragepython', 'sklearn')
    systems = ' (macOS, and Linux on x86_64)'
    input_kind = 'image'
    uint8_input = True
    precisions: ClassVar = {'float16': FLOAT16, **Backend.precisions}
    runtime = 'Core ML' if ON_MAC else 'the interpreter of ML Programs'
    fixes_precision = True
    output_format = OutputFormat(  # as Vision expects results
        nms='pipeline',
        box_format='cxcywh',
        relative=True,
        box_name='coordinates',
        score_name='confidence',
        label_map=torch.int32,
    )
    options: ClassVar = {
        'target': dict(choices=TARGETS, help=f'oldest iOS for Core ML; default: {TARGETS[0]}'),
        'compress': dict(choices=COMPRESSIONS, help='how weights are compressed for Core ML'),
        **AUTHORS,
    }

    def settings(self, options: Options) -> dict[str, str]:
        """Name the compression of the weights, if they are compressed."""
        return dict(compress=options['compress']) if 'compress' in options else {}

    def is_quantized(self, precision: str, options: Options) -> bool:
        """Return whether weights are compressed; such files are compared as quantized ones."""
        return 'compress' in options

    def write(
        self, graph: Graph, path: Path, description: Description, options: Options, images: Inputs
    ) -> WriteResult:
        """Write an ML Program, or a pipeline of an ML Program and NMS."""
        target, compression = options.get('target', TARGETS[0]), description.get('compress')
        model = convert_coreml(graph, description, target)
        if compression:
            model = compress_coreml(model, compression)
        classes = description.get('classes')
        if description.get('nms') == 'pipeline':
            model = append_nms(model, description)
        if description['outputs'][0].get('kind') == 'labels' and classes:
            colors = [f'#{r:02x}{g:02x}{b:02x}' for r, g, b in description.get('palette', ())]
            preview = dict(labels=classes, colors=colors)
            model.user_defined_metadata[f'{PREVIEW}.type'] = 'imageSegmenter'
            model.user_defined_metadata[f'{PREVIEW}.params'] = json.dumps(preview)
        known = TEXTS | (OBJECT_TEXTS if 'boxes' in model.output_description else {})
        for texts in (model.input_description, model.output_description):
            for name in texts:
                texts[name] = known.get(name, TEXTS['maps'])
        model.short_description = '{name}: {part}'.format(**description)
        model.author, model.license = (options.get(key, '') for key in ('author', 'license'))
        model.version = description['mmcare_version']
        model.user_defined_metadata['mmcare'] = json.dumps(description)
        model.save(str(path))
        # Not part of the package; as large as a small network.
        path.joinpath('executorch_debug_handle_mapping.json').unlink(missing_ok=True)
        return WriteResult(dict(target=target, runtime=RUNTIME))

    def open(self, path: Path, **options: Any) -> Model:
        """Open a file in Core ML on a Mac, elsewhere in the interpreter; files fix their types."""
        if ON_MAC:
            return open_exported(path, **options)
        refuse_options(path, options)
        return open_package(path)

    def open_network(self, path: Path, description: Description) -> Model:
        """Open the network of a file alone, without the NMS that may follow it."""
        if description.get('nms') != 'pipeline':
            return self.open(path, verify=False)
        with TemporaryDirectory() as folder:
            network, _ = split_pipeline(path, Path(folder))
            return self.open(network, verify=False)

    def check_rest(self, path: Path, description: Description) -> None:
        """Compare the NMS that follows the network with the config's."""
        if description.get('nms') == 'pipeline':
            with TemporaryDirectory() as folder:
                check_nms(path, split_pipeline(path, Path(folder))[1], description)


def convert_coreml(graph: Graph, description: Description, target: str) -> Any:
    """Convert a graph to a ``coremltools.models.MLModel``, all in one precision."""
    import coremltools as ct

    (image_input,), shape = description['inputs'], tuple(graph.example.shape)
    half = description['precision'] == 'float16'
    kind, classifier = description['outputs'][0].get('kind'), None
    dtype = np.float16 if half and not kind else np.float32
    outputs: Any = [
        ct.TensorType(name=name, dtype=np.int32 if output.get('kind') == 'labels' else dtype)
        for name, output in zip(graph.output_names, description['outputs'], strict=True)
    ]
    is_map = len(description['outputs'][0].get('shape', ())) == 4
    if kind == 'probabilities' and description.get('classes') and not is_map:
        classifier, outputs = ct.ClassifierConfig(tell_apart(description['classes'])), None
    if image_input['kind'] == 'tensor':
        image = ct.TensorType(name='image', shape=shape, dtype=dtype)
    else:
        layout = getattr(ct.colorlayout, image_input['channels'])
        image = ct.ImageType(name='image', shape=shape, color_layout=layout)
    decompositions = {**torch.export.default_decompositions(), **with_torchvision(COREML)}
    del decompositions[aten.matmul.default]  # ML Programs have it
    program = graph.program.run_decompositions(decompositions)
    # ML Programs have log(x + 1) as one operator, which the converter makes from log1p only.
    for node in program.graph.find_nodes(op='call_function', target=aten.log.default):
        (source,) = node.args
        if source.target is aten.add.Tensor and source.args[1:] == (1.0,):
            node.target, node.args = aten.log1p.default, source.args[:1]
    # The converter takes the dtype of `full_like` from its value, and zeros are integers.
    for node in program.graph.find_nodes(op='call_function', target=aten.full_like.default):
        if node.meta['val'].is_floating_point():
            node.args = node.args[0], float(node.args[1])
    return ct.convert(
        program,
        inputs=[image],
        outputs=outputs,
        classifier_config=classifier,
        convert_to='mlprogram',
        minimum_deployment_target=getattr(ct.target, target),
        compute_precision=ct.precision.FLOAT16 if half else ct.precision.FLOAT32,
        skip_model_load=not ON_MAC,
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
