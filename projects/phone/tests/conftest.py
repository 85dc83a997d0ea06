"""The page's tests use what the package's tests share."""

import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT), str(PROJECT.parents[1] / 'tests')]

from helpers import IS_NEW, seeded  # noqa: E402, F401 (every test uses this fixture)

if not IS_NEW:  # exports
    collect_ignore = ['test_phone.py']
