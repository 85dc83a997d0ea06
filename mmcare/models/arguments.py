"""Checks of arguments that all networks share; configs bring text where numbers should be."""

from typing import Any


def check_switches(**switches: Any) -> None:
    """Refuse what is not True or False: text would be taken for True, also the text 'False'.

    Raises:
        TypeError: By name.
    """
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise TypeError(f'{name} must be True or False, got {value!r}')


def check_numbers(**numbers: Any) -> None:
    """Refuse what is no integer or float.

    Raises:
        TypeError: By name.
    """
    for name, value in numbers.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise TypeError(f'{name} must be a number, got {value!r}')
