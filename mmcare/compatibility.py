"""What mmcare needs besides its own requirements: PyTorch and packages of the MM family.

The package does not require them, since pip would then replace a PyTorch or an MMCV that was chosen
or compiled with care.
"""

from collections.abc import Iterable
from importlib import import_module
from types import ModuleType

INSTALL = {
    'torch': 'pip install "torch>=2.6"',
    'mmengine': 'pip install "mmengine>=0.10.7,<1"',
    'mmcv': 'pip install "mmcv-lite>=2.1.0,<2.2" (backbone and export), or with the compiled ops '
    'that detectors need: MMCV_WITH_OPS=1 pip install --no-build-isolation mmcv==2.1.0',
    'mmpretrain': 'pip install "mmpretrain>=1.2.0,<2"',
}
# Name: (lowest version allowed, first version not allowed), as (major, minor, patch).
VERSIONS = {
    'torch': ((2, 6, 0), (3, 0, 0)),
    'mmengine': ((0, 10, 7), (1, 0, 0)),
    'mmcv': ((2, 1, 0), (3, 0, 0)),
    'mmpretrain': ((1, 2, 0), (2, 0, 0)),
}
REQUIRED = ('torch', 'mmengine', 'mmcv')  # mmpretrain is for mmcare.classification only


def check_versions(names: Iterable[str] = REQUIRED) -> None:
    """Check that packages are there in versions that work.

    Args:
        names: Keys of ``VERSIONS``; by default those that all of mmcare needs.

    Raises:
        ImportError: If one is missing or of another version; the message says what to install.
    """
    for name in names:
        lowest, limit = VERSIONS[name]
        wanted = f'{name} >= {_text(lowest)}, < {_text(limit)}'
        try:
            version = import_module(name).__version__
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
            raise ImportError(
                f'mmcare needs {wanted}, which is not installed: {INSTALL[name]}'
            ) from error
        numbers = tuple(
            int(part) for part in version.split('+')[0].split('.')[:3] if part.isdigit()
        )
        if not lowest <= numbers < limit:
            raise ImportError(f'mmcare needs {wanted}, found {version}: {INSTALL[name]}')


def require(name: str, purpose: str, extra: str = 'export') -> ModuleType:
    """Import an optional package.

    Args:
        name: Of the module.
        purpose: What needs it, for the message.
        extra: The extra of mmcare that installs it.

    Raises:
        ImportError: If it is missing; the message says what installs it.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.split('.')[0]:
            raise
        raise ImportError(
            f'{purpose} needs {name}, which is not installed: it comes with the extra '
            f'mmcare[{extra}]; in a clone: pip install -e ".[{extra}]"'
        ) from error


def _text(version: tuple[int, int, int]) -> str:
    return '.'.join(map(str, version))
