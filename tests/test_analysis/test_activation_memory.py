"""Memory of a training step: what is counted, what the tool writes, and docs/scale.md's table."""

import csv
import re
import runpy
import sys
from pathlib import Path

import cv2
import pytest
import torch
from torch import nn

from mmcare.analysis.memory import _counting, extrapolate_activations, measure_activations
from mmcare.models import CARE

ROOT = Path(__file__).parents[2]
TOOL = ROOT / 'tools/activation_memory.py'
FLOAT = 4  # bytes


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, 'argv', [TOOL.name, *map(str, arguments)])
    runpy.run_path(str(TOOL), run_name='__main__')


def test_storages_are_counted_once():
    """By hand: a convolution keeps image and weight, GELU its input, a product both factors."""
    image, conv = torch.rand(2, 3, 8, 8), nn.Conv2d(3, 4, 1)
    with _counting() as storages:
        features = nn.functional.gelu(conv(image))
        products = features * features[:1]
    kept = dict(image=2 * 3 * 64, weight=3 * 4, before_gelu=2 * 4 * 64, behind_gelu=2 * 4 * 64)
    assert products.shape == features.shape
    assert sum(one.nbytes() for one in storages.values()) == FLOAT * sum(kept.values())


def test_precision_and_recomputation_save_memory():
    full = measure_activations('s0', (64, 64), 'float32')
    half = measure_activations('s0', (64, 64), 'bfloat16')
    assert full.plain / 2 < half.plain < 0.6 * full.plain
    assert full.with_cp_peak < full.plain / 3
    # At least the state in front of each block, and what the first layer keeps: the image.
    arch = CARE.arch_zoo['s0']
    states = sum(
        depth * (width + memory) * (64 // stride) ** 2
        for depth, width, memory, stride in zip(
            arch['depths'], arch['widths'], arch['memory_widths'], (4, 8, 16, 32), strict=True
        )
    )
    assert FLOAT * (states + 3 * 64**2) <= full.with_cp < full.plain / 5


@pytest.mark.parametrize(('shape', 'precision'), [((50, 90), 'float32'), ((64, 96), 'bfloat16')])
def test_two_small_images_give_the_bytes_of_any(shape, precision):
    """Exactly, for sides that are padded too."""
    found = extrapolate_activations('s0', shape, precision)
    assert found == measure_activations('s0', shape, precision)


def test_table_of_the_page(tmp_path, monkeypatch, capsys):
    """The page shows what the tool prints."""
    run(monkeypatch, '--out-dir', tmp_path)
    table = capsys.readouterr().out.split('\n\nWritten to')[0]
    assert len(re.findall(r'^care_', table, re.MULTILINE)) == 12
    assert table in (ROOT / 'docs/scale.md').read_text()


def test_the_tool(tmp_path, monkeypatch, capsys):
    arguments = ['--shape', 64, 96, '--precision', 'float32', '--out-dir', tmp_path / 'out']
    run(monkeypatch, 's0', *arguments)
    expected = measure_activations('s0', (64, 96), 'float32')
    with open(tmp_path / 'out/memory.csv', newline='') as file:
        (row,) = csv.DictReader(file)
    assert (row['backbone'], row['height'], row['width']) == ('care_s0', '64', '96')
    assert int(row['kept']) == expected.plain
    assert int(row['kept_with_cp']) == expected.with_cp
    assert int(row['largest_block']) == expected.largest_block
    assert cv2.imread(str(tmp_path / 'out/memory.png')).std() > 5
    assert len(list((tmp_path / 'out').iterdir())) == 2
    output = capsys.readouterr()
    assert re.search(r'^care_s0 +64 x 96 +float32 +7 ', output.out, re.MULTILINE)
    assert 'measured: 1/1' in output.err


@pytest.mark.parametrize(
    ('arguments', 'words'),
    [
        (['s9'], "'s9' is unknown"),
        (['--shape', 32, 32], 'map of one position'),
        (['--shape', 16, 64], 'at least 32'),
        (['--precision', 'float8'], 'invalid choice'),
        (['--out-dir', TOOL], 'is not a directory'),
    ],
)
def test_what_the_tool_refuses(monkeypatch, capsys, arguments, words):
    with pytest.raises(SystemExit) as error:
        run(monkeypatch, *arguments)
    assert error.value.code == 2
    assert words in capsys.readouterr().err.splitlines()[-1]


def test_precision_is_checked():
    with pytest.raises(ValueError, match=r"'float8' must be one of \['float32', 'bfloat16'\]"):
        measure_activations('s0', (64, 64), 'float8')
