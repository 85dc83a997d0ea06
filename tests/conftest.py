"""Everything runs on the CPU, seeded, and leaves no trace in the working directory."""

import os

os.environ['CUDA_VISIBLE_DEVICES'] = '-1'

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded():
    """Start every test from the same generator state."""
    torch.manual_seed(0)
