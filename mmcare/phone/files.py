"""Exported files as the page gets them: described, with an image and the outputs for it."""

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmcare.export.load import Source
from mmcare.export.runtime import open_exported
from mmcare.export.verify import trial_images

HERE = Path(__file__).parent
RUNTIMES = HERE / 'node_modules'  # where `make phone` puts them
# By ending: the engine's name, its layout, its package, and what the page may load of it.
ENGINES = {
    '.tflite': ('litert', 'NHWC', '@litertjs', ('*/dist/index.js', 'core/wasm/*')),
    '.onnx': ('onnxruntime', 'NCHW', 'onnxruntime-web', ('dist/ort.*.min.mjs', 'dist/ort-wasm*')),
}
SHOWN = ('part', 'decode', 'classes', 'palette')  # of a report, to the page
Contents = dict[str, Path | bytes]


def gather(
    paths: Sequence[Path], runtimes: Path = RUNTIMES, source: Source | None = None
) -> Contents:
    """Collect all that the page needs for exported files, by the names that it asks for."""
    contents: Contents = {page.name: page for page in (HERE / 'page').iterdir()}
    contents[''], files = contents['index.html'], []
    for path in paths:
        if path.suffix not in ENGINES:
            raise ValueError(f'{path} is neither .tflite nor .onnx, which browsers can run')
        if f'files/{path.name}' in contents:
            raise ValueError(f'two files are called {path.name}: rename one')
        *_, package, patterns = ENGINES[path.suffix]
        found = [file for pattern in patterns for file in (runtimes / package).glob(pattern)]
        if not found:
            raise FileNotFoundError(
                f'{runtimes} has no {package}: run `make phone` in a clone, or `npm ci` in a copy '
                f'of {HERE / "package-lock.json"}, and name its node_modules with --runtime'
            )
        contents |= {f'runtime/{file.relative_to(runtimes).as_posix()}': file for file in found}
        file, values = describe(path, source)
        files.append(file)
        contents |= {file['url']: path, file['reference']: values}
    shape, *others = {tuple(file['shape']) for file in files}
    if others:
        raise ValueError(f'images of {[shape, *others]}: export files for one --shape')
    versions = json.loads((HERE / 'package.json').read_text())['dependencies']
    index = dict(shape=shape, versions=versions, static=False, files=files)
    return contents | {'files.json': json.dumps(index).encode()}


def find_report(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Find the report next to a file that names it, and its entry in there; both may be empty."""
    for file in sorted(path.parent.glob('*.json')):
        with suppress(AttributeError, ValueError):  # it is of something else
            report = json.loads(file.read_text(encoding='utf-8'))
            for entry in report.values():
                if isinstance(entry, dict) and entry.get('file') == path.name:
                    return report, entry
    return {}, {}


def describe(path: Path, source: Source | None) -> tuple[dict[str, Any], bytes]:
    """Describe a file for the page, and give an image with the outputs that it should have.

    These are PyTorch's, if the report has the name of the source and the file takes normalised
    images and is not quantized, or else those of the file as it runs here.
    """
    report, entry = find_report(path)
    program, (runtime, layout, *_) = open_exported(path), ENGINES[path.suffix]
    _, channels, *sides = program.input_shape
    shape = report.get('shape', sides)
    if not all(isinstance(side, int) for side in shape):
        raise ValueError(f'{path} takes images of any size, and no report next to it names one')
    image, against = trial_images(channels, tuple(shape))['random'], 'this computer'
    if program.pixels:
        image = 120 + 50 * image
    names = report.get('name'), report.get('part'), 'quantization' in entry or program.pixels
    if source and names == (source.name, source.network.part, False):
        with torch.no_grad():
            expected, against = [one.numpy() for one in source.network(image)], 'PyTorch'
    else:
        expected = program.run(image)
    values = [image.numpy(), *expected]
    if layout == 'NHWC':
        values = [np.moveaxis(one, 1, -1) if one.ndim == 4 else one for one in values]
    named = [*entry.get('inputs', [{}]), *entry.get('outputs', [{}] * len(expected))]
    pairs = zip(named, values, strict=True)
    tensors = [dict(tensor, shape=one.shape, layout=layout) for tensor, one in pairs]
    why = '' if report else 'No report (.json) next to it names it, so it is measured only.'
    description = dict(
        name=path.name, key=report.get('key', path.stem), parameters=report.get('parameters'),
        runtime=runtime, int8='quantization' in entry, bytes=path.stat().st_size, why=why,
        url=f'files/{path.name}', reference=f'references/{path.name}', shape=shape,
        input=tensors[0], outputs=tensors[1:], against=against,
        report={key: report.get(key) for key in SHOWN},
    )  # fmt: skip
    return description, b''.join(one.astype('<f4').tobytes() for one in values)
