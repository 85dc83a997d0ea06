"""Everything runs on the CPU, seeded, and leaves no trace in the working directory."""

import os
import sys
from pathlib import Path

os.environ['CUDA_VISIBLE_DEVICES'] = '-1'
sys.path.insert(0, str(Path(__file__).parent))  # for `from helpers import ...` in subfolders

import mmengine.device.utils
import pytest
import torch
from helpers import IS_NEW
from mmengine.registry import DefaultScope

mmengine.device.utils.DEVICE = 'cpu'  # MMEngine would choose Apple's GPUs

if not IS_NEW:  # exports, and what is measured with them
    collect_ignore_glob = ['test_export/*', 'test_benchmarks.py', 'test_phone/*', 'test_reach.py']


@pytest.fixture(autouse=True)
def seeded():
    """Start every test from the same generator state, and leave no toolbox selected."""
    torch.manual_seed(0)
    yield
    DefaultScope._instance_dict.clear()
