"""The command, run in this process."""

import runpy
import sys

import cv2
import numpy as np
import pytest
from runtime_helpers import describe, write_onnx

PIXELS = np.random.default_rng(1).integers(0, 256, (40, 60, 3), np.uint8)


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run the command in an empty folder, with a file of the task; return status and output."""
    monkeypatch.chdir(tmp_path)
    cv2.imwrite('a.png', PIXELS)

    def run_command(task, *arguments, module='mmcare_runtime', **changes):
        write_onnx('mine.onnx', describe(task, **changes))
        monkeypatch.setattr(sys, 'argv', ['', 'mine.onnx', *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            runpy.run_module(module, run_name='__main__')
        printed = capsys.readouterr()
        return stopped.value.code, printed.out, printed.err

    return run_command
