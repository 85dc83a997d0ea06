"""Which networks are compared: ``peers.csv``, with the source of each accuracy."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PEERS_FILE = Path(__file__).with_name('peers.csv')


@dataclass(frozen=True)
class Contender:
    """A network to measure.

    Attributes:
        key: Name on the command line; of CARE the arch.
        label: Name in tables and pictures.
        timm_model: Name in timm; empty for CARE.
        care_class: Arch of CARE it is compared with: the one whose accuracy is nearest.
        top1: Published accuracy on ImageNet-1K, in percent.
        note: On the accuracy: size of the images, recipe.
        source, link: Where the accuracy stands.
    """

    key: str
    label: str
    timm_model: str
    care_class: str
    top1: float
    note: str
    source: str
    link: str


@cache
def read_contenders() -> dict[str, Contender]:
    """Read all networks by their keys, CARE first, in the order of the file."""
    with open(PEERS_FILE, newline='', encoding='utf-8') as file:
        return {
            row['key']: Contender(top1=float(row.pop('top1')), **row)
            for row in csv.DictReader(file)
        }


def arch_keys() -> list[str]:
    """Keys of CARE's archs."""
    return [key for key, one in read_contenders().items() if not one.timm_model]


def peer_keys() -> list[str]:
    """Keys of the peers."""
    return [key for key, one in read_contenders().items() if one.timm_model]


def choose_contenders(archs: Sequence[str], peers: Sequence[str]) -> list[Contender]:
    """Look up networks; one that is named twice is taken once.

    Raises:
        ValueError: If there is no such arch or peer, or nothing is named.
    """
    for kind, names, allowed in (('arch', archs, arch_keys()), ('peer', peers, peer_keys())):
        unknown = [name for name in names if name not in allowed]
        if unknown:
            raise ValueError(f'{unknown[0]!r} is no {kind}: give of {", ".join(allowed)}')
    keys = dict.fromkeys([*archs, *peers])
    if not keys:
        raise ValueError('nothing to measure: name at least one arch or peer')
    return [read_contenders()[key] for key in keys]
