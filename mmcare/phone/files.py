"""Exported files as the page gets them: described, with an image and the outputs for it."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmcare.export.source import Source
from mmcare.export.runtime import open_exported
from mmcare.export.verify import trial_images
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
    paths: Sequence[Path], runtimes: Path = RUNTIMES, source: Source | None = None
) -> Contents:
    """Collect all that the page needs for exported files, by the names that it asks for."""
    contents: Contents = {page.name: page.read_bytes for page in (HERE / 'page').iterdir()}
    contents[''], files = contents['index.html'], []
    for path in paths:
        if path.suffix not in ENGINES:
            raise ValueError(f'{path} is neither .tflite nor .onnx, which browsers can run')
        runtime, _, patterns = ENGINES[path.suffix]
        if not (found := [one for each in patterns for one in runtimes.glob(each)]):
            raise FileNotFoundError(
                f'{runtimes} has no {runtime}: run `make phone`, or name another with --runtime'
            )
        contents |= {one.relative_to(runtimes).as_posix(): one.read_bytes for one in found}
        if f'files/{(name := path.name)}' in contents:
            raise ValueError(f'two files are called {name}: rename one')
        description, values = describe(path, source)
        files.append(description)
        contents |= {f'files/{name}': path.read_bytes, f'references/{name}': partial(bytes, values)}
    shape, *others = {tuple(file['shape']) for file in files}
    if others:
        raise ValueError(f'images of {[shape, *others]}: export files for one --shape')
    index = dict(shape=shape, files=files, npm=json.loads((HERE / 'package.json').read_text()))
    return contents | {'files.json': json.dumps(index).encode}


@torch.no_grad()
def describe(path: Path, source: Source | None) -> tuple[dict[str, Any], bytes]:
    """Describe a file for the page, and give an image with the outputs that it should have.

    These are PyTorch's, if the file has the source's weights and takes tensors in float, or else
    those of the file as it runs here.
    """
    program, (runtime, layout, *_) = open_exported(path), ENGINES[path.suffix]
    about, (_, channels, *sides) = program.description, program.input_shape
    shape, int8 = about.get('shape', sides), about.get('precision') == 'int8'
    if not all(isinstance(side, int) for side in shape):
        raise ValueError(f'{path} takes images of any size, and does not name one')
    image = trial_images(channels, tuple(shape))['random']
    image = 120 + 50 * image if program.pixels else image
    network = source and source.network
    own = network and (digest_weights(network.model.state_dict(), {}), network.part)
    if network and own == (about.get('sha256'), about.get('part')) and not (int8 or program.pixels):
        expected, against = [one.numpy() for one in network(image)], 'PyTorch'
    else:
        expected, against = program.run(image), 'this computer'
    values = [image.numpy(), *expected]
    values = [np.moveaxis(v, 1, -1) if layout == 'NHWC' and v.ndim == 4 else v for v in values]
    named = [*about.get('inputs', [{}]), *about.get('outputs', [{}] * len(expected))]
    tensors = [dict(n, shape=v.shape, layout=layout) for n, v in zip(named, values, strict=True)]
    description = dict(
        name=path.name, key=about.get('key', path.stem), parameters=about.get('parameters'),
        runtime=runtime, int8=int8, bytes=path.stat().st_size, against=against, shape=shape,
        input=tensors[0], outputs=tensors[1:], about=about,
    )  # fmt: skip
    return description, b''.join(one.astype('<f4').tobytes() for one in values)
