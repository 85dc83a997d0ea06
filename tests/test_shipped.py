"""``python -m mmcare.shipped`` and atomic writes."""

import os
import runpy
import sys

import pytest
import torch
from helpers import ROOT

from mmcare import shipped
from mmcare.files import moved_into_place


def test_names_and_paths(monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['shipped'])
    shipped.main()
    names = capsys.readouterr().out.split()
    assert 'mask_rcnn/care_s1_coco' in names and not [n for n in names if n.startswith('_base_')]
    for name in ('mask_rcnn/care_s1_coco', 'configs/mask_rcnn/care_s1_coco.py'):
        path = shipped.shipped_config(name)
        assert path.is_file() and path.parts[-2:] == ('mask_rcnn', 'care_s1_coco.py')
    monkeypatch.setattr(sys, 'argv', ['shipped', 'no/such_config'])
    with pytest.raises(SystemExit, match='2'):
        shipped.main()
    assert "no shipped config is named 'no/such_config'" in capsys.readouterr().err


@pytest.mark.parametrize('tool', ['export', 'export_backbone', 'eval_exported'])
def test_exports_say_what_they_need(tool, monkeypatch, capsys):
    monkeypatch.setattr(torch, '__version__', '2.1.2')
    for name in [name for name in sys.modules if name.startswith('mmcare.export')]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(SystemExit, match='2'):
        runpy.run_path(str(ROOT / f'tools/{tool}.py'), run_name='__main__')
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith('error: exports need') and line.endswith('and torch 2.1.2')


def test_file_names_are_unique():
    """Trainings write to the folder ``work_dirs/NAME``, and exported files have the name."""
    names = [path.name for path in shipped.CONFIGS.rglob('*.py')]
    assert sorted(names) == sorted(set(names))


def test_failed_writes_leave_the_old_file(tmp_path):
    for text in ('older', 'old'):
        with moved_into_place(tmp_path / 'file') as temporary:
            temporary.write_text(text)
        with moved_into_place(tmp_path / 'package') as temporary:
            temporary.mkdir()
            (temporary / text).touch()
    assert sorted(path.name for path in tmp_path.rglob('*')) == ['file', 'old', 'package']
    with pytest.raises(KeyboardInterrupt), moved_into_place(tmp_path / 'file') as temporary:
        temporary.write_text('half')
        raise KeyboardInterrupt
    assert sorted(os.listdir(tmp_path)) == ['file', 'package']
    assert (tmp_path / 'file').read_text() == 'old'
