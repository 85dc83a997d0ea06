"""Damaged and hostile files, fed to what a user would feed them to; what comes out is judged.

A *kind* of files (checkpoints, configs, annotations) has families of damage, each of which makes a
file from a seed, and entries, each of which reads it as a tool or a training run would. A case is
one file and one entry; its outcome is good (``GOOD``) or a failure (``BAD``).
"""

import random
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuzz.isolation import Report, call_isolated

GOOD = ('refused', 'warned', 'right')
BAD = ('executed', 'silent', 'unclear', 'crashed', 'hung')
# What people can be told; KeyError and its like come from the depths.
CLEAR_ERRORS = (
    'CheckpointError',
    'FileNotFoundError',
    'RuntimeError',
    'SystemExit',
    'TypeError',
    'ValueError',
)
# Warnings about files that are as they should be.
ALWAYS = ('holds a backbone and ImageNet classification heads',)
SECONDS = 60.0


@dataclass(frozen=True)
class Made:
    """A file that was made, and what is known of it.

    Attributes:
        file: Its path, in the folder of the case.
        what: What was done to it, in a few words.
        reference: If it is accepted, it must give what this file gives; None: accepting it is
            wrong, or the kind's own ``judge`` knows.
        words: One of them must stand in a refusal; by default the name of the file.
        entries: Entries that it is meant for; None for all of its kind.
    """

    file: Path
    what: str
    reference: Path | None = None
    words: tuple[str, ...] = ()
    entries: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Kind:
    """A kind of files.

    Attributes:
        name: For the table.
        families: By name: makes a file in a folder from a generator.
        entries: By name: reads a file and returns what came of it.
        judge: Whether what came of a file is right; None if it is, else what is not. It runs in
            the child, right behind the entry.
    """

    name: str
    families: Mapping[str, Callable[[Path, random.Random], Made]]
    entries: Mapping[str, Callable[[Path], Any]]
    judge: Callable[[Made, Callable[[Path], Any], Any], str | None]


@dataclass(frozen=True)
class Result:
    """The outcome of a case."""

    kind: str
    family: str
    entry: str
    number: int
    what: str
    outcome: str
    report: Report

    def __str__(self) -> str:
        report = self.report
        told = f'{report.error}: {report.message}' if report.error else str(report.value)
        return (
            f'{self.outcome}: {self.kind}, {self.family} {self.number}, {self.entry}: {self.what}; '
            f'{report.ended} {told[:300]} {report.executed or ""}'
        )


def run_kind(
    kind: Kind, folder: Path, seed: int, cases: int, keep: bool = False
) -> Iterator[Result]:
    """Run a number of cases, shared out evenly among the families; entries take turns.

    Args:
        kind: The kind of files.
        folder: For the files; each case has a folder of its own.
        seed: Equal seeds give equal files.
        cases: Their number.
        keep: Keep the files of failures.
    """
    names = list(kind.families)
    for index in range(cases):
        family, number = names[index % len(names)], index // len(names)
        rng = random.Random(f'{seed} {kind.name} {family} {number}')
        place = folder / f'{family.replace(" ", "_")}_{number}'
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        made = kind.families[family](place, rng)
        entry = rng.choice(made.entries or list(kind.entries))
        result = run_case(kind, family, number, entry, made)
        yield result
        if not keep or result.outcome in GOOD:
            shutil.rmtree(place)


def run_case(
    kind: Kind, family: str, number: int, entry: str, made: Made, seconds: float = SECONDS
) -> Result:
    """Feed a file to an entry, in isolation, and judge."""
    read = kind.entries[entry]

    def call() -> str | None:
        return kind.judge(made, read, read(made.file))

    report = call_isolated(call, made.file.parent, seconds)
    outcome = judge_report(report, made)
    return Result(kind.name, family, entry, number, made.what, outcome, report)


def judge_report(report: Report, made: Made) -> str:
    """Tell what a report means: one of ``GOOD`` or ``BAD``."""
    if report.executed:
        return 'executed'
    if report.ended in ('crashed', 'hung'):
        return report.ended
    words = made.words or (made.file.name,)
    if report.ended == 'raised':
        # A tool says what is wrong on standard error and ends with a status.
        told = report.output if report.error == 'SystemExit' else report.message
        clear = (
            report.error in CLEAR_ERRORS
            and 'Traceback' not in told
            and any(word in f'{told} {report.message}' for word in words)
        )
        return 'refused' if clear else 'unclear'
    if any(
        'WARNING' in line and made.file.name in line and not any(said in line for said in ALWAYS)
        for line in report.output.splitlines()
    ):
        return 'warned'
    return 'right' if report.value is None else 'silent'


def count(results: list[Result]) -> str:
    """Write a table of counts, a line for each kind and family."""
    columns = (*GOOD, *BAD)
    lines = [f'{"":36}' + ''.join(f'{name:>9}' for name in ('cases', *columns))]
    by_family: dict[str, Counter] = {}
    for result in results:
        counter = by_family.setdefault(f'{result.kind}: {result.family}', Counter())
        counter.update([result.outcome])
    total: Counter = Counter()
    for counter in by_family.values():
        total += counter
    for name, counter in (*by_family.items(), ('all', total)):
        numbers = (counter.total(), *(counter[column] for column in columns))
        lines.append(f'{name:36}' + ''.join(f'{number:9}' for number in numbers))
    return '\n'.join(lines)


# ---------------------------------------------------------------- damage to any file


def truncate(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Cut somewhere, or a little off the end."""
    end = rng.choice([rng.randrange(len(content)), len(content) - rng.randint(1, 64)])
    return content[: max(end, 0)], f'the first {max(end, 0)} of {len(content)} bytes'


def flip_bits(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Flip one to eight bits."""
    changed = bytearray(content)
    places = [rng.randrange(len(content)) for _ in range(rng.choice([1, 1, 2, 8]))]
    for place in places:
        changed[place] ^= 1 << rng.randrange(8)
    return bytes(changed), f'bits flipped at {places}'


def damage_block(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Overwrite, drop, double or insert a block, as failing disks and transfers do."""
    start = rng.randrange(len(content))
    size = rng.choice([1, 16, 512, 4096])
    block = content[start : start + size]
    how = rng.choice(['zeros', 'noise', 'dropped', 'doubled', 'inserted'])
    put = {
        'zeros': bytes(len(block)),
        'noise': rng.randbytes(len(block)),
        'dropped': b'',
        'doubled': block * 2,
        'inserted': rng.randbytes(size) + block,
    }[how]
    return content[:start] + put + content[start + size :], f'{size} bytes at {start}: {how}'


def replace_content(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Something else under the name of the file."""
    name, other = rng.choice(
        [
            ('nothing', b''),
            ('one byte', b'\x80'),
            ('a web page', b'<html><body>404: not found</body></html>' * 30),
            ('zeros', bytes(5000)),
            ('noise', rng.randbytes(5000)),
            ('JSON', b'{"state_dict": {}, "images": 3}'),
            ('a zlib stream', zlib.compress(content)),
            ('the start of a PNG', b'\x89PNG\r\n\x1a\n' + rng.randbytes(100)),
            ('the start of a zip archive', b'PK\x03\x04' + rng.randbytes(100)),
            ('an empty zip archive', b'PK\x05\x06' + bytes(18)),
        ]
    )
    return other, name


BYTE_DAMAGE = {
    'truncated': truncate,
    'bits flipped': flip_bits,
    'block damaged': damage_block,
    'something else': replace_content,
}
