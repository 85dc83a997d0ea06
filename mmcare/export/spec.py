"""Specify what is written: a fused network, its input and outputs, and images to check it on."""

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import ExportedProgram

from mmcare.export import rewrites
from mmcare.export.decoding import describe_decoding, describe_scores, name_outputs
from mmcare.export.postprocessing import MAX_DETECTIONS, Decoder, Style, build_decoder
from mmcare.export.preprocessing import LETTERBOXES
from mmcare.export.source import Normalization, Source
from mmcare.models.averaged_attention import average_attention
from mmcare.models.deployment import BackboneInfo, fuse_all
from mmcare.version import __version__
from mmcare.weights.reading import digest_weights

Run = Callable[[Tensor], Sequence[Any]]  # images (1, C, H, W) to outputs


@dataclass(frozen=True)
class CheckImage:
    """An image to compare a file with PyTorch on."""

    tensor: Tensor  # (1, C, H, W)
    enforced: bool = True  # a file that differs on it is an error; otherwise this is only reported
    is_picture: bool = False  # from a data set or a folder, not drawn


@dataclass(frozen=True)
class ExportSpec:
    """What a file is made of, and what it is compared with."""

    network: nn.Module  # fused; maps images (1, C, H, W) to a tuple of outputs
    reference: nn.Module  # what the file should compute: the network before it was fused
    output_names: Sequence[str]
    input_shape: tuple[int, int, int, int]
    images: Mapping[str, CheckImage]  # to compare network and reference on
    info: BackboneInfo = field(default_factory=BackboneInfo)
    calibration: Sequence[Tensor] = ()  # images to quantize with
    precision: str | None = None  # None: the backend's first
    tolerance: float | None = None  # largest deviation from the reference; None: the backend's
    dynamic: bool = False  # height and width are free
    size_divisor: int = 1  # of free heights and widths
    input_kind: str = 'tensor'  # normalized; 'image': pixels from 0 to 255, normalized inside
    takes_bytes: bool = False  # pixels are uint8 for the file, which is no matter of the network
    normalization: Normalization | None = None  # None: unknown
    resize: Mapping[str, Any] | None = None  # how pictures are resized; None: unknown
    letterbox: str = 'top-left'  # where they are in the image; or 'center'
    options: Mapping[str, Any] = field(default_factory=dict)  # of single backends
    metadata: Mapping[str, Any] = field(default_factory=dict)  # describes the network
    # Makes results of the outputs, in a backend's style; None: files have the outputs themselves.
    decoder_of: Callable[[Style], Decoder] | None = None
    decoder: Decoder | None = None  # in the network
    references: dict[str, Sequence[Tensor]] = field(default_factory=dict)  # computed once

    @cached_property
    def program(self) -> ExportedProgram:
        """The network as a program of torch.export."""
        divisor = self.size_divisor if self.dynamic else None
        return rewrites.export_program(self.network, self.input_shape, divisor)

    @torch.no_grad()
    def reference_outputs(self, name: str) -> Sequence[Tensor]:
        """Compute the reference's outputs for one of the images, once for all files.

        They are computed in float64: float32 loses digits of small ELU + 1.
        """
        if name not in self.references:
            exact = deepcopy(self.reference).double()
            self.references[name] = exact(self.images[name].tensor.double())
        outputs = self.references[name]
        return [output.float() for output in outputs] if self.decoder else outputs

    def with_decoder(self, style: Style) -> 'ExportSpec':
        """Compute results in the file, if that was asked for."""
        if self.decoder_of is None:
            return self
        decoder = self.decoder_of(style)
        metadata = {key: value for key, value in self.metadata.items() if key != 'decode'}
        return replace(
            self,
            network=nn.Sequential(self.network, decoder),
            output_names=[output['name'] for output in decoder.outputs],
            metadata={**metadata, 'activation': None, **decoder.metadata},
            decoder=decoder,
        )

    def with_dynamic_shape(self) -> 'ExportSpec':
        """Leave height and width free, and also compare images of another size."""
        _, channels, height, width = self.input_shape
        other = height + self.size_divisor, max(width - self.size_divisor, self.info.stride)
        image = draw_images(channels, other)['random']
        network, images = deepcopy(self.network), {**self.images, 'random, another size': image}
        average_attention(network, by_rows=False)
        return replace(self, network=network, dynamic=True, images=images)

    def with_normalization(self, takes_bytes: bool = False) -> 'ExportSpec':
        """Take pixels from 0 to 255, which the network normalizes, in files perhaps as bytes."""
        assert self.normalization is not None, 'build_spec raises'
        mean, std = self.normalization.mean, self.normalization.std
        pads = self.dynamic or any(side % self.info.stride for side in self.input_shape[2:])
        first_conv = None if pads else self.info.first_conv
        network, norm = rewrites.normalize_inside(self.network, mean, std, first_conv)

        def to_pixels(image: Tensor) -> Tensor:
            pixels = image * torch.tensor(std)[:, None, None] + torch.tensor(mean)[:, None, None]
            return to_bytes(pixels).float() if takes_bytes else pixels

        return replace(
            self,
            network=network,
            reference=nn.Sequential(norm, self.reference),
            images={
                name: replace(image, tensor=to_pixels(image.tensor))
                for name, image in self.images.items()
            },
            calibration=[to_pixels(image) for image in self.calibration],
            input_kind='image',
            takes_bytes=takes_bytes,
            references={} if takes_bytes else self.references,  # rounded images are others
        )


