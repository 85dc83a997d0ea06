"""LiteRT, Android's runtime, with XNNPACK."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from mmcare.compatibility import require
from mmcare.export.backends import tflite_metadata
from mmcare.export.backends.base import AUTHORS, Backend, Exported, WriteResult
from mmcare.export.postprocessing import NMS_OPTIONS, Style
from mmcare.export.rewrites import LITERT, ChannelsLast
from mmcare.export.spec import ExportSpec, to_bytes
from mmcare.export.verify import ExportError

QUIET = dict(enable_progress_bar=False, enable_progress_report=False)
FORCE_FLOAT16 = 4  # TFLITE_XNNPACK_DELEGATE_FLAG_FORCE_FP16


class LiteRT(Backend):
    """``.tflite``; images and maps are NHWC, as Android's image libraries give them."""

    name = 'litert'
    ending = '.tflite'
    packages = ('ai_edge_litert', 'ai_edge_quantizer', 'litert_torch')  # which imports the others
    extra = 'litert'
    systems = ' (macOS, and Linux on x86_64)'
    precisions: ClassVar = {**Backend.precisions, 'float16': 5e-3, 'int8': None}
    runtime = 'LiteRT'
    layout = 'NHWC'
    takes_bytes = True
    style = Style(relative=True, labels=torch.float32)  # as MediaPipe expects boxes
    options: ClassVar = {**NMS_OPTIONS, **AUTHORS}

    def write(self, spec: ExportSpec, path: Path, description: Mapping[str, Any]) -> WriteResult:
        """Write a ``.tflite`` file, which computes the same with and without XNNPACK."""
        import litert_torch

        litert_torch.config.show_progress = False
        program = spec.program.run_decompositions(dict(LITERT))
        network = ChannelsLast(program.module(), spec.output_names)
        try:
            image = _to_input(spec.images['random'].tensor, spec.takes_bytes)
            litert_torch.convert(network, sample_kwargs=dict(image=image)).export(str(path))
        except Exception as error:  # the converter has classes of its own
            raise ExportError(f'LiteRT cannot convert {path.name}: {error}') from error
        if description['precision'] == 'int8':
            images = [_to_input(image, spec.takes_bytes).numpy() for image in spec.calibration]
            _quantize(path, images, spec.output_names)
        if description['precision'] == 'float16':
            _cast(path)
        author, terms = (spec.options.get(key, '') for key in ('author', 'license'))
        standard = tflite_metadata.write_metadata(description, author, terms)
        entries = dict(mmcare=json.dumps(description).encode(), TFLITE_METADATA=standard)
        _store(path, {name: data for name, data in entries.items() if data})
        if standard:
            tflite_metadata.append_labels(path, description)
        # A version of LiteRT multiplied transposed matrices wrongly.
        plain = self.open(path, delegate=False).run
        return WriteResult(_count_operators(path), plain, 'LiteRT without XNNPACK')

    def open(self, path: Path, delegate: bool = True) -> Exported:
        """Open a file in LiteRT, with its XNNPACK delegate or without."""
        runtime = require('ai_edge_litert.interpreter', 'running a .tflite file', 'litert')
        name = 'AUTO' if delegate else 'BUILTIN_WITHOUT_DEFAULT_DELEGATES'
        resolver = dict(experimental_op_resolver_type=runtime.OpResolverType[name])
        program = runtime.Interpreter(str(path), num_threads=1, **resolver)
        program.allocate_tensors()
        (image,), outputs = program.get_input_details(), program.get_output_details()
        takes_bytes = image['dtype'] is np.uint8

        def run(images: Tensor) -> list[np.ndarray]:
            program.set_tensor(image['index'], _to_input(images, takes_bytes).numpy())
            program.invoke()
            found = [program.get_tensor(output['index']) for output in outputs]
            return [x.transpose(0, 3, 1, 2) if x.ndim == 4 else x for x in found]

        _, height, width, channels = map(int, image['shape'])
        return Exported(run, (1, channels, height, width), _read(path))

    def open_float16(self, path: Path) -> Exported:
        """Open a file in LiteRT, with XNNPACK computing in float16."""
        from ai_edge_litert.compiled_model import CompiledModel
        from ai_edge_litert.environment import Environment
        from ai_edge_litert.options import CpuOptions, Options

        options = Options(cpu_options=CpuOptions(num_threads=1, xnnpack_flags=FORCE_FLOAT16))
        program = CompiledModel.from_file(str(path), None, Environment.create(), options)
        (image,), outputs = program.create_input_buffers(0), program.create_output_buffers(0)
        details = [output.get_tensor_details() for output in outputs]
        takes_bytes = np.dtype(image.get_tensor_details()['dtype']) == np.uint8

        def run(images: Tensor) -> list[np.ndarray]:
            image.write(_to_input(images, takes_bytes).numpy())
            program.run_by_index(0, [image], outputs)
            found = [
                output.read(prod(how['shape']), np.dtype(how['dtype'])).reshape(how['shape'])
                for output, how in zip(outputs, details, strict=True)
            ]
            return [x.transpose(0, 3, 1, 2) if x.ndim == 4 else x for x in found]

        return replace(self.open(path), run=run)


