"""Check arguments whose wrong values would silently give wrong results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

NUM_STAGES = 4
ARCH_KEYS = ('depths', 'widths', 'memory_widths', 'expansions', 'head_channels')


def check(name: str, value: Any, allowed: str, good: bool) -> None:
    """Raise a ValueError that names the allowed values, unless ``good``."""
    if not good:
        raise ValueError(f'{name} must be {allowed}, got {value!r}')


def resolve_arch(
    arch: str | Mapping[str, Sequence], arch_zoo: Mapping[str, Mapping[str, Sequence]]
) -> dict[str, tuple]:
    """Return the arch of a CARE as a dict of tuples; raise a ValueError if it is malformed."""
    if isinstance(arch, str):
        check('arch', arch, f'one of {sorted(arch_zoo)} or a dict', arch in arch_zoo)
        arch = arch_zoo[arch]
    fits = set(arch) == set(ARCH_KEYS) and all(len(arch[key]) == NUM_STAGES for key in ARCH_KEYS)
    check('arch', arch, f'a dict of {ARCH_KEYS}, {NUM_STAGES} values each', fits)
    check("arch['depths']", arch['depths'], 'at least 1 each', min(arch['depths']) > 0)
    thirds = all(width > 0 and width % 3 == 0 for width in arch['widths'])
    check("arch['widths']", arch['widths'], 'multiples of 3', thirds)
    pairs = all(len(pair) == 2 for pair in arch['expansions'])
    check("arch['expansions']", arch['expansions'], 'pairs (r1, r2)', pairs)
    return {key: tuple(arch[key]) for key in ARCH_KEYS}
