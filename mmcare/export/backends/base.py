"""The base class of backends: a format, how its files are written, and what runs them here."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor
from torch.export import ExportedProgram

from mmcare.compatibility import require
from mmcare.export.graph import Graph
from mmcare.export.rewrites import aten
from mmcare.export.tasks import OutputFormat
from mmcare.export.tasks.base import Description, Options
from mmcare_runtime import Model, open_exported

Inputs = Sequence[Tensor]
AUTHORS = {  # options of formats that store both
    'author': dict(help='author named in Core ML and LiteRT files'),
    'license': dict(help='license named in Core ML and LiteRT files'),
}


@dataclass(frozen=True)
class WriteResult:
    """What is known about a file after it was written."""

    facts: Mapping[str, Any]  # for the report
    cross_check: Callable[[Tensor], Sequence[Any]] | None = None  # computes the same as the file
    cross_check_name: str = ''  # for messages
    engines: Mapping[str, Callable[[Tensor], Sequence[Any]]] = field(default_factory=dict)  # others


class Backend:
    """A format. A subclass names it, validates its options, and writes its files."""

    name: str  # for --format
    format = ''  # of the description, if it is not the name
    suffix: str  # of its files
    packages: tuple[str, ...]  # needed for writing
    extra = 'export'  # the extra of mmcare that installs these packages
    systems = ''  # systems that have these packages; empty: all systems
    input_kind = 'tensor'  # what files take by default; or 'image'
    uint8_input = False  # pixels are uint8
    # Precisions, the default first, each with its tolerance: the largest error as a share of an
    # output's largest magnitude. None: the signal-to-quantization-noise ratio is compared.
    precisions: ClassVar[Mapping[str, float | None]] = {'float32': 1e-4}
    runtime: str  # what computes its files here
    unnamed_precision = ''  # names of files do not say it; empty: the default precision
    layout = 'NCHW'  # of images and maps
    takes_batches = False  # several images at once
    separate_convolutions = False  # modules cannot share a convolution
    output_format = OutputFormat()  # of results
    fixes_precision = False  # files fix the dtype of computation; otherwise the runtime chooses it
    lacks: tuple[str, ...] = ()  # operators that a task may need
    described: ClassVar[Mapping[str, Any]] = {}  # what the descriptions of all its files say
    options: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # of this backend, for add_argument

    def require(self) -> None:
        """Raise an ImportError if a package that writing needs is missing."""
        for package in self.packages:
            require(package, f'export with --format {self.name}{self.systems}', self.extra)

    @property
    def default_precision(self) -> str:
        """The precision of files unless another is asked for."""
        return next(iter(self.precisions))

    def choose_output_format(self, options: Options) -> OutputFormat:
        """Return how files of this backend give results."""
        return self.output_format

    def settings(self, options: Options) -> dict[str, str]:
        """Return other settings that tell files apart, for the file's name and its description."""
        return {}

    def is_quantized(self, precision: str, options: Options) -> bool:
        """Return whether a file is compared by its signal-to-quantization-noise ratio."""
        return self.precisions[precision] is None

    def write(
        self, graph: Graph, path: Path, description: Description, options: Options, images: Inputs
    ) -> WriteResult:
        """Write a file or a folder, and store the description in it as JSON, named ``mmcare``.

        Args:
            graph: What the file computes.
            path: The file or folder to write.
            description: What the file says of itself, including its precision.
            options: Options of the export; other backends' options are ignored.
            images: Inputs to quantize with.
        """
        raise NotImplementedError

    def reads(self, path: Path) -> bool:
        """Return whether a file is of this backend."""
        return path.suffix == self.suffix

    def open(self, path: Path, **options: Any) -> Model:
        """Open a file as :func:`mmcare_runtime.open_exported` does."""
        return open_exported(path, **options)

    def open_network(self, path: Path, description: Description) -> Model:
        """Open the network in a file; in most formats, nothing follows it."""
        return self.open(path)

    def check_rest(self, path: Path, description: Description) -> None:
        """Check what follows the network in a file; raise an ExportError if it is wrong."""

    def open_float16(self, path: Path) -> Model | None:
        """Open a file in float16, as phones may; return None if no runtime here can."""
        return None


def count_convolutions(program: ExportedProgram, stages: str) -> list[list[Any]]:
    """Count the convolutions of each stage, and of the rest of the model, in the program's order.

    The regular expression ``stages`` finds the stage in the name of a module.
    """
    names = []
    for node in program.graph.nodes:
        if node.target in (aten.conv2d.default, aten.convolution.default):
            module_name = str([*node.meta['nn_module_stack'].values()][-1][0])
            stage = re.search(stages, module_name)
            names.append(stage[0] if stage else 'rest')
    return [[name, len([*group])] for name, group in groupby(names)]
