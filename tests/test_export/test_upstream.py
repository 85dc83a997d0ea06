"""What runtimes cannot do, and mmcare works around; a test that passes says that a rewrite can go.

The reasons name the code that then goes.
"""

import sys

import numpy as np
import pytest
import torch
from export_helpers import Gated, Shared, export_int8, smooth
from helpers import ROOT
from torch import nn

from mmcare.export.backends import onnx_int8
from mmcare.export.rewrites import ChannelsLast

sys.path.insert(0, str(ROOT / 'benchmarks'))  # where scripts find each other

import int8_operators

pytestmark = pytest.mark.slow


class Apply(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Outputs(nn.Sequential):
    def forward(self, images):
        return (super().forward(images),)


class SharedConvolution(nn.Module):
    """A convolution with a norm for each of two levels, as RTMDet's head has."""

    def __init__(self):
        super().__init__()
        shared = nn.Conv2d(3, 8, 3)
        self.levels = nn.ModuleList(nn.Sequential(shared, nn.BatchNorm2d(8)) for _ in range(2))
        for level, (_, norm) in enumerate(self.levels):
            norm.running_var.fill_(level + 1)
        self.eval().requires_grad_(False)

    def forward(self, x):
        return tuple(level(x) for level in self.levels)


def lower(network, image):
    """Lower a network to XNNPACK."""
    pytest.importorskip('executorch')
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    program = torch.export.export(network, (image,))
    return to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])


@pytest.mark.parametrize(
    'function',
    [
        pytest.param(
            lambda x: x.amax((2, 3), keepdim=True),
            marks=pytest.mark.xfail(strict=True, reason='no maxima: rewrites._amax'),
        ),
        pytest.param(
            lambda x: x.mean(2, keepdim=True),
            marks=pytest.mark.xfail(strict=True, reason='no means over one axis: rewrites._mean'),
        ),
        pytest.param(
            lambda x: torch.add(*x.split([4, 4], 1)),
            marks=pytest.mark.xfail(strict=True, reason='no several outputs: rewrites._split'),
        ),
    ],
    ids=['maxima', 'means', 'split'],
)
def test_xnnpack_takes_all_operators(function):
    from executorch.devtools.backend_debug import get_delegation_info

    edge = lower(Apply(function).eval(), torch.rand(1, 8, 4, 6))
    counts = get_delegation_info(edge.exported_program().graph_module).delegation_by_operator
    counts.pop('getitem', None)
    assert not [name for name, number in counts.items() if number.non_delegated]


@pytest.mark.xfail(strict=True, reason='ExecuTorch: rewrites.separate_convolutions')
def test_executorch_fuses_norms_of_a_shared_convolution(tmp_path):
    from executorch.runtime import Runtime

    network, image = SharedConvolution(), torch.rand(1, 3, 8, 8)
    lower(network, image).to_executorch().save(str(tmp_path / 'shared.pte'))
    program = Runtime.get().load_program(str(tmp_path / 'shared.pte'))
    outputs = program.load_method('forward').execute([image])
    for output, expected in zip(outputs, network(image), strict=True):
        torch.testing.assert_close(output, expected)


@pytest.mark.xfail(strict=True, reason='ExecuTorch: executorch.copy_constants')
def test_executorch_writes_a_part_of_a_weight(tmp_path):
    from executorch.runtime import Runtime

    weight, x = torch.rand(12, 8)[6:], torch.rand(6, 8)
    network = Apply(lambda x: (nn.functional.linear(x, weight),)).eval()
    lower(network, x).to_executorch().save(str(tmp_path / 'part.pte'))
    program = Runtime.get().load_program(str(tmp_path / 'part.pte'))
    torch.testing.assert_close(program.load_method('forward').execute([x]), [*network(x)])


@pytest.mark.xfail(strict=True, reason='ExecuTorch: executorch.copy_constants')
def test_executorch_adds_a_permuted_weight(tmp_path):
    from executorch.runtime import Runtime

    weight, x = torch.rand(4, 6, 8).permute(2, 0, 1)[None], torch.rand(1, 8, 4, 6)
    network = Apply(lambda x: (x + weight,)).eval()
    lower(network, x).to_executorch().save(str(tmp_path / 'permuted.pte'))
    program = Runtime.get().load_program(str(tmp_path / 'permuted.pte'))
    torch.testing.assert_close(program.load_method('forward').execute([x]), [*network(x)])


@pytest.mark.xfail(strict=True, reason='XNNPACK: rewrites._linear')
def test_executorch_computes_a_weight_of_one_row(tmp_path):
    from executorch.runtime import Runtime

    weight, x = torch.rand(8), torch.rand(6, 8)
    network = Apply(lambda x: (nn.functional.linear(x, weight),)).eval()
    lower(network, x).to_executorch().save(str(tmp_path / 'row.pte'))
    program = Runtime.get().load_program(str(tmp_path / 'row.pte'))
    torch.testing.assert_close(program.load_method('forward').execute([x]), [*network(x)])


@pytest.mark.xfail(strict=True, reason='litert_torch: rewrites._product')
def test_litert_converts_a_product_with_one_column():
    litert_torch = pytest.importorskip('litert_torch')
    weight = torch.rand(1, 4, 2, 4)

    def multiply(x):
        rows = (weight * x[:, :2].sigmoid().reshape(1, 1, 2, 1)).reshape(1, 4, 8)
        return torch.bmm(rows, x.reshape(1, 8, 1)).reshape(1, 4, 1, 1).relu()

    litert_torch.convert(Apply(multiply).eval(), (torch.rand(1, 8, 1, 1),))


