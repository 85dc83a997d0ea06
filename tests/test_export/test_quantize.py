"""int8 for XNNPACK: calibrated with pictures, and compared on others."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from export_helpers import Shared, export_int8, smooth, thin_model
from mmengine.config import Config
from PIL import ExifTags, Image
from torch import nn

from mmcare.export.backends.executorch import decompose, quantize
from mmcare.export.check import MIN_SQNR_DB, ExportError
from mmcare.export.images import read_images
from mmcare.export.loading import IMAGENET
from mmcare.export.rewrites import export_program

pytestmark = pytest.mark.conversion


class Small(nn.Module):
    """An ordinary convolution, then a large depth-wise kernel."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 1)
        self.large = nn.Conv2d(8, 8, 7, padding=3, groups=8)
        self.requires_grad_(False)

    def forward(self, images):
        return (self.large(F.gelu(self.conv(images))),)


def targets(program, word):
    return [node for node in program.graph.nodes if word in str(node.target)]


@torch.no_grad()
def test_what_is_quantized():
    small, image = Small().eval(), smooth(0)
    program = decompose(export_program(small, image))
    found = {}
    for scale in (1, 4):
        quantized = quantize(program, [scale * image])
        assert len(targets(quantized, 'dequantize_per_channel')) == 1  # weights of the first
        assert len(targets(quantized, 'aten.convolution')) == 3  # pieces of the second
        found[scale] = quantized.module()(image)[0]
    error = {scale: (output - small(image)[0]).square().mean() for scale, output in found.items()}
    assert 0 < error[1] < error[4]


def test_shared_weights(tmp_path):
    """XNNPACK takes no convolution of int8 maps by float weights. Weights are stored once."""
    torch.manual_seed(0)
    network = Shared().eval()
    report = export_int8(network, ['one', 'two'], smooth(0), [smooth(1)], tmp_path)
    assert report['delegates'] == 1 and min(report['sqnr_db'].values()) > 20
    weight = network.shared.weight[0].permute(1, 2, 0)  # channels last, as XNNPACK has them
    row = (weight / weight.abs().max() * 127).round().to(torch.int8)
    assert (tmp_path / report['file']).read_bytes().count(row.numpy().tobytes()) == 1


def test_outputs_spoiled_by_int8_are_named(tmp_path):
    """Ranges of a dark picture cut a bright one off."""
    small, picture = Small().eval(), smooth(0, (8, 8))
    with pytest.raises(ExportError, match=rf'maps keeps -?\d+\.\d dB.*less than {MIN_SQNR_DB:g}'):
        export_int8(small, ['maps'], picture, [0.01 * picture], tmp_path)


def test_pictures_of_a_folder(tmp_path):
    """They are turned as their EXIF says, and resized as in the test pipeline."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    Image.new('RGB', (128, 64), 'red').save(tmp_path / 'upright.jpg', exif=exif)
    (picture,) = read_images(thin_model(), (64, 64), 1, tmp_path)
    assert picture[0, 0, :, :32].min() > 250
    padding = picture[0, :, 0, 32:]
    assert torch.equal(padding, torch.tensor(IMAGENET.mean).round()[:, None].expand_as(padding))
    steps = [dict(type='ResizeEdge', scale=64), dict(type='CenterCrop', crop_size=64)]
    config = Config(dict(model={}, test_dataloader=dict(dataset=dict(pipeline=steps))))
    (picture,) = read_images(replace(thin_model(), config=config), (64, 64), 1, tmp_path)
    assert picture[0, 0].min() > 250  # crops fill the image
