"""ncnn, through pnnx."""

import json
import re
import subprocess
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

import torch

from mmcare.export.backends.base import Backend, Inputs, WriteResult
from mmcare.export.errors import ExportError
from mmcare.export.graph import Graph
from mmcare.export.tasks import OutputFormat
from mmcare.export.tasks.base import Description, Options

# Parameters of Reshape: the axes of its input and output that are the batch.
BATCH = {'12', '13'}
# How pnnx writes the shape of a globally pooled map after a convolution: by its batch, which is 1.
POOLED = re.compile(r'12=0 13=0 6="1,1,//\((\d+),0n\),0n"')


class Ncnn(Backend):
    """A folder with ``model.ncnn.param``, ``model.ncnn.bin`` and ``mmcare.json``."""

    name = 'ncnn'
    suffix = '.ncnn'
    packages = ('pnnx', 'ncnn')
    extra = 'ncnn'
    precisions: ClassVar = {**Backend.precisions, 'float16': 5e-3}
    runtime = 'ncnn'
    separate_convolutions = True
    output_format = OutputFormat(nms='outside', label_map=torch.float32)
    lacks = 'topk', 'gather'
    # Versions that computed files of each kind; `make test-ncnn` computes some in the first.
    described: ClassVar = dict(
        tried_with=[
            f'ncnn 1.0.{date}' for date in (20250503, 20250916, 20260114, 20260526, 20261020)
        ]
    )

    def write(
        self, graph: Graph, path: Path, description: Description, options: Options, images: Inputs
    ) -> WriteResult:
        """Write the files; raise an ExportError if ncnn lacks operators."""
        import ncnn
        import pnnx

        _, channels, height, width = graph.example.shape
        path.mkdir()
        traced = torch.jit.trace(graph.network, graph.example)
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
        # After two lines of header, each line is a layer, its type first. The first is the input.
        lines = POOLED.sub(r'0=1 1=1 2=\1', param.read_text()).splitlines()
        lines[2] += f' 0={width} 1={height} 2={channels}'
        names = {f'out{index}': name for index, name in enumerate(graph.output_names)}
        names['in0'] = 'image'
        words = [[names.get(word, word) for word in line.split()] for line in lines]
        param.write_text(''.join(' '.join(line) + '\n' for line in words))
        layers = [line.split()[0] for line in lines[2:]]
        lacking = sorted({layer for layer in layers if ncnn.create_layer(layer) is None})
        if lacking:
            raise ExportError(f'ncnn has no {", ".join(lacking)}; {path.name} is not written')
        if folded := [line[1] for line in words if line[0] == 'Reshape' and BATCH & keys(line)]:
            raise ExportError(
                f'pnnx takes an axis of {", ".join(folded)} for the batch, on which older versions '
                f'of ncnn crash; {path.name} is not written'
            )
        about = dict(description, converter=f'pnnx {version("pnnx")}')
        path.joinpath('mmcare.json').write_text(json.dumps(about))
        return WriteResult(dict(converter=about['converter']))


def keys(line: Sequence[str]) -> set[str]:
    """Return the keys of a layer's parameters."""
    return {word.partition('=')[0] for word in line if '=' in word}
