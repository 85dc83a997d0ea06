"""Core ML packages, computed without Core ML; on a Mac, also with it."""

import platform
import shutil

import numpy as np
import pytest
import torch
from export_helpers import SHAPE, graph_of, odd_model, smooth, thin_model, to_coreml
from helpers import deviation
from PIL import Image
from torch import nn

from mmcare.export import open_exported
from mmcare.export.backends.coreml import compress_coreml
from mmcare.export.backends.mil import OPERATORS, open_package


class Square(nn.Conv2d):
    def forward(self, images):
        scaled = super().forward(images)
        return (scaled * scaled,)


@pytest.fixture(scope='module')
def package(tmp_path_factory):
    network = Square(3, 16, 1, bias=False).requires_grad_(False)
    network.weight.fill_(256)
    path = tmp_path_factory.mktemp('packages') / 'square.mlpackage'
    to_coreml(graph_of(odd_model(network, ['squares']), (32, 32))).save(str(path))
    return path


def test_overflow_and_failures(package, monkeypatch):
    image = np.full((1, 3, 32, 32), 0.25, np.float32)
    assert (open_package(package).run(image)[0] == 192**2).all()
    assert np.isinf(open_package(package).run(2 * image)[0]).all()
    monkeypatch.setitem(OPERATORS, 'mul', lambda x, y: x[..., 1:])
    with pytest.raises(ValueError, match=r'^mul .*\(1, 16, 32, 31\)'):
        open_package(package).run(image)
    monkeypatch.delitem(OPERATORS, 'mul')
    with pytest.raises(ValueError, match='cannot compute mul'):
        open_package(package)
    with pytest.raises(ValueError, match='with engine'):
        open_exported(package, engine='openvino', bfloat16=False)


class Bounded(nn.Module):
    """Operators that ViT needs."""

    def forward(self, images):
        return (torch.tanh(images) * ~(images > 0.5),)


class Pooled(nn.Module):
    """Averages as PoolFormer and STDC have them, and of maps in channels last, as LeViT does."""

    def forward(self, images):
        outside = nn.functional.avg_pool2d(images, 3, 2, 1)
        inside = nn.functional.avg_pool2d(images, 3, 2, 1, count_include_pad=False)
        last = nn.functional.layer_norm(images.permute(0, 2, 3, 1), (3,)).relu()
        return outside, inside, nn.functional.adaptive_avg_pool2d(last.permute(0, 3, 1, 2), 1)


class Changed(nn.Module):
    """Operators of GFL, TOOD, YOLOv3, RepPoints, ViG and DAB-DETR."""

    def forward(self, images):
        mean = nn.functional.linear(images, torch.arange(8.0))
        outside = (images < 0.2) | (images > 0.8)
        moved = nn.functional.leaky_relu(images - 0.5, 0.1)
        moved = torch.cat([moved[..., :1].floor(), moved[..., 1:]], -1)
        changed = images.clone()
        changed[..., 1:3] = images[..., 1:3] * 2
        best = images.flatten(2).topk(4, -1).indices
        rows = torch.cat([torch.arange(4).repeat(3, 1)[None], best], 1)
        waves = images.sin() * images.cos()
        return mean, outside * images, moved, changed, rows * 1.0, waves


@pytest.mark.parametrize('network', [Bounded(), Pooled(), Changed()])
def test_operators_of_other_models(tmp_path, network):
    image = torch.rand(1, 3, 8, 8)
    expected = network(image)
    model = odd_model(network, [f'maps{index}' for index, _ in enumerate(expected)])
    path, graph = tmp_path / 'model.mlpackage', graph_of(model, (8, 8))
    to_coreml(graph, 'float32').save(str(path))
    outputs = open_package(path, graph.output_names).run(image.numpy())
    for wanted, output in zip(expected, outputs, strict=True):
        assert deviation(wanted, torch.from_numpy(output)) < 1e-6


@pytest.mark.parametrize('name', ['Manifest.json', 'model.mlmodel', 'weight.bin'])
def test_damaged_packages(package, tmp_path, name):
    damaged = tmp_path / 'damaged.mlpackage'
    shutil.copytree(package, damaged)
    (file,) = damaged.rglob(name)
    for content in file.read_bytes()[:100], b'', None:
        file.unlink() if content is None else file.write_bytes(content)
        with pytest.raises(ValueError, match=r'damaged\.mlpackage[: ][^\n]*$'):
            open_exported(damaged)


# Never run so far: it was written without a Mac. The limits are guesses from the interpreter's
# deviations from PyTorch; Core ML may sum in float16.
@pytest.mark.skipif(platform.system() != 'Darwin', reason='only macOS has Core ML')
@pytest.mark.parametrize('pixels', [False, True])
@pytest.mark.parametrize('kind', ['float32', 'float16', 'float16, int8'])
def test_core_ml_computes_the_same(tmp_path, kind, pixels):
    import coremltools as ct

    thin = thin_model(out_indices=(0, 3))
    graph = graph_of(thin, SHAPE, thin.normalization if pixels else None)
    model = to_coreml(graph, kind[:7], 'image' if pixels else 'tensor')
    model = compress_coreml(model, 'int8') if 'int8' in kind else model
    path = tmp_path / 'thin.mlpackage'
    model.save(str(path))
    image = smooth(0)
    given = image.numpy()
    if pixels:
        image = torch.randint(0, 256, (1, 3, *SHAPE)).float()
        given = Image.fromarray(image[0].permute(1, 2, 0).byte().numpy())
    program = ct.models.MLModel(str(path), compute_units=ct.ComputeUnit.CPU_ONLY)
    outputs = program.predict({'image': given})
    found = [torch.from_numpy(np.asarray(outputs[name], np.float32)) for name in graph.output_names]
    expected = [torch.from_numpy(output) for output in open_package(path).run(image.numpy())]
    assert deviation(expected, found) < (1e-4 if kind == 'float32' else 2e-2)
