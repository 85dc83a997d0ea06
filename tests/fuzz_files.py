"""Feed damaged and hostile files to everything in mmcare that reads files, and count what happens.

Good outcomes: refused (with an error that names the file), warned (accepted, with a warning that
names it) and right (accepted, with the result of the undamaged file, or what the file says). Bad
ones: executed (code from the file ran), silent (accepted with a wrong result and no warning),
unclear (an error without the file's name, or from the depths), crashed and hung.

Every file is read in a process of its own, with limits of memory and time, in a temporary folder.
Ends with status 1 if there was a bad outcome.
"""

import argparse
import os
import sys
import tempfile
import warnings
from pathlib import Path

os.environ['CUDA_VISIBLE_DEVICES'] = '-1'

import torch
from fuzz.harness import GOOD, count, run_kind
from fuzz.isolation import silenced
from fuzz.kinds import KINDS


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--seed', type=int, default=0, help='equal seeds give equal files')
    parser.add_argument(
        '--cases', type=int, default=1000, help='of each kind of files; default: %(default)s'
    )
    parser.add_argument(
        '--kind', nargs='+', choices=KINDS, default=list(KINDS), help='default: all'
    )
    parser.add_argument(
        '--keep', type=Path, metavar='DIR', help='keep the files of bad outcomes in DIR'
    )
    return parser.parse_args()


def main() -> None:
    """Run all cases, name the bad ones, print the counts."""
    arguments = parse_args()
    warnings.simplefilter('ignore')  # of PyTorch and zipfile, while odd files are made
    torch.set_num_threads(1)  # threads do not survive the fork
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        for name in arguments.kind:
            with silenced():
                kind = KINDS[name](Path(temporary) / 'sources' / name)
            folder = (arguments.keep or Path(temporary)).resolve() / name
            for result in run_kind(
                kind, folder, arguments.seed, arguments.cases, keep=bool(arguments.keep)
            ):
                results.append(result)
                if result.outcome not in GOOD:
                    print(f'\r{result}', file=sys.stderr)
                if sys.stderr.isatty():
                    print(f'\r{name}: {result.number + 1}', end='', file=sys.stderr)
    print(count(results))
    sys.exit(any(result.outcome not in GOOD for result in results))


if __name__ == '__main__':
    main()
