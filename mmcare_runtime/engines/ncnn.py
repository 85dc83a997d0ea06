"""ncnn: a folder with ``model.ncnn.param``, ``model.ncnn.bin`` and ``mmcare.json``."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from mmcare_runtime.engines.base import OpenedFile
from mmcare_runtime.schema import nchw, parse

NAME, PACKAGE, INSTALL, OPTIONS = 'ncnn', 'ncnn', 'ncnn', ()
MAGIC = '7767517'


def open_file(path: Path, threads: int, tried: bool = False) -> OpenedFile:
    """Open a folder, to compute it in float32.

    ncnn crashes on some files of a newer pnnx. A file that no pnnx up to ncnn's version has
    converted is first tried in a child process.
    """
    import ncnn

    if not path.is_dir():
        raise ValueError('it is not a folder')
    description = parse((path / 'mmcare.json').read_bytes(), path)
    text = (path / 'model.ncnn.param').read_text(encoding='utf-8')
    (image,), outputs = description['inputs'], description['outputs']
    input_shape = check_param(text, image['name'], [output['name'] for output in outputs])
    converter = description.get('converter') or 'unknown'
    if not (tried or _date(converter) <= _date(ncnn.__version__) < math.inf):
        try_in_child(path, f'ncnn {ncnn.__version__}', converter)
    net = ncnn.Net()
    net.opt.num_threads = threads
    for name in ('packed', 'storage', 'arithmetic'):
        setattr(net.opt, f'use_fp16_{name}', False)
    if net.load_param_mem(text) or net.load_model(str(path / 'model.ncnn.bin')):
        raise ValueError('ncnn cannot read it')
    lock = Lock()

    def run(pixels: np.ndarray) -> list[np.ndarray]:
        arrays = []
        values = np.ascontiguousarray(pixels[0], np.float32)
        mat = ncnn.Mat(values).clone()  # a Mat does not own its memory until it is cloned
        with lock:
            extractor = net.create_extractor()
            if extractor.input(image['name'], mat):
                raise ValueError(f'ncnn cannot compute {path}')
            for output in outputs:
                status, result = extractor.extract(output['name'])
                values = np.array(result)
                if status or values.size != np.prod(output['shape']):
                    raise ValueError(f'ncnn gives {output["name"]} {[*values.shape]}')
                arrays.append(values.reshape(output['shape']))
        return arrays

    return OpenedFile(run, input_shape, description, [nchw(output) for output in outputs])


def _date(version: str) -> float:
    """Return the date in a version, such as 20261020 of ncnn's 1.0.20261020, or infinity."""
    number = version.rpartition('.')[2].rpartition(' ')[2]
    return float(number) if number.isdecimal() and len(number) == 8 else math.inf


def try_in_child(path: Path, engine: str, converter: str) -> None:
    """Open and compute a folder in a child process.

    Raises:
        ValueError: If the child process crashes.
    """
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    command = [sys.executable, '-m', 'mmcare_runtime.engines.ncnn', str(path)]
    status = subprocess.run(command, env=environment, capture_output=True).returncode
    if status < 0 or status > 255:  # killed by a signal; on Windows, an exception's large number
        raise ValueError(
            f'{engine} crashes on it; its converter is {converter}. Install an ncnn of that date'
        )


def check_param(text: str, source: str, targets: list[str]) -> tuple[Any, ...]:
    """Check a network's text, since ncnn crashes on damaged text; return the input's shape.

    Each line has a layer's type and name, the numbers of its inputs and outputs, their names, and
    parameters ``key=value``.

    Raises:
        ValueError: If the text is damaged, or has no such input or output.
    """
    lines = text.split('\n')
    if lines[0].strip() != MAGIC:
        raise ValueError('its model.ncnn.param is of another format')
    layers = [line.split() for line in lines[2:] if line.strip()]
    made: set[str] = set()
    shape: list[int] = []
    try:
        count, blobs = map(int, lines[1].split())
        for type_name, _, inputs, results, *rest in layers:
            begin, end = int(inputs), int(inputs) + int(results)
            if begin < 0 or end < begin or len(rest) < end or {*rest[:begin]} - made:
                raise ValueError
            if {*rest[begin:end]} & made or any('=' in name for name in rest[:end]):
                raise ValueError
            made |= {*rest[begin:end]}
            if type_name == 'Input' and rest[:end] == [source]:
                values = dict(word.split('=') for word in rest[end:])
                shape = [int(values[key]) for key in '210']
        if count != len(layers) or blobs != len(made):
            raise ValueError
    except (ValueError, KeyError) as error:
        raise ValueError('its model.ncnn.param is damaged') from error
    missing = {*targets} - made
    if missing or not shape:
        raise ValueError(f'its network has no {", ".join(sorted(missing)) or source}')
    return 1, *shape


if __name__ == '__main__':  # see try_in_child
    opened = open_file(Path(sys.argv[1]), 1, tried=True)
    opened.run(np.zeros(opened.input_shape, np.float32))
