"""Export of a network to several formats, with a report on each file."""

import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch

from mmcare.export.backends import validate_formats
from mmcare.export.calibration import Images, add_images
from mmcare.export.preprocessing import choose_shape
from mmcare.export.source import Source
from mmcare.export.spec import build_spec
from mmcare.files import check_writable, moved_into_place

LOGGER = logging.getLogger('mmcare')
INPUT_KINDS = ('image', 'tensor')
OUTPUTS = ('raw', 'decoded')
PRECISIONS = ('float32', 'float16', 'int8')
CALIBRATION = 64  # pictures


@torch.no_grad()
def export_model(
    source: Source,
    out_dir: str | os.PathLike,
    shape: tuple[int, int] | None = None,
    formats: Sequence[str] = ('coreml', 'onnx'),
    input_kind: str | None = None,
    outputs: str = 'raw',
    letterbox: str = 'top-left',
    precision: str | None = None,
    calibration: int | None = None,
    images: Images = None,
    tolerance: float | None = None,
    **options: Any,
) -> dict[str, dict[str, Any]]:
    """Fuse a network, and write a file and a report ``FILE.json`` for each format; all or none.

    Return the reports by format.

    Args:
        source: See :func:`mmcare.export.load_source`; it is left as it is.
        out_dir: Where the files go, replacing older ones.
        shape: Height and width of the images; None: those that the config's test pipeline makes,
            rounded up to multiples of 32, and 512 and 512 without a config.
        formats: Keys of :data:`mmcare.export.backends.BACKENDS`.
        input_kind: ``'image'``: files take pixels from 0 to 255 and normalize them; ``'tensor'``:
            files take normalized images. None: an image for Core ML, a tensor for others.
        outputs: ``'raw'``: the network's; ``'decoded'``: probabilities, class labels, or boxes,
            scores and labels, of whole models.
        letterbox: Where a picture is in the image of a whole model: ``'top-left'``, or
            ``'center'``, with padding on all sides.
        precision: ``'float32'``, ``'float16'`` or ``'int8'``. None: float16 for Core ML, float32
            for others.
        calibration: Largest number of pictures to quantize with; None: 64.
        images: Pictures to quantize with and to check files on, in a folder or as normalized
            images (1, C, H, W); None: the config's data.
        tolerance: Largest deviation from PyTorch, as a share of an output's largest magnitude;
            None: that of the format, and 2e-2 for computation in float16, which is not compared
            with a tolerance. Not for int8.
        **options: Of single formats: ``dynamic`` (ONNX), ``target`` and ``compress`` (Core ML).

    Raises:
        ValueError: If the network cannot be exported so.
        ExportError: If a file computes something else than PyTorch.
        ImportError: If a package is missing that a format needs.
    """
    for value, known in (input_kind or INPUT_KINDS[0], INPUT_KINDS), (outputs, OUTPUTS):
        if value not in known:
            raise ValueError(f'{value!r} is none of {", ".join(known)}')
    options = {name: x for name, x in options.items() if x is not None and x is not False}
    shape = shape or choose_shape(source.config)
    backends = validate_formats(formats, precision, calibration, options)
    check_writable(Path(out_dir))
    input_kinds = {backend.name: input_kind or backend.input_kind for backend in backends}
    kinds, decoded = input_kinds.values(), outputs == 'decoded'
    spec = build_spec(source, shape, kinds, precision, tolerance, decoded, options, letterbox)
    number = (calibration or CALIBRATION) if precision == 'int8' else 0
    spec, without_pictures = add_images(spec, source, number, images)
    reports: dict[str, dict[str, Any]] = {}
    with TemporaryDirectory() as folder:
        for index, backend in enumerate(backends, 1):
            start, own = perf_counter(), spec
            LOGGER.info('%d/%d %s: started', index, len(backends), backend.name)
            if 'dynamic' in options and 'dynamic' in backend.options:
                own = own.with_dynamic_shape()
            if input_kinds[backend.name] == 'image':
                own = own.with_normalization(backend.takes_bytes)
            report = backend.export(own, Path(folder))
            report |= _say_what_is_missing(report, source, without_pictures)
            text = json.dumps(report, indent=2, allow_nan=False)
            Path(folder, f'{report["file"]}.json').write_text(f'{text}\n')
            reports[backend.name] = report
            checked = report.get('quantization') or dict(deviation=report['deviations']['random'])
            size, seconds = report['bytes'] / 1e6, perf_counter() - start
            LOGGER.info('%s: %.1f MB, checked: %s, %.0f s', report['file'], size, checked, seconds)
        for path in sorted(Path(folder).iterdir()):  # a report after its file
            with moved_into_place(Path(out_dir, path.name)) as temporary:
                shutil.move(path, temporary)
    return reports


def _say_what_is_missing(
    report: Mapping[str, Any], source: Source, without_pictures: str
) -> dict[str, str]:
    missing = {}
    if without_pictures and source.config is not None:
        missing['pictures'] = f'none compared: {without_pictures}'
    if source.config is not None and report['inputs'][0]['resize'] is None:
        missing['resize'] = 'none in the test pipeline: larger pictures cannot be tested'
    if source.network.part == 'model' and 'classes' not in report:
        missing['names'] = 'left out: the test data do not name as many classes as the head has'
    return missing
