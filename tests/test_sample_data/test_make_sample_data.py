import runpy
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / 'tools/make_sample_data.py'


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, 'argv', [TOOL.name, *map(str, arguments)])
    runpy.run_path(str(TOOL), run_name='__main__')


@pytest.mark.parametrize(
    ('kind', 'image'),
    [
        ('coco', 'val2017/000000000003.jpg'),
        ('ade20k', 'images/validation/ADE_val_00000001.jpg'),
        ('imagenet', 'val/n01608432/ILSVRC2012_val_00000001.JPEG'),
    ],
)
def test_says_what_was_written(kind, image, tmp_path, monkeypatch, capsys):
    run(monkeypatch, kind, tmp_path / 'data', '--train', 2, '--val', 1, '--size', 96, '--seed', 4)
    assert (tmp_path / 'data' / image).is_file()
    output = capsys.readouterr()
    assert '2 images' in output.out
    assert str(tmp_path / 'data/preview.png') in output.out
    assert '2/2' in output.err


@pytest.mark.parametrize(
    ('flags', 'message'),
    [
        (['--train', 0], 'train must be at least 1, got 0'),
        (['--train', 'many'], "argument --train: invalid int value: 'many'"),
        ([], 'is not empty: remove it first'),
    ],
)
def test_errors_are_one_line_with_the_usage(flags, message, tmp_path, monkeypatch, capsys):
    (tmp_path / 'file').write_text('')
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, 'coco', tmp_path, *flags)
    assert stop.value.code == 2
    errors = capsys.readouterr().err
    assert errors.startswith('usage: ')
    assert message in errors
