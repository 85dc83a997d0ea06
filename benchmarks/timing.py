"""Describes the machine that was measured on."""

import os
import platform
from importlib import import_module

import torch

from mmcare.version import __version__


def describe_machine(*packages: str) -> list[str]:
    """Describe the class of the machine, without its name, and the versions that computed."""
    processor = torch.backends.cpu.get_cpu_capability()
    return [
        f'{os.cpu_count()} cores, {platform.machine()}, {processor}, {platform.system()}',
        *([torch.cuda.get_device_name()] if torch.cuda.is_available() else []),
        f'mmcare {__version__}',
        f'python {platform.python_version()}',
        *(f'{name} {import_module(name).__version__}' for name in ('torch', *packages)),
    ]
