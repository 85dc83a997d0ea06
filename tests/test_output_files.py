"""Outputs are there whole or not at all, and what cannot be written is refused before any work."""

import os
import runpy
import sys
from pathlib import Path

import pytest

from mmcare import output
from mmcare.output import check_writable, check_writable_file, moved_into_place

TOOLS = Path(__file__).parents[1] / 'tools'
# What each tool is called with, up to the place that it is to write to.
COMMANDS = {
    'activation_memory': ['s0', '--out-dir'],
    'benchmark_latency': ['--peers', '--out-dir'],
    'complexity': ['s0', '--out-dir'],
    'convert_checkpoint': ['missing.pth'],
    'demo': ['coco', '--work-dir'],
    'draw_architecture': ['--out'],
    'export_backbone': ['s0', '--out-dir'],
    'make_sample_data': ['coco'],
    'placement_report': ['missing.mlpackage', '--out-dir'],
    'reparameterize_model': ['missing.py', 'missing.pth'],
}


def test_every_tool_is_called() -> None:
    assert COMMANDS.keys() == {path.stem for path in TOOLS.glob('*.py')}


@pytest.mark.parametrize('tool', COMMANDS)
def test_tools_refuse_what_cannot_be_written(tool, tmp_path, monkeypatch, capsys):
    (tmp_path / 'file').write_text('kept')
    monkeypatch.chdir(tmp_path)
    place = str(tmp_path / 'file' / 'out.png')  # the ending that draw_architecture wants
    monkeypatch.setattr(sys, 'argv', [tool, *COMMANDS[tool], place])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(TOOLS / f'{tool}.py'), run_name='__main__')
    assert stop.value.code == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert printed.err.splitlines()[-1].endswith(
        f'{tmp_path / "file"} is not a directory: give another place to write to'
    )
    assert [path.name for path in tmp_path.iterdir()] == ['file']
    assert (tmp_path / 'file').read_text() == 'kept'


# ------------------------------------------------------------ mmcare.output


def test_folders_that_need_not_exist(tmp_path):
    check_writable(tmp_path)
    check_writable(tmp_path / 'a' / 'b')
    check_writable_file(tmp_path / 'a' / 'file')
    assert not any(tmp_path.iterdir())


@pytest.mark.skipif(not Path('/proc').is_dir(), reason='this system has no /proc')
def test_a_folder_that_takes_no_files():
    """Even root cannot write there, though the system says so."""
    with pytest.raises(PermissionError, match='/proc cannot be written: give another place'):
        check_writable(Path('/proc/out'))


def test_a_folder_in_place_of_a_file(tmp_path):
    (tmp_path / 'folder').mkdir()
    with pytest.raises(IsADirectoryError, match='folder is a directory: give the name of a file'):
        check_writable_file(tmp_path / 'folder')
    with pytest.raises(IsADirectoryError), moved_into_place(tmp_path / 'folder') as temporary:
        temporary.write_text('new')
    assert [path.name for path in tmp_path.rglob('*')] == ['folder']


def test_missing_folders_are_made_and_older_files_replaced(tmp_path):
    path = tmp_path / 'a' / 'file'
    for content in ('old', 'new'):
        with moved_into_place(path) as temporary:
            temporary.write_text(content)
        assert path.read_text() == content
    assert [one.name for one in path.parent.iterdir()] == ['file']


def test_folders_are_replaced_whole(tmp_path):
    for name in ('old', 'new'):
        with moved_into_place(tmp_path / 'package') as temporary:
            temporary.mkdir()
            (temporary / name).touch()
    assert [path.name for path in tmp_path.rglob('*')] == ['package', 'new']


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    (tmp_path / 'file').write_text('old')

    def fail(*paths):
        raise OSError('the disk is full')

    monkeypatch.setattr(output.os, 'replace', fail)
    with pytest.raises(OSError, match='full'), moved_into_place(tmp_path / 'file') as temporary:
        temporary.write_text('new')
    assert os.listdir(tmp_path) == ['file']
    assert (tmp_path / 'file').read_text() == 'old'
