import pytest

from mmcare.sample_data import coco, make_ade20k, make_coco, make_imagenet
from mmcare.sample_data.output import new_directory

MAKERS = [make_coco, make_ade20k, make_imagenet]


@pytest.mark.parametrize('make', MAKERS)
def test_a_directory_that_is_not_empty_is_refused_and_kept(make, tmp_path):
    (tmp_path / 'data').mkdir()
    (tmp_path / 'data/mine.txt').write_text('mine')
    with pytest.raises(FileExistsError, match='data is not empty: remove it first'):
        make(tmp_path / 'data', train=1, val=1)
    assert [path.name for path in tmp_path.rglob('*')] == ['data', 'mine.txt']


@pytest.mark.parametrize('make', MAKERS)
def test_a_file_is_refused_and_kept(make, tmp_path):
    (tmp_path / 'data').write_text('mine')
    with pytest.raises(FileExistsError, match='data is a file'):
        make(tmp_path / 'data', train=1, val=1)
    assert (tmp_path / 'data').read_text() == 'mine'


@pytest.mark.parametrize('make', MAKERS)
def test_an_empty_directory_is_filled(make, tmp_path):
    (tmp_path / 'data').mkdir()
    make(tmp_path / 'data', train=1, val=1, size=96)
    assert (tmp_path / 'data/preview.png').is_file()
    assert [path.name for path in tmp_path.iterdir()] == ['data']


def test_missing_parents_are_made(tmp_path):
    with new_directory(tmp_path / 'a/b') as temporary:
        (temporary / 'file').write_text('content')
    assert (tmp_path / 'a/b/file').read_text() == 'content'


def test_an_interrupted_run_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(coco, 'write_contact_sheet', interrupt)
    with pytest.raises(KeyboardInterrupt):
        make_coco(tmp_path / 'data', train=1, val=1, size=96)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize('make', MAKERS)
@pytest.mark.parametrize(
    ('arguments', 'error', 'message'),
    [
        ({'seed': -1}, ValueError, 'seed must be at least 0, got -1'),
        ({'train': 0}, ValueError, 'train must be at least 1, got 0'),
        ({'val': 0}, ValueError, 'val must be at least 1, got 0'),
        ({'size': 32}, ValueError, 'size must be at least .*, got 32'),
        ({'seed': 0.5}, TypeError, 'seed must be an integer, got 0.5'),
        ({'train': True}, TypeError, 'train must be an integer, got True'),
    ],
)
def test_bad_arguments(make, arguments, error, message, tmp_path):
    with pytest.raises(error, match=message):
        make(tmp_path / 'data', **arguments)
    assert list(tmp_path.iterdir()) == []
