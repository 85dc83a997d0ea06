"""Check arguments whose wrong values would silently give wrong results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

NUM_STAGES = 4
ARCH_KEYS = ('depths', 'widths', 'memory_widths', 'expansions', 'head_channels')


def resolve_arch(
    arch: str | Mapping[str, Sequence], arch_zoo: Mapping[str, Mapping[str, Sequence]]
) -> dict[str, tuple]:
    """Return the arch of a CARE as a dict of tuples; raise a ValueError if it is malformed."""
    if isinstance(arch, str):
        if arch not in arch_zoo:
            raise ValueError(f'arch must be one of {sorted(arch_zoo)} or a dict, got {arch!r}')
        arch = arch_zoo[arch]
    if set(arch) != set(ARCH_KEYS) or any(len(arch[key]) != NUM_STAGES for key in ARCH_KEYS):
        raise ValueError(f'arch must be a dict of {ARCH_KEYS}, {NUM_STAGES} values each: {arch!r}')
    depths, widths, expansions = arch['depths'], arch['widths'], arch['expansions']
    if min(depths) < 1:
        raise ValueError(f"arch['depths'] must be at least 1 each, got {depths!r}")
    if any(width <= 0 or width % 3 for width in widths):
        raise ValueError(f"arch['widths'] must be multiples of 3, got {widths!r}")
    if any(len(pair) != 2 for pair in expansions):
        raise ValueError(f"arch['expansions'] must be pairs (r1, r2), got {expansions!r}")
    return {key: tuple(arch[key]) for key in ARCH_KEYS}
