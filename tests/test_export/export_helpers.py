"""What tests of exports share: a thin model, graphs of single networks, running files."""

from pathlib import Path

import onnx
import torch
import torch.nn.functional as F
from helpers import thin_backbone
from torch import nn

from mmcare.deployment import BackboneInfo
from mmcare.export import export_model, open_exported
from mmcare.export.backends.coreml import convert_coreml
from mmcare.export.backends.mil import open_package
from mmcare.export.graph import build_graph
from mmcare.export.loading import IMAGENET, LoadedModel
from mmcare.export.tasks import make_task

SHAPE = (64, 96)
STAGES = ['stage1', 'stage2', 'stage3', 'stage4']


def thin_model(**arguments):
    return LoadedModel('thin', 'random', make_task(thin_backbone(**arguments)), IMAGENET)


def odd_model(network, names, normalization=IMAGENET):
    """Take a network of (1, 3, H, W) images that is no CARE for a backbone."""
    task = make_task(network, info=BackboneInfo(output_names=tuple(names), stride=1))
    return LoadedModel('odd', 'random', task, normalization)


def graph_of(model, shape=SHAPE, normalization=None):
    """Change a network as for Core ML: a graph of raw outputs."""
    example = torch.zeros(1, model.task.info.in_channels, *shape)
    names = model.task.name_outputs(model.task(example))
    return build_graph(model, shape, normalization, names, None, False)


def to_coreml(graph, precision='float16', kind='tensor'):
    image = dict(kind=kind, channels='RGB')
    description = dict(inputs=[image], outputs=[{}] * len(graph.output_names), precision=precision)
    return convert_coreml(graph, description, 'iOS16')


def export_int8(network, names, picture, calibration, folder, name='executorch'):
    """Export a network with normalized images to calibrate with and one to check on."""
    images = [IMAGENET.to_pixels(image) for image in (*calibration, picture, picture)]
    options = dict(precision='int8', images=images)
    model, shape = odd_model(network, names), tuple(picture.shape[2:])
    return export_model(model, folder, shape, (name,), **options)[name]


def run_file(path, image):
    """Return the names of an ONNX file's outputs, and the outputs of a file."""
    outputs = onnx.load(path).graph.output if path.suffix == '.onnx' else ()
    results = [torch.from_numpy(output) for output in open_exported(path).run(image.numpy())]
    return [output.name for output in outputs], results


def operators_of(model):
    """Return the types of the operators of an ML Program."""
    function = model.get_spec().mlProgram.functions['main']
    operations = function.block_specializations[function.opset].operations
    return {operation.type for operation in operations}


def run_program(model, image):
    outputs = open_package(Path(model.package_path)).run(image.numpy())
    return [torch.from_numpy(output) for output in outputs]


def smooth(seed, shape=SHAPE):
    torch.manual_seed(seed)
    return F.interpolate(torch.randn(1, 3, 4, 4), shape, mode='bicubic')


class Shared(nn.Module):
    """A convolution that is used twice, as those of heads are for several levels."""

    def __init__(self):
        super().__init__()
        self.first, self.shared = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1)
        self.requires_grad_(False)

    def forward(self, images):
        maps = self.shared(F.relu(self.first(images)))
        return maps, self.shared(maps)


class Gated(Shared):
    """A convolution whose maps are an output and feed a layer in float32."""

    def forward(self, images):
        maps = self.first(images)
        return maps, maps.sigmoid()