@pytest.mark.xfail(strict=True, reason='litert_torch: rewrites._product')
def test_litert_converts_a_product_with_one_row():
    litert_torch = pytest.importorskip('litert_torch')
    network = Apply(lambda x: torch.matmul(x.mT, x) / torch.matmul(x.mT[:, :, :1], x)).eval()
    litert_torch.convert(network, (torch.rand(1, 1, 8, 6),))


@pytest.mark.xfail(strict=True, reason='litert_torch: rewrites._linear_of_rows')
def test_litert_converts_a_linear_layer_of_rows():
    litert_torch = pytest.importorskip('litert_torch')
    weight = torch.rand(6, 8)
    network = Apply(lambda x: nn.functional.linear(x, weight)).eval()
    litert_torch.convert(network, (torch.rand(1, 5, 1, 8),))


@pytest.mark.xfail(strict=True, reason='pnnx: rewrites.separate_convolutions')
def test_pnnx_converts_a_shared_convolution(tmp_path):
    import subprocess

    pnnx = pytest.importorskip('pnnx')
    traced = torch.jit.trace(SharedConvolution(), torch.rand(1, 3, 8, 8))
    traced.save(str(tmp_path / 'model.pt'))
    command = [pnnx.EXEC_PATH, 'model.pt', 'inputshape=[1,3,8,8]']
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)
    ncnn = pytest.importorskip('ncnn')
    layers = (tmp_path / 'model.ncnn.param').read_text().splitlines()[2:]
    assert all(ncnn.create_layer(layer.split()[0]) is not None for layer in layers)


@pytest.mark.xfail(strict=True, reason='pnnx: ncnn.POOLED')
def test_pnnx_writes_the_shape_of_a_pooled_map(tmp_path):
    import subprocess

    pnnx = pytest.importorskip('pnnx')
    network = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(3, 8, 1), nn.Upsample((8, 8)))
    torch.jit.trace(network.eval(), torch.rand(1, 3, 8, 8)).save(str(tmp_path / 'model.pt'))
    command = [pnnx.EXEC_PATH, 'model.pt', 'inputshape=[1,3,8,8]']
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)
    assert ' 12=0 13=0 ' not in (tmp_path / 'model.ncnn.param').read_text()


@pytest.mark.xfail(strict=True, reason='ONNX Runtime: onnx_int8._join_readers')
def test_onnx_runtime_recognizes_gelu_behind_a_quantized_map(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_int8, '_join_readers', lambda graph: None)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU(), nn.Conv2d(8, 8, 3)).eval()
    report = export_int8(Outputs(network), ['maps'], smooth(0), [smooth(1)], tmp_path, 'onnx')
    assert int8_operators.count_operators(tmp_path / report['file'])['Gelu'] == 1


@pytest.mark.xfail(strict=True, reason='XNNPACK: rewrites.separate_weights')
def test_xnnpack_quantizes_a_shared_convolution():
    pytest.importorskip('executorch')
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    image = torch.rand(1, 3, 8, 8)
    quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config())
    module = prepare_pt2e(torch.export.export(Shared(), (image,)).module(), quantizer)
    module(image)
    convolution = torch.ops.aten.conv2d.default
    nodes = convert_pt2e(module).graph.find_nodes(op='call_function', target=convolution)
    assert all('dequantize' in str(node.args[1]) for node in nodes)


@pytest.mark.xfail(strict=True, reason='the quantizer confuses types: litert._quantize')
@pytest.mark.parametrize('kind', [Shared, Gated])
def test_litert_quantizes_maps_that_are_also_outputs(tmp_path, kind):
    """The file can be computed, and its outputs are float32."""
    litert_torch = pytest.importorskip('litert_torch')
    from ai_edge_litert.interpreter import Interpreter
    from ai_edge_quantizer import qtyping, quantizer

    path, image = str(tmp_path / 'maps.tflite'), torch.rand(1, 8, 8, 3)
    network = ChannelsLast(kind().eval(), ['first', 'second'], ['NHWC', 'NHWC'])
    litert_torch.convert(network, sample_kwargs=dict(image=image)).export(path)
    quantized = quantizer.Quantizer(path)
    quantized.add_static_config('.*', qtyping.TFLOperationName.CONV_2D, 8, 8)
    ranges = quantized.calibrate(dict(serving_default=[dict(image=image.numpy())]))
    program = Interpreter(model_content=bytes(quantized.quantize(ranges).quantized_model))
    program.allocate_tensors()
    outputs = program.get_signature_runner()(image=image.numpy())
    assert all(output.dtype == np.float32 for output in outputs.values())


@pytest.mark.xfail(strict=True, reason='ExecuTorch: the copy in executorch.decompose')
def test_constant_propagation_leaves_the_given_program():
    pytest.importorskip('executorch')
    from executorch.exir.passes.constant_prop_pass import constant_prop_pass

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.ones(3)

        def forward(self, x):
            return x * (2 * self.scale)

    program = torch.export.export(Scaled(), (torch.rand(1, 3),))
    constant_prop_pass(program.run_decompositions({}))
    assert 'scale' in program.constants
