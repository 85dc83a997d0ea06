"""tools/complexity.py: what it prints and writes, and what it refuses."""

import csv
import runpy
import sys
from pathlib import Path

import cv2
import pytest

from mmcare import output
from mmcare.analysis import paper, report

TOOL = Path(__file__).parents[2] / 'tools/complexity.py'


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, 'argv', [TOOL.name, *map(str, arguments)])
    runpy.run_path(str(TOOL), run_name='__main__')


def rows_of(filename: Path) -> list[dict[str, str]]:
    with open(filename, newline='') as file:
        return list(csv.DictReader(file))


def assert_is_a_picture(filename: Path) -> None:
    picture = cv2.imread(str(filename))
    assert min(picture.shape[:2]) > 300
    assert picture.std() > 10, f'{filename} is empty'


def test_an_arch(tmp_path, monkeypatch, capsys):
    run(monkeypatch, 's0', '--shape', 64, 96, '--out-dir', tmp_path / 'out')
    printed = capsys.readouterr().out
    assert printed.startswith('care_s0, image of 64 x 96: 7,340,000 parameters')
    assert printed.rstrip().endswith(f'Written to {tmp_path / "out"}')
    *parts, total = rows_of(tmp_path / 'out/care_s0_64x96.csv')
    assert (total['stage'], total['params']) == ('all', '7340000')
    for quantity in ('params', 'macs'):
        assert sum(int(part[quantity]) for part in parts) == int(total[quantity])
        assert f'{int(total[quantity]):,}' in printed
    assert {part['part'] for part in parts} == {
        'stem',
        'downsampling',
        'local',
        'global',
        'Inter1',
        'Inter2',
        'layer scale',
        'head',
    }
    assert_is_a_picture(tmp_path / 'out/care_s0_64x96.png')
    assert len(list((tmp_path / 'out').iterdir())) == 2, 'nothing temporary is left'


def test_without_head(tmp_path, monkeypatch, capsys):
    run(monkeypatch, 's1', '--no-head', '--shape', 32, 32, '--out-dir', tmp_path)
    assert '7,548,328 parameters' in capsys.readouterr().out
    assert rows_of(tmp_path / 'care_s1_32x32.csv')[-1]['params'] == '7548328'


def test_omega(tmp_path, monkeypatch, capsys):
    run(monkeypatch, '--omega', '--shape', 64, 64, '--out-dir', tmp_path)
    printed = capsys.readouterr().out
    terms = rows_of(tmp_path / 'omega_terms.csv')
    assert {(row['model'], row['stage']) for row in terms} == {
        (f'care_s{number}', stage) for number in range(3) for stage in '34'
    }
    sums = [row['network'] for row in terms if row['term'] == 'all']
    assert sums == [row['network'] for row in terms if row['term'] == 'counted']
    assert f'{int(sums[0]):,}' in printed
    stages = rows_of(tmp_path / 'omega_stages.csv')
    limits = {(row['d'], row['kernels'], row['heads']): row['delta_limit'] for row in stages}
    assert limits['24', '7', '1'] == '46/3'
    assert 'With 7x7 and n = 1 it fails at d = 24 for 46/3 <= D < 24.' in printed
    assert_is_a_picture(tmp_path / 'omega.png')


def test_paper_marks_the_row_that_differs(tmp_path, monkeypatch, capsys):
    rows = [row for row in paper.PAPER_ROWS if row.name in ('w/ Sym', 'no multi-scale')][:2]
    monkeypatch.setattr(paper, 'PAPER_ROWS', rows)
    run(monkeypatch, '--paper', '--out-dir', tmp_path)
    printed = capsys.readouterr().out
    marked = [line for line in printed.splitlines() if ' * ' in line and 'CARE-' in line]
    assert len(marked) == 1 and 'w/ Sym' in marked[0]
    assert 'we count 1.9494 GMACs, which rounds to 1.9; the paper prints 2.0' in ' '.join(
        printed.split()
    )
    written = rows_of(tmp_path / 'paper.csv')
    assert [row['explained_by_rounding'] for row in written] == ['no', 'yes', 'yes', 'yes']
    assert [row['counted'] for row in written if row['unit'] == 'M parameters'] == [
        '19661984',
        '7316320',
    ]
    assert_is_a_picture(tmp_path / 'paper.png')


def test_nothing_is_marked_where_all_agrees():
    comparisons = paper.compare_with_paper([paper.PAPER_ROWS[8]])
    text = report.paper_text(comparisons)
    assert '*' not in text
    assert text.endswith('All of ours round to what the paper prints.')


@pytest.mark.parametrize(
    ('arguments', 'words'),
    [
        ([], 'nothing to do: give MODEL, --paper or --omega'),
        (['s3'], "'s3' is neither an arch (s0, s1, s2) nor the path of a config"),
        (['missing.py'], 'there is no config missing.py'),
        (['{root}/configs/_base_/default_runtime.py'], 'has no CARE backbone'),
        (['s0', '--shape', '-1', '224'], 'must be at least 32'),
        (['s0', '--shape', '16', '224'], 'must be at least 32'),
        (['s0', '--shape', '224'], 'expected 2 arguments'),
        (['s0', '--shape', 'a', 'b'], 'invalid int value'),
        (['--paper', '--shape', '0', '0'], 'must be at least 32'),
    ],
)
def test_bad_input_is_refused_before_any_work(arguments, words, tmp_path, monkeypatch, capsys):
    arguments = [argument.format(root=TOOL.parents[1]) for argument in arguments]
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, *arguments, '--out-dir', tmp_path / 'out')
    assert stop.value.code == 2
    printed = capsys.readouterr()
    assert words in printed.err
    assert printed.out == ''
    assert not (tmp_path / 'out').exists()


def test_output_directory_that_is_a_file(tmp_path, monkeypatch, capsys):
    (tmp_path / 'file').write_text('kept')
    with pytest.raises(SystemExit):
        run(monkeypatch, 's0', '--out-dir', tmp_path / 'file')
    assert 'file is not a directory: give another place' in capsys.readouterr().err
    assert (tmp_path / 'file').read_text() == 'kept'


def test_without_matplotlib(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, 'matplotlib', None)
    with pytest.raises(SystemExit):
        run(monkeypatch, 's0', '--out-dir', tmp_path / 'out')
    assert 'pip install matplotlib' in capsys.readouterr().err
    assert not (tmp_path / 'out').exists()


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    filename = tmp_path / 'table.csv'
    filename.write_text('old')

    def fail(*paths):
        raise OSError('the disk is full')

    monkeypatch.setattr(output.os, 'replace', fail)
    with pytest.raises(OSError, match='full'):
        report.write_csv([dict(a=1)], filename)
    assert [path.name for path in tmp_path.iterdir()] == ['table.csv']
    assert filename.read_text() == 'old'
