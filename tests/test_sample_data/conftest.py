import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mmcare.sample_data import make_ade20k, make_coco


@pytest.fixture(scope='session')
def coco_directory(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp('sample_data') / 'coco'
    make_coco(directory, seed=1, train=80, val=16)
    return directory


@pytest.fixture(scope='session')
def coco_train(coco_directory) -> dict:
    return json.loads((coco_directory / 'annotations/instances_train2017.json').read_text())


@pytest.fixture(scope='session')
def ade20k_directory(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp('sample_data') / 'ade20k'
    make_ade20k(directory, seed=1, train=60, val=8)
    return directory


@pytest.fixture(scope='session')
def read_all_files() -> Callable[[Path], dict[str, bytes]]:
    def read(directory):
        return {
            path.relative_to(directory).as_posix(): path.read_bytes()
            for path in directory.rglob('*')
            if path.is_file()
        }

    return read
