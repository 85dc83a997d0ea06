"""Optional packages, named by the extra that installs them."""

from importlib import import_module
from types import ModuleType

EXTRA = 'pip install "mmcare[export]", or in a clone: pip install -e ".[export]"'


def require(name: str, purpose: str) -> ModuleType:
    """Import an optional package.

    Raises:
        ImportError: If it is missing; the message says what installs it.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.split('.')[0]:
            raise
        raise ImportError(f'{purpose} needs {name}, which is not installed: {EXTRA}') from error
