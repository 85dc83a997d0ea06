"""Text of files, of which nothing is known, for terminals."""

from __future__ import annotations


def escape(text: str) -> str:
    """Escape what a terminal would obey, or what nobody sees: control and formatting characters."""
    return ''.join(
        character if character.isprintable() else character.encode('unicode_escape').decode()
        for character in text
    )