def to_bytes(pixels: Tensor) -> Tensor:
    """Round pixels to uint8."""
    return pixels.round().clamp(0, 255).byte()


def draw_images(channels: int, shape: tuple[int, int]) -> dict[str, CheckImage]:
    """Draw normalized images: random ones, one as smooth as pictures, and extremes."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1, channels, *shape, generator=generator)
    coarse = torch.randn(1, channels, 8, 8, generator=generator)
    smooth = F.interpolate(coarse, shape, mode='bilinear') + 0.02 * noise
    return dict(
        random=CheckImage(noise),
        smooth=CheckImage(smooth),
        zeros=CheckImage(torch.zeros_like(noise), enforced=False),
        black_and_white=CheckImage(2.5 * noise.sign(), enforced=False),
        hundredfold=CheckImage(100 * noise, enforced=False),
    )


def build_spec(
    source: Source,
    shape: tuple[int, int],
    input_kinds: Collection[str],
    precision: str | None,
    tolerance: float | None,
    decoded: bool,
    options: Mapping[str, Any],
    letterbox: str = 'top-left',
) -> ExportSpec:
    """Fuse a copy of a network for images of one size, and describe it; or raise a ValueError."""
    network, largest = source.network, rewrites.LARGEST_SIDE
    stride, channels = network.info.stride, network.info.in_channels
    if not all(stride <= side <= largest for side in shape):
        raise ValueError(f'height and width must be {stride} to {largest} pixels, got {shape}')
    image = torch.zeros(1, channels, *shape)
    try:
        outputs = network(image)
    except RuntimeError as error:
        raise ValueError(f'the network cannot compute images of {shape}: {error}') from error
    _check(source, outputs, shape, input_kinds, decoded, options)
    output_names = name_outputs(network, outputs)
    if letterbox not in LETTERBOXES or (letterbox == 'center' and network.part != 'model'):
        raise ValueError('--letterbox is top-left or, with --part model, center')
    fused = deepcopy(network)
    fuse_all(fused)
    average_attention(fused)
    if 'dynamic' not in options:
        rewrites.use_matrix_pools(fused, image)
    metadata: dict[str, Any] = dict(
        name=source.name,
        part=network.part,
        arch=network.info.arch,
        checkpoint=source.checkpoint,
        sha256=digest_weights(network.model.state_dict(), {}),
        mmcare_version=__version__,
        torch_version=str(torch.__version__),  # plain, for YAML
        shape=[*shape],
        parameters=sum(parameter.numel() for parameter in fused.parameters()),
        activation=None,
    )
    if network.part == 'model':
        metadata |= describe_scores(network.model, source.config, outputs[0].shape[1])
        metadata |= describe_decoding(network.model)
    head, moves_boxes = getattr(network.model, 'bbox_head', None), letterbox == 'center'
    if head is not None and 'decode' not in metadata and (decoded or moves_boxes):
        name = type(head).__name__
        raise ValueError(
            f'the {name} has a decoding of its own, or not the plain NMS of each class: use raw '
            'outputs, at the top left'
        )
    decoder_of = None
    if decoded:
        number = options.get('max_detections', MAX_DETECTIONS)
        decoder_of = partial(build_decoder, network.model, outputs, shape, metadata, number)
    return ExportSpec(
        fused,
        network,
        output_names,
        (1, channels, *shape),
        draw_images(channels, shape),
        network.info,
        precision=precision,
        tolerance=tolerance,
        size_divisor=1 if network.part == 'backbone' else stride,
        normalization=source.normalization,
        letterbox=letterbox,
        options=options,
        metadata={**metadata, **source.metadata},
        decoder_of=decoder_of,
    )


def _check(
    source: Source,
    outputs: Sequence[Tensor],
    shape: tuple[int, int],
    input_kinds: Collection[str],
    decoded: bool,
    options: Mapping[str, Any],
) -> None:
    network, normalization, dynamic = source.network, source.normalization, 'dynamic' in options
    stride, channels = network.info.stride, network.info.in_channels
    if 'image' in input_kinds:
        if normalization is None:
            raise ValueError('the config has no mean and std of images: use --input tensor')
        if not channels == len(normalization.mean) == 3:
            raise ValueError(f'images have 3 channels, the network {channels}: use --input tensor')
    divided = network.part != 'backbone' and (dynamic or outputs[0].dim() == 4)
    if divided and any(side % stride for side in shape):
        raise ValueError(
            f'height and width must be multiples of {stride} where they are free and where maps of '
            f'different strides are added up, got {shape}'
        )
    if dynamic and network.part == 'model' and hasattr(network.model, 'decode_head'):
        raise ValueError('heads of segmentors fix sizes: no dynamic sizes with --part model')
    if decoded and (network.part != 'model' or dynamic):
        raise ValueError('--outputs decoded is for --part model, without --dynamic')
    finds_boxes = decoded and hasattr(network.model, 'bbox_head')
    if 'max_detections' in options and not (finds_boxes and options['max_detections'] > 0):
        raise ValueError('--max-detections is for --outputs decoded of detectors, and at least 1')
