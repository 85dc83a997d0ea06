"""Export to ncnn through pnnx, compared with PyTorch in ncnn."""

import subprocess
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmcare.export.verify import ExportError, verify
from mmcare.files import moved_into_place


def write_ncnn(
    network: nn.Module, path: Path, reference: nn.Module, images: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Write ``model.ncnn.param`` and ``model.ncnn.bin``, once ncnn has agreed with PyTorch.

    Args:
        network: Folded; of images (1, C, H, W) of one size.
        path: Folder for the files, ``.ncnn``, replaced if it exists. The input is ``in0``, the
            outputs are ``out0``, ``out1``, ...
        reference: What the files should compute.
        images: To compare both with; see :func:`mmcare.export.verify.verify`.

    Returns:
        Entries of the report: operators by type, and deviations.

    Raises:
        ExportError: If ncnn lacks operators, which are named, or its outputs differ from
            PyTorch's; nothing is written then.
    """
    import ncnn
    import pnnx

    with moved_into_place(path) as temporary:
        temporary.mkdir()
        _, channels, height, width = images['random'].shape
        torch.jit.trace(network, images['random']).save(temporary / 'model.pt')
        # Not pnnx.export: it imports the Python file that pnnx writes, which can be invalid.
        size = f'inputshape=[1,{channels},{height},{width}]'
        command = [pnnx.EXEC_PATH, 'model.pt', size, 'fp16=0']
        done = subprocess.run(command, cwd=temporary, capture_output=True, text=True)
        param, weights = (temporary / f'model.ncnn.{end}' for end in ('param', 'bin'))
        if done.returncode or not param.exists():
            raise ExportError(f'pnnx failed; {path.name} is not written: {done.stderr[-300:]}')
        for file in {*temporary.iterdir()} - {param, weights}:
            file.unlink()
        # Two lines of header, then a layer in each line, its type first; the first is the input.
        lines = param.read_text().splitlines()
        lines[2] += f' 0={width} 1={height} 2={channels}'
        param.write_text('\n'.join(lines) + '\n')
        layers = [line.split()[0] for line in lines[2:]]
        lacking = sorted({kind for kind in layers if ncnn.create_layer(kind) is None})
        if lacking:
            raise ExportError(f'ncnn has no {", ".join(lacking)}; {path.name} is not written')
        deviations = verify(temporary, reference, images, 'ncnn')
    return dict(operators=dict(Counter(layers).most_common()), deviations=deviations)
