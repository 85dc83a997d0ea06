"""What tests of exports share: a thin source, specifications of single networks, running files."""

from collections import Counter
from copy import deepcopy
from pathlib import Path

import onnx
import torch
import torch.nn.functional as F
from helpers import thin_backbone
from torch import nn

from mmcare.export.backends import BACKENDS, open_exported
from mmcare.export.backends.mil import open_package
from mmcare.export.source import IMAGENET, Network, Source
from mmcare.export.spec import CheckImage, ExportSpec, draw_images
from mmcare.models.averaged_attention import average_attention
from mmcare.models.deployment import BackboneInfo, fuse_all

SHAPE = (64, 96)
STAGES = ['stage1', 'stage2', 'stage3', 'stage4']


def thin_source(**arguments):
    return Source('thin', 'random', Network(thin_backbone(**arguments)), IMAGENET)


def fused(source):
    network = deepcopy(source.network)
    fuse_all(network)
    average_attention(network)
    return network


def spec_of(network, names, shape, **options):
    """Specify a file of a network of (1, C, H, W) images, C being 3 or its own."""
    info = getattr(network, 'info', BackboneInfo())
    images = draw_images(info.in_channels, shape)
    options = dict(dict(info=info, normalization=IMAGENET), **options)
    metadata = dict(name='odd', part='backbone', shape=[*shape])
    input_shape = 1, info.in_channels, *shape
    return ExportSpec(network, network, names, input_shape, images, metadata=metadata, **options)


def export_int8(network, names, picture, calibration, folder, name='executorch'):
    shape = tuple(picture.shape[2:])
    spec = spec_of(network, names, shape, precision='int8', calibration=calibration)
    spec.images['picture1'] = CheckImage(picture, is_picture=True)
    return BACKENDS[name].export(spec, folder)


def normalized(pixels):
    mean, std = torch.tensor([IMAGENET.mean, IMAGENET.std])[:, :, None, None]
    return (pixels - mean) / std


def run_file(path, image):
    outputs = onnx.load(path).graph.output if path.suffix == '.onnx' else ()
    found = [torch.from_numpy(output) for output in open_exported(path).run(image)]
    return [output.name for output in outputs], found


def count_operators(model):
    """Count the operators of an ML Program by type, constants and packed weights left out."""
    function = model.get_spec().mlProgram.functions['main']
    operations = function.block_specializations[function.opset].operations
    types = [operation.type for operation in operations]
    return Counter(name for name in types if not name.startswith('const'))


def run_program(model, image):
    outputs = open_package(Path(model.package_path)).run(image)
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
