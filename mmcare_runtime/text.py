"""Text for people: names in lists, untrusted text made safe for terminals, unique names."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections import Counter
from typing import Iterable, Sequence


def escape(text: str) -> str:
    """Escape what a terminal would obey, or what nobody sees: control and formatting characters."""
    return ''.join(
        character if character.isprintable() else character.encode('unicode_escape').decode()
        for character in text
    )


def join_first(names: Iterable[str], number: int = 3) -> str:
    """Join the first names, and say how many more there are: ``'a, b, c and 2 more'``."""
    names = list(names)
    more = f' and {len(names) - number} more' if len(names) > number else ''
    return ', '.join(names[:number]) + more


def tell_apart(names: Sequence[str]) -> list[str]:
    """Append the number of the class to each name that several classes have, for Core ML.

    "crane" is twice in ImageNet's list, a bird and a machine.
    """
    numbers = Counter(names)
    return [f'{name} ({i})' if numbers[name] > 1 else name for i, name in enumerate(names)]


def print_aside(text: str) -> None:
    """Print a line to stderr, for people; a terminal that was closed is no error."""
    with contextlib.suppress(OSError):
        print(escape(' '.join(text.split())), file=sys.stderr, flush=True)


def print_error(error: BaseException) -> None:
    """Print an error in one line."""
    print_aside(f'error: {error}')


def set_up_streams() -> None:
    """Let a command print any text, and warnings in one line."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors='backslashreplace')  # type: ignore[union-attr]
    warnings.showwarning = lambda message, *_, **__: print_aside(f'warning: {message}')
