"""What mmcare needs besides its own requirements: PyTorch and packages of the MM family.

The package does not require them, since pip would then replace a PyTorch or an MMCV that was chosen
or compiled with care.
"""

from importlib import import_module
from types import ModuleType

from packaging.specifiers import SpecifierSet

# Name of the module: versions that work, what installs one of them.
PACKAGES = {
    'torch': ('>=2.6,<3', 'pip install "torch>=2.6"'),
    'mmengine': ('>=0.10.7,<1', 'pip install "mmengine>=0.10.7,<1"'),
    'mmcv': (
        '>=2.1,<3',
        'pip install "mmcv-lite>=2.1.0,<2.2" (backbone and export), or with the compiled ops that '
        'detectors need: MMCV_WITH_OPS=1 pip install --no-build-isolation mmcv==2.1.0',
    ),
    'mmpretrain': ('>=1.2,<2', 'pip install "mmpretrain>=1.2.0,<2"'),
}


def check_versions(*names: str) -> None:
    """Import packages, and check that their versions work with mmcare.

    Args:
        *names: Keys of ``PACKAGES``.

    Raises:
        ImportError: If one is missing or of another version; the message says what to install.
    """
    for name in names:
        versions, command = PACKAGES[name]
        found = _import(name, f'mmcare needs {name}{versions}: {command}').__version__
        if not SpecifierSet(versions).contains(found, prereleases=True):
            raise ImportError(f'mmcare needs {name}{versions}, found {found}: {command}')


def require(name: str, purpose: str, extra: str = 'export') -> ModuleType:
    """Import an optional package.

    Args:
        name: Of the module.
        purpose: What needs it, for the message.
        extra: The extra of mmcare that installs it.

    Raises:
        ImportError: If it is missing; the message says what installs it.
    """
    clone = f'in a clone: pip install -e ".[{extra}]"'
    return _import(name, f'{purpose} needs {name}, of the extra mmcare[{extra}]; {clone}')


def _import(name: str, advice: str) -> ModuleType:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.split('.')[0]:
            raise
        raise ImportError(f'{name} is not installed. {advice}') from error
