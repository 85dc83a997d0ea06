import cv2
import numpy as np
import pytest

from mmcare.sample_data import make_imagenet
from mmcare.sample_data.imagenet import CLASSES


@pytest.fixture(scope='module')
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp('sample_data') / 'imagenet'
    make_imagenet(directory, seed=1, train=120, val=20)
    return directory


def listed(directory, split):
    lines = (directory / 'meta' / f'{split}.txt').read_text().splitlines()
    return [(name, int(label)) for name, label in (line.split() for line in lines)]


def test_layout(directory, read_all_files):
    expected = {'preview.png', 'meta/train.txt', 'meta/val.txt'}
    for split, count in (('train', 120), ('val', 20)):
        names = [name for name, _ in listed(directory, split)]
        assert len(set(names)) == count
        for name, label in listed(directory, split):
            assert CLASSES[name.split('/')[0]][0] == label
        expected |= {f'{split}/{name}' for name in names}
        assert {name.split('/')[0] for name in names} == set(CLASSES)
    assert set(read_all_files(directory)) == expected


def test_labels_are_those_of_imagenet():
    categories = pytest.importorskip('mmpretrain.datasets.categories').IMAGENET_CATEGORIES
    for label, name, _ in CLASSES.values():
        assert categories[label].split(',')[0] == name
    # The numbers of the folders rise with the labels, as ImageNet's do.
    assert sorted(CLASSES) == sorted(CLASSES, key=lambda folder: CLASSES[folder][0])


def test_mmpretrain_reads_both_forms(directory):
    """Lists with labels among the 1000, and folders whose order is the label."""
    datasets = pytest.importorskip('mmpretrain.datasets')
    whole = datasets.ImageNet(str(directory), split='train')
    assert len(whole) == 120 and len(whole.CLASSES) == 1000
    assert set(whole.get_gt_labels()) == {label for label, _, _ in CLASSES.values()}
    folders = datasets.CustomDataset(str(directory), data_prefix='val')
    assert list(folders.CLASSES) == list(CLASSES) and len(folders) == 20
    for dataset in (whole, folders):
        assert cv2.imread(dataset.get_data_info(3)['img_path']) is not None


def test_sizes(directory):
    for split in ('train', 'val'):
        shapes = [
            cv2.imread(str(directory / split / name)).shape for name, _ in listed(directory, split)
        ]
        other = [index for index, shape in enumerate(shapes) if shape != (96, 96, 3)]
        assert other == ([] if split == 'train' else [12, 13, 14, 15])
        assert all(shapes[index][0] != shapes[index][1] for index in other)


def test_same_seed_gives_the_same_bytes(tmp_path, read_all_files):
    for name, seed in (('first', 5), ('second', 5), ('other', 6)):
        make_imagenet(tmp_path / name, seed=seed, train=3, val=2, size=64)
    first = read_all_files(tmp_path / 'first')
    other = read_all_files(tmp_path / 'other')
    assert first == read_all_files(tmp_path / 'second')
    pictures = {data for name, data in first.items() if name.endswith('.JPEG')}
    assert len(pictures) == 5 and not pictures & set(other.values())


def test_a_larger_set_begins_with_the_smaller_one(tmp_path, read_all_files):
    make_imagenet(tmp_path / 'small', train=5, val=1, size=64)
    make_imagenet(tmp_path / 'large', train=9, val=4, size=64)
    small, large = (read_all_files(tmp_path / name) for name in ('small', 'large'))
    pictures = {name: data for name, data in small.items() if name.endswith('.JPEG')}
    assert len(pictures) == 6
    assert pictures.items() <= large.items()


def test_colours_do_not_tell_the_class(directory):
    colours = {}
    for name, label in listed(directory, 'train'):
        picture = cv2.imread(str(directory / 'train' / name))
        colours.setdefault(label, []).append(picture.mean(axis=(0, 1)))
    spread = np.concatenate(list(colours.values())).std(axis=0)
    means = np.array([np.mean(values, axis=0) for values in colours.values()])
    # About four standard errors of the difference of two means of 30.
    assert (np.ptp(means, axis=0) < spread).all()
