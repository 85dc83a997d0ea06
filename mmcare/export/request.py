"""Validate what was asked for, before anything is loaded."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mmcare.export.backends import BACKENDS
from mmcare.export.backends.base import Backend
from mmcare.export.errors import Argument, RequestError
from mmcare.export.images import Pictures
from mmcare.export.pipelines import LETTERBOXES
from mmcare.export.tasks import OPTIONS as TASK_OPTIONS
from mmcare_runtime.schema import LARGEST_BATCH

INPUT_KINDS = ('image', 'tensor')
OUTPUTS = ('raw', 'decoded', 'probabilities')
PRECISIONS = ('float32', 'float16', 'int8')
CALIBRATION = 64  # pictures
LARGEST_SIDE = 4096  # of images, in pixels


@dataclass(frozen=True)
class ExportRequest:
    """What :func:`mmcare.export.export_model` is asked for.

    Args:
        shape: Height and width of the images; None: those that the config's test pipeline makes,
            rounded up to multiples of the stride where maps are added up, or those of the windows
            that it tests segmentors on; 512 and 512 without a config.
        formats: Keys of :data:`mmcare.export.backends.BACKENDS`.
        input_kind: ``'image'``: files take pixels from 0 to 255 and normalize them; ``'tensor'``:
            files take normalized images. None: an image for Core ML, a tensor for others.
        outputs: ``'raw'``: the network's; ``'decoded'``: probabilities, class labels, or boxes,
            scores and labels, of whole models; probabilities of all classes, in place of labels,
            if windows of pictures are tested. ``'probabilities'``: those of all classes, of any
            classifier or segmentor.
        letterbox: Where a picture is in the image of a whole model: ``'top-left'``, or
            ``'center'``, with padding on all sides.
        precision: ``'float32'``, ``'float16'`` or ``'int8'``. None: float16 for Core ML, float32
            for others.
        calibration: Largest number of pictures to quantize with; None: 64.
        images: Pictures to quantize with and to check files on, in a folder or as pixels
            (1, C, H, W); None: the config's data.
        tolerance: Largest error, as a share of an output's largest magnitude; None: that of the
            format, and 2e-2 for computation in float16. Not for int8.
        compare_float16: Whether to compare files in float16 too, as phones may compute them.
        batch: Number of images that a file takes at once.
        options: Of single formats and tasks, such as ``target`` of Core ML.

    Raises:
        ValueError: If a value is unknown, or does not suit the others.
        TypeError: If an option is unknown.
        ImportError: If a package that a format needs is missing.
    """

    shape: tuple[int, int] | None = None
    formats: Sequence[str] = ('coreml', 'onnx')
    input_kind: str | None = None
    outputs: str = 'raw'
    letterbox: str = 'top-left'
    precision: str | None = None
    calibration: int | None = None
    images: Pictures = None
    tolerance: float | None = None
    compare_float16: bool = True
    batch: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value, known in (
            ('input_kind', self.input_kind or 'image', INPUT_KINDS),
            ('outputs', self.outputs, OUTPUTS),
            ('letterbox', self.letterbox, LETTERBOXES),
            ('precision', self.precision or 'float32', PRECISIONS),
            *(('formats', name, tuple(BACKENDS)) for name in self.formats),
        ):
            if value not in known:
                raise RequestError(Argument(name, value), f' is none of {", ".join(known)}')
        if self.shape and not all(1 <= side <= LARGEST_SIDE for side in self.shape):
            raise RequestError(f'height and width must be 1 to {LARGEST_SIDE}, got {self.shape}')
        if not 1 <= self.batch <= LARGEST_BATCH:
            raise RequestError(Argument('batch'), f' is 1 to {LARGEST_BATCH}, got {self.batch}')
        able = [backend for backend in BACKENDS.values() if backend.takes_batches]
        if self.batch > 1 and not {*self.backends} <= {*able}:
            raise RequestError(Argument('batch', self.batch), ' is only for ', name_formats(able))
        self._check_options()
        able = [b for b in BACKENDS.values() if self.precision in (None, *b.precisions)]
        if not {*self.backends} <= {*able}:
            precision = Argument('precision', self.precision)
            raise RequestError(precision, ' is only for ', name_formats(able))
        if self.calibration is not None and (self.precision != 'int8' or self.calibration < 1):
            precision = Argument('precision', 'int8')
            raise RequestError(Argument('calibration'), ' is for ', precision, ', and at least 1')
        for backend in self.backends:
            backend.require()

    def _check_options(self) -> None:
        for name, value in self.options.items():
            able = [backend for backend in BACKENDS.values() if name in backend.options]
            decoded = Argument('outputs', 'decoded')
            if name in TASK_OPTIONS:
                if self.outputs != 'decoded' or value < 1:
                    text = ' of detectors, and at least 1'
                    raise RequestError(Argument(name), ' is for ', decoded, text)
            elif not able:
                raise TypeError(f'export_model() got an unexpected keyword argument {name!r}')
            elif name == 'nms' and self.outputs != 'decoded':
                raise RequestError(Argument(name), ' is for ', decoded, ' of detectors')
            elif name == 'int8_for' and self.precision != 'int8':
                raise RequestError(Argument(name), ' is for ', Argument('precision', 'int8'))
            elif not {backend.name for backend in able} & {*self.formats}:
                raise RequestError(Argument(name, value), ' is for ', name_formats(able))
            elif (name, value) == ('delegate', 'coreml') and 'executorch-coreml' in self.formats:
                both = Argument('formats', 'executorch', 'executorch-coreml')
                raise RequestError(both, ' are the same file with ', Argument(name, value))
            for backend in able:
                choices = backend.options[name].get('choices', [value])
                if value not in choices:
                    known = ', '.join(map(str, choices))
                    raise RequestError(Argument(name, value), f' is none of {known}')

    @cached_property
    def backends(self) -> list[Backend]:
        """The backends of the formats, in the order of reports."""
        names = {*self.formats}
        if self.options.get('delegate') == 'coreml':  # the name of 1.0
            names = names - {'executorch'} | {'executorch-coreml'}
        return [backend for name, backend in BACKENDS.items() if name in names]

    def input_kind_of(self, backend: Backend) -> str:
        """Return ``'image'`` or ``'tensor'``."""
        return self.input_kind or backend.input_kind

    @property
    def number_of_calibration_images(self) -> int:
        """The largest number of pictures to quantize with."""
        return (self.calibration or CALIBRATION) if self.precision == 'int8' else 0


def name_formats(backends: Iterable[Backend]) -> Argument:
    """Name the formats of backends, for an error."""
    return Argument('formats', *(backend.name for backend in backends))
