"""Everything that depends on versions of Python, PyTorch and the MM family.

The package's metadata does not require PyTorch or the MM family: pip would replace a PyTorch or an
MMCV that was chosen or compiled on purpose.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from importlib import import_module
from types import ModuleType
from typing import Any, ContextManager

from packaging.specifiers import SpecifierSet

# By module: the versions that work, and a command that installs one of them.
PACKAGES = {
    'torch': ('>=2.0,<3', 'pip install "torch>=2.0"'),
    'mmengine': ('>=0.8,<1', 'pip install "mmengine>=0.8,<1"'),
    'mmcv': (
        '>=2.0,<3',
        'pip install "mmcv-lite>=2.0,<2.2"; detectors then need python -m mmcare.mmcv_ext, or MMCV '
        'with its compiled operators: mim install mmcv==2.1.0',
    ),
    'mmpretrain': ('>=1.2,<2', 'pip install "mmpretrain>=1.2.0,<2"'),
}


def check_versions(*names: str) -> None:
    """Raise an ImportError if one of ``PACKAGES`` is missing or has an unsupported version."""
    for name in names:
        versions, command = PACKAGES[name]
        module = _import(name, f'mmcare needs {name}{versions}: {command}')
        version = getattr(module, '__version__', None)
        if version is None:  # Python imports any folder, such as one that uninstalling has left
            left = ', '.join(getattr(module, '__path__', [str(module)]))
            raise ImportError(f'{name} is not installed, only {left} is left: delete it. {command}')
        if not _suits(version, versions):
            raise ImportError(f'mmcare needs {name}{versions}, found {version}: {command}')


def require(name: str, purpose: str, extra: str = 'export') -> ModuleType:
    """Import an optional package, or raise an ImportError that names the extra to install."""
    clone = f'in a clone: pip install -e ".[{extra}]"'
    return _import(name, f'{purpose} needs {name}: install the extra mmcare[{extra}]; {clone}')


def _import(name: str, advice: str) -> ModuleType:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in (name, name.split('.')[0]):
            raise
        raise ImportError(f'{name} is not installed. {advice}') from error


def _suits(version: str, specifier: str) -> bool:
    return SpecifierSet(specifier).contains(version, prereleases=True)


# Check versions before importing these packages, so that an error says what to install.
check_versions('torch', 'mmengine', 'mmcv')

import mmengine  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402


def check_export() -> None:
    """Raise an ImportError if Python or PyTorch is too old for exports."""
    python, pytorch = sys.version.split()[0], torch.__version__
    if sys.version_info < (3, 11) or not _suits(pytorch, '>=2.6'):
        needed = 'exports need Python>=3.11 and torch>=2.6'
        raise ImportError(f'{needed}, found Python {python} and torch {pytorch}')


def autocast_off(x: Tensor) -> ContextManager[Any]:
    """Suspend autocast on the device of ``x``, if it is on.

    Do nothing if autocast is off: some devices have no autocast, and traced graphs stay simple.
    Before PyTorch 2.4, each device has its own function that says whether autocast is on. Devices
    of plugins have it in their own modules.
    """
    device = x.device.type
    if hasattr(torch.amp, 'is_autocast_available'):  # from PyTorch 2.4 on
        # PyTorch 2.11 cannot compile this question; 2.13 can.
        available = is_compiling() or torch.amp.is_autocast_available(device)
        on = available and torch.is_autocast_enabled(device)
    elif device == 'cpu':
        on = torch.is_autocast_cpu_enabled()
    elif device == 'cuda':
        on = torch.is_autocast_enabled()
    else:
        module = getattr(torch, device, None)  # such as torch.npu, of a plugin
        names = 'is_autocast_enabled', f'is_autocast_{device}_enabled'
        on = any(getattr(module, name, bool)() for name in names)
    return torch.autocast(device, enabled=False) if on else nullcontext()


def fuses_adam(device: str) -> bool:
    """Whether to fuse Adam and AdamW on a type of device: GPUs from PyTorch 2.1, CPUs from 2.4 on.

    In 2.0, fused steps with ``GradScaler`` reached a higher loss (pytorch#96755), and resumed runs
    could fail (pytorch#104767).
    """
    since = dict(cuda='>=2.1', cpu='>=2.4').get(device)
    return since is not None and _suits(torch.__version__, since)


def skips_batches() -> bool:
    """Whether resumed iteration-based loops skip earlier batches: from MMEngine 0.10.3 on."""
    return _suits(mmengine.__version__, '>=0.10.3')


def is_compiling() -> bool:
    """Whether ``torch.compile`` or ``torch.export`` is tracing; known from PyTorch 2.3 on."""
    compiler = getattr(torch, 'compiler', None)
    return hasattr(compiler, 'is_compiling') and torch.compiler.is_compiling()
