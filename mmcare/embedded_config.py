"""Configs that lie in checkpoints as text, which MMEngine runs as programs.

A config file is a program, and who reads one runs it. A checkpoint is data, and must not become a
program because MMEngine reads ``meta.config`` of it when a run is resumed, and ``cfg`` when an
inferencer is made of a checkpoint alone.
"""

import ast
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mmengine.config.utils import MODULE2PACKAGE
from mmengine.registry import root

# Packages whose classes a config may name, besides those whose registry is imported already.
MM_PACKAGES = {'mmengine', 'mmcv', 'mmcare', *MODULE2PACKAGE}
SUBSTITUTED = '{{'  # MMEngine puts something else in its place before it reads the text


def is_harmless_config(text: Any) -> bool:
    """Whether the text of a config only says what MMEngine would say of a config of its own.

    That is: assignments of literals, lists, tuples and ``dict(...)``, which import nothing that
    is not imported anyway, and whose ``type`` is a name in a registry, not of any class or function
    that Python can import (MMEngine would call it).
    """
    if not isinstance(text, str) or SUBSTITUTED in text:
        return False
    try:
        values = dict(_assignments(ast.parse(text)))
        return all(_is_harmless(found) for found in _dicts(values)) and _imports_nothing_new(values)
    except (MemoryError, RecursionError, SyntaxError, TypeError, ValueError):
        return False


def _assignments(module: ast.Module) -> Iterator[tuple[str, Any]]:
    for statement in module.body:
        if not isinstance(statement, ast.Assign):
            raise ValueError('only assignments are plain')
        for target in statement.targets:
            # _base_ names other files, which would be run.
            if not isinstance(target, ast.Name) or target.id in ('_base_', 'dict'):
                raise ValueError('only names are plain')
            yield target.id, _value(statement.value)


def _value(node: ast.expr | None) -> Any:
    """The value of an expression of literals and ``dict(...)``.

    Raises:
        TypeError: If a key cannot be one.
        ValueError: If it is another expression.
    """
    match node:
        case ast.Constant():
            return node.value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant() as operand):
            return -_value(operand)
        case ast.List():
            return [_value(item) for item in node.elts]
        case ast.Tuple():
            return tuple(_value(item) for item in node.elts)
        case ast.Set():
            return {_value(item) for item in node.elts}
        case ast.Dict():
            return {
                _value(key): _value(value)
                for key, value in zip(node.keys, node.values, strict=True)
            }
        case ast.Call(func=ast.Name(id='dict'), args=[] | [ast.Dict()]):
            values = _value(node.args[0]) if node.args else {}
            for keyword in node.keywords:
                if keyword.arg is None:
                    raise ValueError('** is not plain')
                values[keyword.arg] = _value(keyword.value)
            return values
    raise ValueError('not a plain value')


def _dicts(value: Any) -> Iterator[dict]:
    """All dicts in a value."""
    if isinstance(value, dict):
        yield value
        value = [*value, *value.values()]
    if isinstance(value, list | tuple | set):
        for item in value:
            yield from _dicts(item)


def _is_harmless(values: dict) -> bool:
    names = values.get('type'), values.get('_scope_'), values.get('default_scope')
    return (
        (not isinstance(names[0], str) or _is_registered_name(names[0]))
        and (names[1] is None or _is_scope(names[1]))
        and (names[2] is None or _is_scope(names[2]))
    )


def _is_registered_name(name: str) -> bool:
    """Whether a ``type`` can only be a class of the MM family, or a layer or optimizer.

    What no registry has, MMEngine imports and calls: ``os.system`` as well as
    ``mmdet.structures.os.system``. Configs in Python's own style name classes by their modules.
    """
    scope, _, rest = name.removeprefix('torchvision/').rpartition('.')  # mmpretrain's prefix
    if not rest.isidentifier():
        return False
    if not scope:
        return not _is_module(rest)
    return rest[0].isupper() and (_is_scope(scope) or _is_module_within(scope))


def _is_module_within(name: str) -> bool:
    """Whether a module lies in a package that configs may name; nothing is imported."""
    if re.fullmatch(r'torch\.(nn|optim)(\.\w+)*', name):
        package = 'torch'
    else:
        package = name.split('.')[0]
        if package not in MM_PACKAGES:
            return False
    spec = find_spec(package)
    parts = name.split('.')[1:]
    return any(
        Path(folder, *parts).is_dir() or Path(folder, *parts).with_suffix('.py').is_file()
        for folder in (spec and spec.submodule_search_locations) or ()
    )


def _is_scope(name: Any) -> bool:
    """Whether MMEngine imports a package of this name only if it is one of the MM family."""
    return isinstance(name, str) and (name in MM_PACKAGES or name in _known_scopes())


def _known_scopes() -> set[str]:
    """Scopes whose registries have been imported."""
    registries = [value for value in vars(root).values() if hasattr(value, '_children')]
    return {scope for registry in registries for scope in registry._children}


def _is_module(name: str) -> bool:
    return name in sys.modules or find_spec(name) is not None


def _imports_nothing_new(values: dict[str, Any]) -> bool:
    imports = values.get('custom_imports')
    if imports is None:
        return True
    names = imports.get('imports') if isinstance(imports, dict) else None
    names = [names] if isinstance(names, str) else names
    return isinstance(names, list) and all(
        isinstance(name, str) and (name in sys.modules or name.split('.')[0] == 'mmcare')
        for name in names
    )
