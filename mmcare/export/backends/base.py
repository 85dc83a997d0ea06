"""What a backend is, and a file that it has opened."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.export import ExportedProgram

from mmcare.compatibility import require
from mmcare.export.postprocessing import Style
from mmcare.export.prediction import predict
from mmcare.export.rewrites import aten
from mmcare.export.spec import ExportSpec, Run
from mmcare.export.verify import FLOAT16, check_sqnr, verify
from mmcare.files import size_of

AUTHORS = {  # an option of formats that have a place for both
    'author': dict(help='who is named as the author in Core ML and LiteRT files'),
    'license': dict(help='terms of use that these files name'),
}
QUANTIZED_RESULTS = 1e-2  # of a quantized file, from those of its own outputs


@dataclass(frozen=True)
class Exported:
    """An opened file."""

    run: Callable[[Tensor], list[np.ndarray]]  # images (1, C, H, W) to outputs, in their order
    input_shape: tuple[Any, ...]  # (1, C, H, W); of a free height or width, its name
    description: Mapping[str, Any] = field(default_factory=dict)  # empty if the file has none
    timed: bool = True  # the backend's own runtime computes it, so that its time means something

    @property
    def input_kind(self) -> str:
        """``'image'``, pixels from 0 to 255, or ``'tensor'``, normalized images."""
        return self.description.get('inputs', [{}])[0].get('kind', 'tensor')

    @property
    def letterbox(self) -> str:
        """Where pictures are in the image: ``'top-left'`` or ``'center'``."""
        return self.description.get('inputs', [{}])[0].get('letterbox', 'top-left')

    def predict(self, picture: str | PathLike | np.ndarray) -> dict[str, Any]:
        """Return what the file of a whole model finds in a picture, a path or pixels (H, W, 3).

        See :func:`mmcare.export.prediction.predict`.
        """
        return predict(self.run, self.description, picture)


class WriteResult(NamedTuple):
    """What writing a file has shown."""

    facts: dict[str, Any]  # for the report
    cross_check: Run | None = None  # computes the same as the file
    cross_check_name: str = ''  # for messages


class Backend:
    """A format with its runtime; a subclass names it, writes it and opens it."""

    name: str  # for --format
    ending: str  # of its files
    packages: tuple[str, ...]  # that writing needs
    extra = 'export'  # of mmcare, which installs them
    systems = ''  # that have the packages, if not all do
    input_kind = 'tensor'  # what files take by default; or 'image'
    takes_bytes = False  # pixels are uint8
    # The default first, each with the largest deviation from PyTorch, as a share of an output's
    # largest magnitude. None: the signal-to-noise ratio is compared.
    precisions: ClassVar[Mapping[str, float | None]] = {'float32': 1e-4}
    runtime: str  # what computes its files here
    layout = 'NCHW'  # of images and maps
    says_type = False  # files say in which type they are computed; others leave it to the phone
    style = Style()  # of results
    options: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # its own, for add_argument

    def require(self) -> None:
        """Raise an ImportError if a package is missing that writing needs."""
        for package in self.packages:
            require(package, f'export with --format {self.name}{self.systems}', self.extra)

    def write(self, spec: ExportSpec, path: Path, description: Mapping[str, Any]) -> WriteResult:
        """Write a file, or a folder, that holds a description as JSON, called ``mmcare``."""
        raise NotImplementedError

    def open(self, path: Path) -> Exported:
        """Open a file to run it on the CPU by one thread."""
        raise NotImplementedError

    def open_float16(self, path: Path) -> Exported | None:
        """Open a file to compute it in float16, as phones may; None where nothing here can."""
        return None

    def export(self, spec: ExportSpec, folder: Path) -> dict[str, Any]:
        """Write a file into a folder and return its report, or raise an ExportError."""
        raw, spec = spec, spec.with_decoder(self.choose_style(spec))
        description = self.describe(spec)
        path = folder / self.file_name(spec)
        result = self.write(spec, path, description)
        checked = self.check(spec, raw, path, description, result)
        return dict(file=path.name, bytes=size_of(path), **description, **checked, **result.facts)

    def check(
        self,
        spec: ExportSpec,
        raw: ExportSpec,
        path: Path,
        description: Mapping[str, Any],
        result: WriteResult,
    ) -> dict[str, Any]:
        """Compare a file with PyTorch, also in float16 where phones choose the type.

        Return ``deviations`` and ``deviations_float16`` by image; in int8 and with compressed
        weights ``quantization``.
        """
        _, other, other_name = result
        run, tolerance = self.open(path).run, self.precisions[description['precision']]
        says_type = self.says_type or 'delegate' in description
        half = None if says_type or spec.tolerance else self.open_float16(path)
        checked: dict[str, Any] = {}
        if not says_type and not half:
            reason = 'a tolerance is given' if spec.tolerance else 'nothing here computes it so'
            checked['deviations_float16'] = f'not compared: {reason}'
        if tolerance is None or 'compress' in description:
            if spec.decoder:  # results have no signal-to-noise ratio
                return checked | self._check_results(spec, raw, run, path.name)
            checked['quantization'] = check_sqnr(run, spec, path.name, other, other_name)
            if half:
                in_float16 = check_sqnr(half.run, spec, path.name, run, 'float32')
                checked['quantization']['snr_float16'] = in_float16['snr']
            return checked
        tolerance = spec.tolerance or tolerance
        if other:
            verify(other, spec, other_name, path.name, tolerance)
        checked['deviations'] = verify(run, spec, self.runtime, path.name, tolerance)
        if half:
            name = f'{self.runtime} in float16'
            checked['deviations_float16'] = verify(half.run, spec, name, path.name, FLOAT16)
        return checked

    def _check_results(
        self, spec: ExportSpec, raw: ExportSpec, run: Run, file: str
    ) -> dict[str, Any]:
        """Check a quantized file without its decoder, and compare the results with its outputs."""
        with TemporaryDirectory() as folder:
            report = self.export(replace(raw, decoder_of=None), Path(folder))
            outputs = self.open(Path(folder, report['file'])).run
            references: dict[str, Sequence[Tensor]] = {
                name: [torch.from_numpy(x) for x in outputs(image.tensor)]
                for name, image in spec.images.items()
            }
        own = replace(spec, references=references)
        deviations = verify(run, own, self.runtime, file, QUANTIZED_RESULTS)
        return dict(quantization=report['quantization'], deviations=deviations)

    def choose_style(self, spec: ExportSpec) -> Style:
        """Choose how results are given."""
        return self.style

    def settings(self, spec: ExportSpec) -> dict[str, str]:
        """Name the precision of a file, and how its weights are compressed, if they are."""
        settings = dict(precision=spec.precision or next(iter(self.precisions)))
        if 'compress' in self.options and spec.options.get('compress'):
            settings['compress'] = spec.options['compress']
        return settings

    def file_name(self, spec: ExportSpec) -> str:
        """Name a file by what is in it, its size, and settings that are not the default."""
        name, part, (height, width) = (spec.metadata[key] for key in ('name', 'part', 'shape'))
        words = [name] if part == 'backbone' else [name, part]
        words.append('dynamic' if spec.dynamic else f'{height}x{width}')
        words += ['decoded'] if spec.decoder else []
        words += ['center'] if spec.letterbox == 'center' else []
        default = next(iter(self.precisions))
        words += [value for value in self.settings(spec).values() if value != default]
        return '_'.join(words) + self.ending

    def describe(self, spec: ExportSpec) -> dict[str, Any]:
        """Describe a file for those who run it without PyTorch; keys are in docs/deploy.md."""
        order = [0, 2, 3, 1] if self.layout == 'NHWC' else [0, 1, 2, 3]
        outputs = spec.reference_outputs('random')
        outputs = spec.decoder(outputs) if spec.decoder else outputs
        tensors: list[dict[str, Any]] = []
        names = ['image', *spec.output_names]
        for name, x in zip(names, [spec.images['random'].tensor, *outputs], strict=True):
            shape, layout = [*x.shape], None
            if x.dim() == 4:
                shape = [None if spec.dynamic and axis > 1 else x.shape[axis] for axis in order]
                layout = self.layout
            tensors.append(dict(name=name, shape=shape, layout=layout))
        taken: dict[str, Any] = dict(kind=spec.input_kind, channels=None, mean=None, std=None)
        taken['padding'] = [0.0] * spec.input_shape[1]
        if spec.normalization:
            taken = spec.normalization.describe(spec.input_kind)
        if spec.takes_bytes:
            taken['padding'] = [round(value) for value in taken['padding']]
        dtype = 'uint8' if spec.takes_bytes else 'float32'
        tensors[0] |= dict(taken, letterbox=spec.letterbox, dtype=dtype, resize=spec.resize)
        if spec.decoder:
            for tensor, output in zip(tensors[1:], spec.decoder.outputs, strict=True):
                tensor |= output
        ends = dict(inputs=tensors[:1], outputs=tensors[1:])
        return {**spec.metadata, 'format': self.name, **self.settings(spec), **ends}


def count_convolutions(program: ExportedProgram, stages: str) -> list[list[Any]]:
    """Count the convolutions of each stage, and of the rest of the model, in the program's order.

    The regular expression ``stages`` finds the stage in the name of a module.
    """
    found = []
    for node in program.graph.nodes:
        if node.target in (aten.conv2d.default, aten.convolution.default):
            module_name = str([*node.meta['nn_module_stack'].values()][-1][0])
            stage = re.search(stages, module_name)
            found.append(stage[0] if stage else 'rest')
    return [[stage, len([*group])] for stage, group in groupby(found)]
