"""Errors of exports. Arguments in their texts can be written as options of a command line."""

from collections.abc import Callable, Mapping
from typing import Any


class Argument:
    """An argument of :func:`mmcare.export.export_model` in the text of an error.

    Args:
        name: The argument's name.
        *values: Values that it has, or may have.
    """

    def __init__(self, name: str, *values: object) -> None:
        self.name, self.values = name, values

    def __str__(self) -> str:
        return f'{self.name}={", ".join(map(repr, self.values))}'


class _Worded(Exception):
    """An error whose text is made of strings and arguments."""

    def __init__(self, *parts: str | Argument) -> None:
        super().__init__(''.join(map(str, parts)))
        self.parts = parts

    def write(self, write_argument: Callable[[Argument], str]) -> str:
        """Return the text, with arguments written in another way."""
        return ''.join(x if isinstance(x, str) else write_argument(x) for x in self.parts)


class RequestError(_Worded, ValueError):
    """What was asked for is unknown, or does not suit the model or the format."""


class ExportError(_Worded, RuntimeError):
    """A file cannot be converted, or does not compute what the network computes.

    ``reports`` has the reports of the formats that did not fail.
    """

    reports: Mapping[str, dict[str, Any]] = {}


class Float16Error(ExportError):
    """A file computes what the network computes in float32, but not in float16."""
