"""Sample data are reproducible; test_your_data.py and test_demo.py train on them."""

import pytest

from mmcare.sample_data import make_ade20k, make_coco, make_imagenet

MAKERS = [make_coco, make_ade20k, make_imagenet]


def read_files(directory):
    files = (path for path in directory.rglob('*') if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def read_images(directory):
    files = read_files(directory).items()
    return {content for name, content in files if name.endswith(('.jpg', '.JPEG'))}


@pytest.mark.parametrize('make', MAKERS)
def test_seed_and_number_alone_decide(make, tmp_path):
    for name, seed, train in (('first', 5, 2), ('again', 5, 2), ('other', 6, 2), ('larger', 5, 4)):
        make(tmp_path / name, seed=seed, train=train, val=2, size=64)
    first, larger = read_images(tmp_path / 'first'), read_images(tmp_path / 'larger')
    assert read_files(tmp_path / 'first') == read_files(tmp_path / 'again')
    assert not first & read_images(tmp_path / 'other')
    assert first < larger and len(larger) == 6, 'a scene occurs twice'