def _to_input(images: Tensor, takes_bytes: bool) -> Tensor:
    """Turn images (1, C, H, W) into what a file takes: (1, H, W, C), perhaps as uint8."""
    images = images.permute(0, 2, 3, 1).contiguous()
    return to_bytes(images) if takes_bytes else images


def _cast(path: Path) -> None:
    """Store the weights of convolutions and linear layers in float16, in place."""
    from ai_edge_quantizer import qtyping, quantizer

    operators = qtyping.TFLOperationName.ALL_SUPPORTED
    cast = quantizer.Quantizer(str(path))
    cast.add_weight_only_config(
        '.*', operators, 16, algorithm_key=quantizer.AlgorithmName.FLOAT_CASTING
    )
    result = cast.quantize(**QUIET)
    path.write_bytes(result.quantized_model)


def _quantize(path: Path, images: Sequence[np.ndarray], names: Sequence[str]) -> None:
    """Quantize the convolutions of a file, in place."""
    from ai_edge_litert import schema_py_generated as schema
    from ai_edge_litert.tools import flatbuffer_utils
    from ai_edge_quantizer import calibrator, qtyping, quantizer
    from ai_edge_quantizer.utils.qsv_utils import min_max_update

    quantized = quantizer.Quantizer(str(path))
    for name in ('CONV_2D', 'DEPTHWISE_CONV_2D'):
        quantized.add_static_config('.*', qtyping.TFLOperationName[name], 8, 8)
    data = [dict(image=image) for image in images]
    # By default it averages the ranges of pictures, and rare activations are cut off.
    ranges = calibrator.Calibrator(str(path), 1, qsv_update_func=min_max_update)
    ranges.calibrate(dict(serving_default=data), quantized._recipe_manager)
    result = quantized.quantize(ranges.get_model_qsvs(), **QUIET)
    model = flatbuffer_utils.read_model_from_bytearray(result.quantized_model)
    # The quantizer (0.10.0) confuses types where an output also feeds a layer: the output is int8,
    # or a convolution's input float32. The signature names the tensors in float32, unless a
    # convolution makes them.
    (graph,), (signature,) = model.subgraphs, model.signatureDefs
    small = [tensor.type == schema.TensorType.INT8 for tensor in graph.tensors]
    ends = [(op.inputs[0], op.outputs[0]) for op in graph.operators]
    ends = [(source, out) for source, out in ends if small[source] and not small[out]]
    floats, integers = dict(ends), {out: source for source, out in ends}
    for output in signature.outputs:
        output.tensorIndex = floats.get(output.tensorIndex, output.tensorIndex)
    tensors = {output.name.decode(): output.tensorIndex for output in signature.outputs}
    graph.outputs = [tensors[name] for name in names]
    for op in graph.operators:
        if len(op.inputs) > 1 and small[op.inputs[1]]:
            op.inputs[0] = integers.get(op.inputs[0], op.inputs[0])
    flatbuffer_utils.write_model(model, str(path))


def _store(path: Path, entries: Mapping[str, bytes]) -> None:
    from ai_edge_litert import schema_py_generated as schema
    from ai_edge_litert.tools import flatbuffer_utils

    model = flatbuffer_utils.read_model(str(path))
    for name, data in entries.items():
        buffer, entry = schema.BufferT(), schema.MetadataT()
        buffer.data, entry.name, entry.buffer = data, name, len(model.buffers)
        model.buffers.append(buffer)
        model.metadata = [*(model.metadata or ()), entry]
    flatbuffer_utils.write_model(model, str(path))


def _read(path: Path) -> dict[str, Any]:
    """Read the description in a file's metadata; empty if it has none."""
    from ai_edge_litert.schema_py_generated import Model

    model = Model.GetRootAs(path.read_bytes())
    entries = map(model.Metadata, range(model.MetadataLength()))
    found = [model.Buffers(entry.Buffer()) for entry in entries if entry.Name() == b'mmcare']
    return json.loads(found[0].DataAsNumpy().tobytes()) if found else {}


def _count_operators(path: Path) -> dict[str, Any]:
    """Count XNNPACK's delegates, and by type the operators outside of them."""
    from ai_edge_litert.interpreter import Interpreter

    program = Interpreter(str(path), num_threads=1)
    program.allocate_tensors()
    nodes = program._get_ops_details()  # in the order of computation, then delegates
    delegates = [node for node in nodes if node['op_name'] == 'DELEGATE']
    inside = set()
    for delegate in delegates:
        needed = {*delegate['outputs']}
        for node in reversed(nodes):
            if needed & {*node['outputs']}:
                inside.add(node['index'])
                needed |= {*node['inputs']} - {*delegate['inputs']}
    outside = Counter(node['op_name'] for node in nodes if node['index'] not in inside)
    return dict(delegates=len(delegates), outside={**outside})
