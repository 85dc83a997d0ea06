"""What a format is, what it writes, and a file that it has opened."""

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from mmcare.compatibility import require
from mmcare.export.load import Normalization
from mmcare.export.program import export_program
from mmcare.models.backbones.care import TOTAL_STRIDE
from mmcare.models.folding import fold


@dataclass(frozen=True)
class Exported:
    """An opened file.

    Attributes:
        run: Maps images (1, C, H, W) to the outputs, in the program's order.
        input_shape: (1, C, H, W); of a free height or width, its name.
    """

    run: Callable[[Tensor], list[np.ndarray]]
    input_shape: tuple[Any, ...]


@dataclass(frozen=True)
class Job:
    """A network to write, and what its file is compared with.

    Attributes:
        network: Folded; maps images (1, C, H, W) of one size to a tuple of outputs.
        reference: What the file should compute: the network as its users know it.
        names: Of the outputs.
        images: To compare both with, by name; see :func:`mmcare.export.verify.compare`.
        calibration: Pictures to quantize with; None: stay in float.
        dynamic: Leave height and width free.
        normalization: Inside the network, which takes pixels from 0 to 255; None: images are
            normalised.
        metadata: To be stored in the file, if the format can.
        options: Of the format, by name.
    """

    network: Any
    reference: nn.Module
    names: Sequence[str]
    images: Mapping[str, Tensor]
    calibration: Sequence[Tensor] | None = None
    dynamic: bool = False
    normalization: Normalization | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> tuple[int, int, int]:
        """Channels, height and width of the images."""
        _, channels, height, width = self.images['random'].shape
        return channels, height, width

    def of_pixels(self, normalization: Normalization) -> 'Job':
        """Return the job for images with pixels from 0 to 255, normalised by the network.

        Core ML's own image input knows one scale for all channels.
        """
        norm = nn.BatchNorm2d(len(normalization.mean), eps=0, affine=False).eval()
        norm.running_mean = torch.tensor(normalization.mean)
        norm.running_var = torch.tensor(normalization.std) ** 2
        mean, std = torch.tensor([normalization.mean, normalization.std])[..., None, None]
        network = deepcopy(self.network)
        if self.dynamic or any(side % TOTAL_STRIDE for side in self.size[1:]):
            network = nn.Sequential(norm, network)  # CARE pads with zeros of normalised pixels
        else:
            fold(network.backbone.stem.conv, norm, norm_first=True)
        return replace(
            self,
            network=network,
            reference=nn.Sequential(norm, self.reference),
            images={name: image * std + mean for name, image in self.images.items()},
            calibration=self.calibration and [image * std + mean for image in self.calibration],
            normalization=normalization,
        )

    @cached_property
    def program(self) -> ExportedProgram:
        """The network as a program of torch.export."""
        channels, *shape = self.size
        return export_program(self.network, channels, (shape[0], shape[1]), self.dynamic)


class Format:
    """A format; its class names it and writes it.

    Attributes:
        name: For ``--format`` and the report.
        ending: Of its files.
        packages: What writing needs.
        extra: Of mmcare, which installs them.
        input: What files take by default, ``'image'`` or ``'tensor'``.
        int8: Whether it can quantize.
        dynamic: Whether it can leave height and width free.
        runtime: What runs its files here; empty if nothing does.
        layout: Of images and maps, ``'NCHW'`` or ``'NHWC'``.
        options: Arguments of its own, as ``add_argument`` takes them.
    """

    name: ClassVar[str]
    ending: ClassVar[str]
    packages: ClassVar[tuple[str, ...]]
    extra: ClassVar[str] = 'export'
    input: ClassVar[str] = 'tensor'
    int8: ClassVar[bool] = False
    dynamic: ClassVar[bool] = False
    runtime: ClassVar[str] = ''
    layout: ClassVar[str] = 'NCHW'
    options: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    def check(self, options: Mapping[str, Any]) -> None:
        """Raise an ImportError if a package is missing that writing with these options needs."""
        for package in self.packages:
            require(package, f'export with --format {self.name}', self.extra)

    def write(self, job: Job, path: Path) -> dict[str, Any]:
        """Write a file, or a folder.

        Returns:
            Entries of the report. Without ``deviations``, a file that can be run is compared with
            ``job.reference`` by its outputs.
        """
        raise NotImplementedError

    def open(self, path: Path) -> Exported:
        """Open a file to run it on the CPU by one thread."""
        raise NotImplementedError


def warn_of_delegates(path: Path, number: int, outside: Collection[str]) -> None:
    """Warn if XNNPACK does not take a file as a whole.

    Args:
        path: Of the file.
        number: Of delegates.
        outside: Operators in none of them.
    """
    if number != 1 or outside:
        warnings.warn(
            f'{path.name} has {number} XNNPACK delegates instead of one, which is slower; not '
            f'taken by XNNPACK: {", ".join(outside) or "nothing"}',
            stacklevel=3,
        )
