"""int8 for XNNPACK: calibrated with pictures, and compared on others."""

import mmcv
import pytest
import torch
import torch.nn.functional as F
from PIL import ExifTags, Image
from test_export import SHAPE, job_of, thin_source
from torch import nn

from mmcare.export.backends import FORMATS
from mmcare.export.backends.executorch import decompose, quantize
from mmcare.export.calibration import read_pictures
from mmcare.export.export import write_file
from mmcare.export.rewrites import export_program
from mmcare.export.verify import LEAST_SNR, ExportError


def smooth(seed, shape=SHAPE):
    """Draw an image of soft blots."""
    torch.manual_seed(seed)
    return F.interpolate(torch.randn(1, 3, 4, 4), shape, mode='bicubic')


def draw_pictures(folder, ending):
    """Draw four pictures to calibrate with."""
    for seed in range(4):
        pixels = (smooth(seed, (80, 120))[0].permute(1, 2, 0) * 50 + 120).clamp(0, 255)
        mmcv.imwrite(pixels.byte().numpy(), str(folder / f'{seed}{ending}'))


class Small(nn.Module):
    """An ordinary convolution, then a large depth-wise kernel."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 1)
        self.large = nn.Conv2d(8, 8, 7, padding=3, groups=8)
        self.requires_grad_(False)

    def forward(self, images):
        return (self.large(F.gelu(self.conv(images))),)


def write_int8(network, path, names, picture, calibration):
    options = dict(precision='int8', calibration=[calibration])
    job = job_of(network, names, tuple(picture.shape[2:]), **options)
    job.images['picture1'] = picture
    return write_file(FORMATS['executorch'], job, path)


def targets(program, word):
    return [node for node in program.graph.nodes if word in str(node.target)]


@torch.no_grad()
def test_convolutions_are_quantized_and_large_kernels_are_not():
    """Nor is anything else; what is calibrated with shows in the results."""
    small, image = Small().eval(), smooth(0)
    program = decompose(export_program(small, 3, SHAPE))
    found = {}
    for scale in (1, 4):
        quantized = quantize(program, [scale * image])
        assert len(targets(quantized, 'dequantize_per_channel')) == 1  # weights of the first
        assert len(targets(quantized, 'aten.convolution')) == 3  # pieces of the second
        found[scale] = quantized.module()(image)[0]
    error = {scale: (output - small(image)[0]).square().mean() for scale, output in found.items()}
    assert 0 < error[1] < error[4]


class Shared(nn.Module):
    """A convolution that is used twice, as those of heads are for several levels."""

    def __init__(self):
        super().__init__()
        self.first, self.shared = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1)
        self.requires_grad_(False)

    def forward(self, images):
        maps = self.shared(F.relu(self.first(images)))
        return maps, self.shared(maps)


def test_shared_weights(tmp_path):
    """XNNPACK takes no convolution of int8 maps by float weights. Weights are stored once."""
    torch.manual_seed(0)
    network, path = Shared().eval(), tmp_path / 'shared.pte'
    report = write_int8(network, path, ['one', 'two'], smooth(0), smooth(1))
    assert report['delegates'] == 1 and min(report['quantization']['snr'].values()) > 20
    weight = network.shared.weight[0].permute(1, 2, 0)  # channels last, as XNNPACK has them
    row = (weight / weight.abs().max() * 127).round().to(torch.int8)
    assert path.read_bytes().count(row.numpy().tobytes()) == 1


def test_what_int8_spoils_is_named_and_not_written(tmp_path):
    """Ranges of a dark picture cut a bright one off."""
    small, path = Small().eval(), tmp_path / 'small.pte'
    picture = smooth(0, (8, 8))
    with pytest.raises(ExportError, match=rf'maps keeps -?\d+\.\d dB.*less than {LEAST_SNR:g}'):
        write_int8(small, path, ['maps'], picture, 0.01 * picture)
    assert not list(tmp_path.iterdir())


def test_pictures_are_turned_as_their_exif_says(tmp_path):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    Image.new('RGB', (128, 64), 'red').save(tmp_path / 'upright.jpg', exif=exif)
    (picture,) = read_pictures(thin_source(), (64, 64), 1, tmp_path)
    assert picture[0, 0, :, :32].min() > 2 and not picture[..., 32:].any()  # padding
