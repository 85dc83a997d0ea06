"""Describe the machine of a measurement, and write results."""

import os
import platform
from importlib.metadata import version
from pathlib import Path

import pandas as pd
import torch
from matplotlib.figure import Figure

from mmcare.files import moved_into_place
from mmcare.version import __version__

# The speed of kernels depends on these, above all in int8 (VNNI, ARM's dot products).
INSTRUCTIONS = ('avx2', 'avx512_f', 'avx512_vnni', 'avx_vnni', 'neon', 'dot', 'i8mm', 'sve')


def describe_machine(*packages: str) -> list[str]:
    """Describe the class of the machine, without its name, and the versions of packages."""
    able = torch.cpu.get_capabilities()
    sets = ' '.join(name.upper() for name in INSTRUCTIONS if able.get(name))
    return [
        f'{os.cpu_count()} cores, {platform.machine()} with {sets}, {platform.system()}',
        *([torch.cuda.get_device_name()] if torch.cuda.is_available() else []),
        f'mmcare {__version__}',
        f'python {platform.python_version()}',
        *(f'{name} {version(name)}' for name in ('torch', *packages)),
    ]


def save(path: Path, content: str | pd.DataFrame | Figure) -> None:
    """Write a text, a table as CSV without its index, or a picture, replacing an older file."""
    with moved_into_place(path) as temporary:
        if isinstance(content, str):
            temporary.write_text(content, encoding='utf-8')
        elif isinstance(content, Figure):
            content.savefig(temporary, dpi=110)
        else:
            content.to_csv(temporary, index=False)
