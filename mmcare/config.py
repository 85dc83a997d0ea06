"""Reading configs: programs, so that whatever they raise becomes one error that names the file.

And what a ``type`` in one stands for: a class, or a name of it in a registry or in Python.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard

from mmengine.config import Config
from mmengine.registry import MODELS


def read_config(path: str | os.PathLike, import_custom_modules: bool = True) -> Config:
    """Read a config, running it: configs of MMEngine are Python files.

    Args:
        path: A config in Python, JSON or YAML.
        import_custom_modules: Whether to import what its ``custom_imports`` names.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it cannot be read; the message names it and says why.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f'there is no config {path}: give the config of the model')
    try:
        config = Config.fromfile(path, import_custom_modules=import_custom_modules)
    except (Exception, SystemExit) as error:  # a program can raise anything, or leave
        raise ValueError(
            f'{path} cannot be read as a config ({type(error).__name__}: {error})'
        ) from error
    scope = config.get('default_scope')
    if scope is not None and (not isinstance(scope, str) or not scope):
        raise ValueError(f'{path}: default_scope must be the name of a toolbox, got {scope!r}')
    return config


@contextmanager
def building_from(path: str | os.PathLike) -> Iterator[None]:
    """Name the config in errors of building from it.

    Raises:
        ValueError: In place of them. Errors of files and imports stay what they are.
    """
    try:
        yield
    except (
        AssertionError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise ValueError(
            f'what {path} describes cannot be built ({type(error).__name__}: {error})'
        ) from error


def find_class(kind: Any, scope: str | None = None) -> type | None:
    """Find the class of a model or layer that a ``type`` stands for.

    Args:
        kind: The class itself, as configs with imports have it, or a name: ``'CARE'``,
            ``'mmcare.CARE'`` or ``'mmcare.models.CARE'``.
        scope: The toolbox whose names need no prefix.

    Returns:
        None if it stands for no class.
    """
    if isinstance(kind, str):
        with MODELS.switch_scope_and_registry(scope) as registry:
            try:
                kind = registry.get(kind)
            except (RuntimeError, TypeError, ValueError):  # what can be no name of anything
                return None
    return kind if isinstance(kind, type) else None


def builds(config: Any, parent: type, scope: str | None = None) -> TypeGuard[Mapping[str, Any]]:
    """Whether a config is a dict from which an object of a class, or of a subclass, is built."""
    found = find_class(config.get('type'), scope) if isinstance(config, Mapping) else None
    return found is not None and issubclass(found, parent)
