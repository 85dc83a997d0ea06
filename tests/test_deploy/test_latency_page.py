"""README's latencies, their sentences and their pictures follow from the recording in docs/data."""

import json
import re
from pathlib import Path

import cv2
import pytest

from mmcare.deploy.latency import write_report
from mmcare.deploy.latency_recording import read_recording
from mmcare.deploy.latency_report import growth_rows, latency_rows, verdicts

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / 'docs/data/latency_1.0.0rc1.json'
RECORDING = read_recording(FILE)
PAGE = (ROOT / 'README.md').read_text()
TEXT = ' '.join(PAGE.split())
WORDS = {1: 'one', 2: 'two', 3: 'three', 4: 'four', 5: 'five', 6: 'six'}


@pytest.fixture(scope='module')
def rows():
    """Rows of ONNX Runtime by key; those of PyTorch are not in README."""
    return {row['key']: row for row in latency_rows(RECORDING) if row['backend'] == 'onnxruntime'}


def test_table_and_pictures(tmp_path):
    report = write_report(RECORDING, tmp_path)
    table = re.compile(r'(?:^\| s[012] \|.*\n)+', re.MULTILINE)
    assert table.findall(PAGE) == table.findall(report)[:1]
    for name, drawn in (('accuracy', 'accuracy_onnxruntime'), ('sizes', 'sizes')):
        shown, again = (
            cv2.imread(str(path))
            for path in (ROOT / f'docs/images/latency_{name}.png', tmp_path / f'{drawn}.png')
        )
        assert shown.shape == again.shape
        # Fonts are those of matplotlib; its versions may differ in some pixels.
        assert (cv2.absdiff(shown, again).max(axis=2) > 64).mean() < 0.02


def test_conditions():
    settings, machine, versions = RECORDING.settings, RECORDING.machine, RECORDING.versions
    height, width = settings['shape']
    for words in (
        f'mmcare {versions["mmcare"]}: backbones with four maps at {height}x{width}, '
        f'batch {settings["batch"]}',
        f'ONNX Runtime {versions["onnxruntime"]} with {WORDS[settings["threads"]]} thread of a '
        f'{WORDS[machine["cores"]]}-core {machine["architecture"]} machine with '
        f'{machine["vector_instructions"]}, torch {versions["torch"]}, timm {versions["timm"]}',
        f'median and quartiles of {settings["runs"]} rounds',
    ):
        assert words in TEXT


def test_who_beats_care(rows):
    def beats(one, care):
        faster = rows[one]['milliseconds'] < rows[care]['milliseconds']
        return faster and rows[one]['top1'] > rows[care]['top1']

    better = {
        care: [row['model'] for one, row in rows.items() if beats(one, care)]
        for care in RECORDING.settings['archs']
    }
    (s0,), (s1,) = better['s0'], better['s1']
    assert better['s2'] == []
    assert f'{s0} is faster and more accurate than S0,' in TEXT
    assert f'{s1} is faster and more accurate than S1.' in TEXT
    for key, care in (('mobilenetv4_m', 's1'), ('fastvit_sa12', 's2')):
        points = rows[care]['top1'] - rows[key]['top1']
        ratio = f"{rows[key]['ratio']:.2f} of {care.upper()}'s time for {points:.1f} points less"
        assert rows[key]['care_class'] == care and ratio in TEXT
    faster = [
        row['model']
        for row in rows.values()
        if row['care_class'] == 's0' and row['ratio'] < 1 and row['top1'] < rows['s0']['top1']
    ]
    *first, last = sorted(faster, key=TEXT.index)
    assert f'S0 is slower than {", ".join(first)} and {last}, which are less accurate' in TEXT


def test_peers_in_pytorch():
    sentences = verdicts([row for row in latency_rows(RECORDING) if row['backend'] == 'torch'])
    counts = [
        [WORDS.get(int(number)) for number in re.search(r'than (\d+) of (\d+)', one).groups()]
        for one in sentences
    ]
    (_, (few, all_of_s1), (more, all_of_s2)) = counts
    assert (
        f'S1 is faster than {few} of its {all_of_s1} peers, S2 than {more} of {all_of_s2}.' in TEXT
    )


def test_where_care_wins(rows):
    slow = [rows[key]['ratio'] for key in ('swin_tiny', 'pvtv2_b2', 'convnext_tiny')]
    assert {rows[key]['care_class'] for key in ('swin_tiny', 'pvtv2_b2', 'convnext_tiny')} == {'s2'}
    assert f'take {min(slow):.1f} to {max(slow):.1f} times as long as S2' in TEXT
    growth = {row['key']: row['exponent'] for row in growth_rows(RECORDING)}
    ours = [growth[arch] for arch in RECORDING.settings['archs']]
    words = f'exponent of the side {min(ours):.2f} to {max(ours):.2f}, '
    assert f'{words}PVTv2-B1 {growth["pvtv2_b1"]:.2f}' in TEXT


def test_the_recording_names_no_place():
    content = json.loads(FILE.read_text())
    assert content['machine'].keys() == {
        'cores',
        'architecture',
        'vector_instructions',
        'system',
    }
    assert '/' not in FILE.read_text()
