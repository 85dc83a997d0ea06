"""What a format is, what it writes, and a file that it has opened."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from mmcare.compatibility import require
from mmcare.export.load import Normalization
from mmcare.export.program import export_program
from mmcare.models.backbones.care import TOTAL_STRIDE
from mmcare.models.folding import fold

Run = Callable[[Tensor], Sequence[Any]]  # images (1, C, H, W) to outputs


@dataclass(frozen=True)
class Exported:
    """An opened file.

    Attributes:
        run: Maps images (1, C, H, W) to the outputs, in the program's order.
        input_shape: (1, C, H, W); of a free height or width, its name.
        description: What the file says of itself; empty if it says nothing.
        timed: Its time says something: the format's own runtime computes it.
    """

    run: Callable[[Tensor], list[np.ndarray]]
    input_shape: tuple[Any, ...]
    description: Mapping[str, Any] = field(default_factory=dict)
    timed: bool = True

    @property
    def pixels(self) -> bool:
        """Whether images have pixels from 0 to 255; otherwise they are normalised."""
        return self.description.get('inputs', [{}])[0].get('kind') == 'image'


class Written(NamedTuple):
    """What writing a file has shown: facts for its report, and a twin to check it with.

    The twin, called ``name`` in messages, computes the same as the file.
    """

    facts: dict[str, Any]
    twin: Run | None = None
    name: str = ''


@dataclass(frozen=True)
class Job:
    """A network to write, and what its file is compared with.

    Attributes:
        network: Folded; maps images (1, C, H, W) to a tuple of outputs.
        reference: What the file should compute: the network as its users know it.
        names: Of the outputs.
        images: To compare both with, by name.
        calibration: Pictures to quantize with.
        precision: One of the format's ``precisions``; None: its first.
        step: Leave height and width free, in multiples of this; 0: one size.
        normalization: Of the images, if it is known.
        resize: How pictures get the images' size, if that is known.
        pixels: The network takes pixels from 0 to 255 and normalises them.
        options: Of formats, by name.
        about: The description of the network; formats add what is known of their file.
    """

    network: Any
    reference: nn.Module
    names: Sequence[str]
    images: Mapping[str, Tensor]
    calibration: Sequence[Tensor] = ()
    precision: str | None = None
    step: int = 0
    normalization: Normalization | None = None
    resize: Mapping[str, Any] | None = None
    pixels: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> tuple[int, int, int]:
        """Channels, height and width of the images."""
        _, channels, height, width = self.images['random'].shape
        return channels, height, width

    @cached_property
    def program(self) -> ExportedProgram:
        """The network as a program of torch.export."""
        channels, height, width = self.size
        return export_program(self.network, channels, (height, width), self.step)

    @cached_property
    def expected(self) -> dict[str, Sequence[Tensor]]:
        """The reference's outputs by image, in float64: float32 loses digits of small ELU + 1."""
        exact = deepcopy(self.reference).double()
        with torch.no_grad():
            return {name: exact(image.double()) for name, image in self.images.items()}

    @cached_property
    def of_pixels(self) -> 'Job':
        """The job for images with pixels from 0 to 255, which the network normalises."""
        assert self.normalization is not None
        mean, std = torch.tensor([self.normalization.mean, self.normalization.std])
        norm = nn.BatchNorm2d(len(mean), eps=0).eval().requires_grad_(False)
        norm.running_mean, norm.running_var = mean, std**2
        network = deepcopy(self.network)
        if self.step or any(side % TOTAL_STRIDE for side in self.size[1:]):
            network = nn.Sequential(norm, network)  # CARE pads with zeros of normalised pixels
        else:
            fold(network.backbone.stem.conv, norm, norm_first=True)
        mean, std = mean[:, None, None], std[:, None, None]
        return replace(
            self,
            network=network,
            reference=nn.Sequential(norm, self.reference),
            images={name: image * std + mean for name, image in self.images.items()},
            calibration=[image * std + mean for image in self.calibration],
            pixels=True,
        )


class Format:
    """A format; its class names it, writes it and opens it."""

    name: str  # for --format
    ending: str  # of its files
    packages: tuple[str, ...]  # that writing needs
    extra = 'export'  # of mmcare, which installs them
    input = 'tensor'  # what files take by default; or 'image'
    # The default first, each with the largest deviation from PyTorch, as a share of an output's
    # largest magnitude. None: decibels are compared.
    precisions: ClassVar[Mapping[str, float | None]] = {'float32': 1e-4}
    runtime: str  # what computes its files here
    layout = 'NCHW'  # of images and maps
    says_type = False  # files say in which type they are computed; others leave it to the phone
    options: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # of its own, for add_argument

    def require(self) -> None:
        """Raise an ImportError if a package is missing that writing needs."""
        for package in self.packages:
            require(package, f'export with --format {self.name}', self.extra)

    def write(self, job: Job, path: Path, description: Mapping[str, Any]) -> Written:
        """Write a file, or a folder, that holds a description as JSON, called ``mmcare``."""
        raise NotImplementedError

    def open(self, path: Path) -> Exported:
        """Open a file to run it on the CPU by one thread."""
        raise NotImplementedError

    def open_float16(self, path: Path) -> Exported | None:
        """Open a file to compute it in float16, as phones may; None where nothing here can."""
        return None

    def names(self, job: Job) -> list[str]:
        """Name the image and the outputs of a file."""
        return ['image', *job.names]

    def settings(self, job: Job) -> dict[str, str]:
        """Name the precision of a file, and how its weights are compressed, if they are."""
        settings = dict(precision=job.precision or next(iter(self.precisions)))
        if 'compress' in self.options and job.options.get('compress'):
            settings['compress'] = job.options['compress']
        return settings

    def describe(self, job: Job) -> dict[str, Any]:
        """Describe a file for those who run it without PyTorch; keys are in docs/deploy.md."""
        order = [0, 2, 3, 1] if self.layout == 'NHWC' else [0, 1, 2, 3]
        image = job.images['random']
        described: list[dict[str, Any]] = []
        for name, one in zip(self.names(job), [image, *job.network(image)], strict=True):
            shape, layout = [*one.shape], None
            if one.dim() == 4:
                shape = [None if job.step and axis > 1 else one.shape[axis] for axis in order]
                layout = self.layout
            described.append(dict(name=name, shape=shape, layout=layout))
        norm: Any = job.normalization
        outside = norm and not job.pixels
        described[0] |= dict(
            kind='image' if job.pixels else 'tensor',
            mean=[*norm.mean] if outside else None,
            std=[*norm.std] if outside else None,
            padding=[*norm.mean] if job.pixels else [0.0] * job.size[0],
            channels=norm and norm.channels,
            resize=job.resize,
        )
        ends = dict(inputs=described[:1], outputs=described[1:])
        return {**job.about, 'format': self.name, **self.settings(job), **ends}
