"""Make untrusted text of files safe for terminals, and names of classes unique."""

from __future__ import annotations

from collections import Counter
from typing import Sequence


def escape(text: str) -> str:
    """Escape what a terminal would obey, or what nobody sees: control and formatting characters."""
    return ''.join(
        character if character.isprintable() else character.encode('unicode_escape').decode()
        for character in text
    )


def tell_apart(names: Sequence[str]) -> list[str]:
    """Append the number of the class to each name that several classes have, for Core ML.

    "crane" is twice in ImageNet's list, a bird and a machine.
    """
    numbers = Counter(names)
    return [f'{name} ({i})' if numbers[name] > 1 else name for i, name in enumerate(names)]
