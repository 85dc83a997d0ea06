import subprocess
import sys
from pathlib import Path

import pytest

from mmcare import shipped


@pytest.fixture
def configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / 'configs'
    for name in ('_base_/runtime', 'mask_rcnn/care_s0_coco', 'mask_rcnn/care_s1_coco'):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / f'{name}.py').touch()
    (folder / 'mask_rcnn' / 'metafile.yml').touch()
    monkeypatch.setattr(shipped, 'CONFIGS', folder)
    return folder


def test_only_whole_configs_are_listed(configs: Path) -> None:
    assert shipped.shipped_configs() == ['mask_rcnn/care_s0_coco', 'mask_rcnn/care_s1_coco']


@pytest.mark.parametrize(
    'name',
    [
        'mask_rcnn/care_s1_coco',
        'mask_rcnn/care_s1_coco.py',
        'configs/mask_rcnn/care_s1_coco.py',
        'care_s1_coco',
    ],
)
def test_names_that_are_found(configs: Path, name: str) -> None:
    assert shipped.shipped_config(name) == (configs / 'mask_rcnn' / 'care_s1_coco.py').resolve()


def test_a_misspelt_name_is_answered_with_near_ones(configs: Path) -> None:
    with pytest.raises(ValueError, match='near names: mask_rcnn/care_s0_coco, mask_rcnn/care_s1_c'):
        shipped.shipped_config('maskrcnn/care_s1_coco')
    with pytest.raises(ValueError, match=r"named 'something'; `python -m mmcare.shipped` lists"):
        shipped.shipped_config('something')


def test_a_name_in_two_folders_must_be_given_with_one(configs: Path) -> None:
    (configs / 'fcos').mkdir()
    (configs / 'fcos' / 'care_s1_coco.py').touch()
    with pytest.raises(ValueError, match=r'several .*: fcos/care_s1_coco, mask_rcnn/care_s1_coco'):
        shipped.shipped_config('care_s1_coco')
    assert shipped.shipped_config('fcos/care_s1_coco').parent.name == 'fcos'


def test_without_installed_configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, 'CONFIGS', tmp_path / 'missing')
    with pytest.raises(FileNotFoundError, match='pip install -e'):
        shipped.shipped_config('mask_rcnn/care_s1_coco')


def test_an_unknown_name_leaves_nothing_on_standard_output() -> None:
    command = [sys.executable, '-m', 'mmcare.shipped', 'no/such_config']
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stdout == ''
    assert 'no shipped config' in result.stderr or 'pip install -e' in result.stderr
