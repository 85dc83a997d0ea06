"""ncnn, through pnnx."""

import json
import subprocess
from collections.abc import Mapping
from contextlib import chdir
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from mmcare.compatibility import require
from mmcare.export.backends.base import Backend, Exported, WriteResult
from mmcare.export.postprocessing import Style
from mmcare.export.rewrites import separate_convolutions
from mmcare.export.spec import ExportSpec
from mmcare.export.verify import ExportError


class Ncnn(Backend):
    """A folder with ``model.ncnn.param``, ``model.ncnn.bin`` and ``mmcare.json``."""

    name = 'ncnn'
    ending = '.ncnn'
    packages = ('pnnx', 'ncnn')
    extra = 'ncnn'
    precisions: ClassVar = {**Backend.precisions, 'float16': 5e-3}
    runtime = 'ncnn'
    style = Style(nms='outside', label_map=torch.float32)

    def write(self, spec: ExportSpec, path: Path, description: Mapping[str, Any]) -> WriteResult:
        """Write the files; raise an ExportError if ncnn lacks operators."""
        import ncnn
        import pnnx

        _, channels, height, width = spec.input_shape
        path.mkdir()
        network = separate_convolutions(spec.network)
        traced = torch.jit.trace(network, spec.images['random'].tensor)
        (path / 'model.pt').write_bytes(traced.save_to_buffer())  # save: ASCII only on Windows
        # Not pnnx.export: it imports the Python file that pnnx writes, which can be invalid.
        size = f'inputshape=[1,{channels},{height},{width}]'
        half = f'fp16={int(description["precision"] == "float16")}'
        command = [pnnx.EXEC_PATH, 'model.pt', size, half]
        done = subprocess.run(command, cwd=path, capture_output=True, text=True)
        param, weights = (path / f'model.ncnn.{end}' for end in ('param', 'bin'))
        if done.returncode or not param.exists():
            raise ExportError(f'pnnx failed; {path.name} is not written: {done.stderr[-300:]}')
        for file in {*path.iterdir()} - {param, weights}:
            file.unlink()
        # Two lines of header, then a layer in each line, its type first; the first is the input.
        lines = param.read_text().splitlines()
        lines[2] += f' 0={width} 1={height} 2={channels}'
        names = {f'out{index}': name for index, name in enumerate(spec.output_names)}
        names['in0'] = 'image'
        words = [[names.get(word, word) for word in line.split()] for line in lines]
        param.write_text(''.join(' '.join(line) + '\n' for line in words))
        layers = [line.split()[0] for line in lines[2:]]
        lacking = sorted({layer for layer in layers if ncnn.create_layer(layer) is None})
        if lacking:
            raise ExportError(f'ncnn has no {", ".join(lacking)}; {path.name} is not written')
        path.joinpath('mmcare.json').write_text(json.dumps(description))
        return WriteResult({})

    def open(self, path: Path) -> Exported:
        """Open a folder that has its description, ``mmcare.json``."""
        ncnn = require('ncnn', 'running ncnn files', 'ncnn')
        net = ncnn.Net()
        net.opt.num_threads = 1
        for name in ('packed', 'storage', 'arithmetic'):  # results are compared with float32
            setattr(net.opt, f'use_fp16_{name}', False)
        with chdir(path):  # on Windows ncnn reads only what ASCII can name
            if net.load_param('model.ncnn.param') or net.load_model('model.ncnn.bin'):
                raise ValueError('ncnn cannot read it')
        description = json.loads((path / 'mmcare.json').read_text())

        def run(images: Tensor) -> list[np.ndarray]:
            extractor = net.create_extractor()
            image = images[0].contiguous().numpy()  # a Mat does not keep what it points to
            extractor.input('image', ncnn.Mat(image).clone())
            return [
                np.array(extractor.extract(output['name'])[1]).reshape(output['shape'])
                for output in description['outputs']
            ]

        return Exported(run, tuple(description['inputs'][0]['shape']), description)
