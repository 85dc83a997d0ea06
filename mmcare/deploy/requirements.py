"""Optional packages, named by the extra that installs them."""

from importlib import import_module
from types import ModuleType

# From a clone, since mmcare is not on the package index yet.
INSTALL = 'it comes with the extra mmcare[{0}]; in a clone: pip install -e ".[{0}]"'


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
            f'{purpose} needs {name}, which is not installed: {INSTALL.format(extra)}'
        ) from error
