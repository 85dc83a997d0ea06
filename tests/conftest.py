"""Everything runs on the CPU, seeded, and leaves no trace in the working directory."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for `from helpers import ...` in subfolders

import mmengine.device.utils
from helpers import IS_NEW, seeded  # noqa: F401 (every test uses this fixture)

mmengine.device.utils.DEVICE = 'cpu'  # MMEngine would choose Apple's GPUs

if not IS_NEW:  # exports, and what is measured with them
    collect_ignore_glob = ['test_export/*', 'test_benchmarks.py', 'test_third_party.py']
