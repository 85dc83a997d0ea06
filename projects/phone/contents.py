"""Collect what the page asks for: itself, the runtimes, and exported files with their outputs."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmcare.export import open_exported
from mmcare.export.images import draw_images
from mmcare.export.loading import LoadedModel
from mmcare.weights.reading import digest_weights

HERE = Path(__file__).parent
RUNTIMES = HERE / 'node_modules'  # where `make phone` puts them
# By ending: the engine's name, its layout, and what the page may load of its packages.
ENGINES = {
    '.tflite': ('litert', 'NHWC', ('@litertjs/*/dist/index.js', '@litertjs/core/wasm/*')),
    '.onnx': ('onnxruntime', 'NCHW', ('*/dist/ort.*.min.mjs', '*/dist/ort-wasm*')),
}
Contents = dict[str, Callable[[], bytes]]  # read when they are asked for


def gather(
    paths: Sequence[Path], runtimes: Path = RUNTIMES, model: LoadedModel | None = None
) -> Contents:
    """Collect all that the page needs for exported files, by the names that it asks for."""
    contents: Contents = {page.name: page.read_bytes for page in (HERE / 'page').iterdir()}
    contents[''] = contents['index.html']
    files = []
    for path in paths:
        if path.suffix not in ENGINES:
            raise ValueError(f'{path} is neither .tflite nor .onnx, which browsers can run')
        runtime, _, patterns = ENGINES[path.suffix]
        modules = [module for pattern in patterns for module in runtimes.glob(pattern)]
        if not modules:
            raise FileNotFoundError(f'{runtimes} has no {runtime}: run `make phone`')
        contents |= {file.relative_to(runtimes).as_posix(): file.read_bytes for file in modules}
        if f'files/{path.name}' in contents:
            raise ValueError(f'two files are called {path.name}: rename one')
        description, values = describe(path, model)
        files.append(description)
        contents[f'files/{path.name}'] = path.read_bytes
        contents[f'references/{path.name}'] = partial(bytes, values)
    shape, *others = {tuple(file['shape']) for file in files}
    if others:
        raise ValueError(f'images of {[shape, *others]}: export files for one --shape')
    index = dict(shape=shape, files=files, npm=json.loads((HERE / 'package.json').read_text()))
    return contents | {'files.json': json.dumps(index).encode}


@torch.no_grad()
def describe(path: Path, model: LoadedModel | None) -> tuple[dict[str, Any], bytes]:
    """Describe a file; return also the bytes of an image and of the outputs to expect for it.

    PyTorch computes the outputs for float files of the model that take tensors. For other files,
    the runtime computes them with the file itself.
    """
    program = open_exported(path)
    runtime, layout, _ = ENGINES[path.suffix]
    about = program.description
    _, channels, *sides = program.input_shape
    shape, int8 = about.get('shape', sides), about.get('precision') == 'int8'
    if not all(isinstance(side, int) for side in shape):
        raise ValueError(f'{path} takes images of any size, and does not name one')
    image = draw_images(channels, tuple(shape))['random'].pixels
    takes_pixels = program.input_kind == 'image'
    image = (120 + 50 * image).round().clamp(0, 255) if takes_pixels else image
    decoded = any('kind' in output for output in about.get('outputs', ()))
    task = None if int8 or takes_pixels or decoded or not model else model.task
    own = task and (task.part, digest_weights(task.model.state_dict(), {}))
    if task and own == (about.get('part'), about.get('sha256')):
        expected, against = [output.numpy() for output in task(image)], 'PyTorch'
    else:
        expected, against = program.run(image.numpy()), 'this computer'
    values = [image.numpy(), *expected]
    if layout == 'NHWC':
        values = [np.moveaxis(v, 1, -1) if v.ndim == 4 else v for v in values]
    named = [*about.get('inputs', [{}]), *about.get('outputs', [{}] * len(expected))]
    tensors = [dict(n, shape=v.shape, layout=layout) for n, v in zip(named, values, strict=True)]
    description = dict(
        name=path.name, key=about.get('key', path.stem), parameters=about.get('parameters'),
        runtime=runtime, int8=int8, bytes=path.stat().st_size, against=against, shape=shape,
        input=tensors[0], outputs=tensors[1:], about=about,
    )  # fmt: skip
    return description, b''.join(value.astype('<f4').tobytes() for value in values)
