"""The name that tools/export.py had in version 1.0."""

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).with_name('export.py')), run_name='__main__')
