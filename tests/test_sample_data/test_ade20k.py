import cv2
import numpy as np
import pytest

from mmcare.sample_data import make_ade20k
from mmcare.sample_data.ade20k import SHAPE_CLASSES, TEXTURE_CLASSES

CLASSES = dict([*TEXTURE_CLASSES.values(), *SHAPE_CLASSES.values()])


def read(directory, split, name):
    picture = cv2.imread(str(directory / 'images' / split / f'{name}.jpg'))
    labels = cv2.imread(
        str(directory / 'annotations' / split / f'{name}.png'), cv2.IMREAD_UNCHANGED
    )
    return picture, labels


@pytest.fixture(scope='module')
def train_scenes(ade20k_directory):
    return [
        read(ade20k_directory, 'training', f'ADE_train_{number:08d}') for number in range(1, 61)
    ]


def test_layout(ade20k_directory, read_all_files):
    expected = {'preview.png'}
    for split, prefix, count in (('training', 'ADE_train', 60), ('validation', 'ADE_val', 8)):
        for number in range(1, count + 1):
            expected |= {
                f'images/{split}/{prefix}_{number:08d}.jpg',
                f'annotations/{split}/{prefix}_{number:08d}.png',
            }
    assert set(read_all_files(ade20k_directory)) == expected


def test_names_of_the_classes():
    classes = pytest.importorskip('mmseg.utils').ade_classes()
    assert {label: classes[label - 1] for label in CLASSES} == CLASSES


def test_labels(train_scenes):
    seen = set()
    for picture, labels in train_scenes:
        assert labels.dtype == np.uint8
        assert labels.shape == picture.shape[:2] == (160, 160)
        # Some pixels are unlabelled in every scene, most are labelled.
        assert 0 < (labels == 0).mean() < 0.25
        seen |= set(np.unique(labels).tolist())
    assert seen == {0, *CLASSES}


def test_every_fourth_validation_image_is_odd_and_not_square(ade20k_directory):
    for number in range(1, 9):
        picture, labels = read(ade20k_directory, 'validation', f'ADE_val_{number:08d}')
        height, width = labels.shape
        assert picture.shape == (height, width, 3)
        if number % 4 == 0:
            assert height % 2 == width % 2 == 1
            assert height != width
        else:
            assert height == width == 160


def test_same_seed_gives_the_same_bytes(tmp_path, read_all_files):
    for name, seed in (('first', 5), ('second', 5), ('other', 6)):
        make_ade20k(tmp_path / name, seed=seed, train=2, val=2, size=96)
    first = read_all_files(tmp_path / 'first')
    other = read_all_files(tmp_path / 'other')
    assert first == read_all_files(tmp_path / 'second')
    assert first.keys() == other.keys()
    assert not set(first.values()) & set(other.values())
    # No scene of one split comes again in the other.
    assert len({data for name, data in first.items() if name.endswith('.jpg')}) == 4


def test_colours_do_not_tell_the_class(train_scenes):
    colours = {}
    for picture, labels in train_scenes:
        for label in np.unique(labels):
            colours.setdefault(int(label), []).append(picture[labels == label].mean(axis=0))
    spread = np.concatenate(list(colours.values())).std(axis=0)
    means = {label: np.mean(values, axis=0) for label, values in colours.items()}
    overall = np.mean(list(means.values()), axis=0)
    for label, mean in means.items():
        # About four standard errors of a mean.
        allowed = 4 * spread / np.sqrt(len(colours[label]))
        assert (np.abs(mean - overall) < allowed).all(), label


def test_fine_texture_tells_grass_from_sky(train_scenes):
    roughness = {'grass': [], 'sky': []}
    for picture, labels in train_scenes:
        detail = np.abs(cv2.Laplacian(picture, cv2.CV_32F)).mean(axis=2)
        for label, name in CLASSES.items():
            # Away from the region's border.
            inside = cv2.erode(np.uint8(labels == label), np.ones((7, 7), np.uint8)) > 0
            if name in roughness and inside.sum() > 100:
                roughness[name].append(detail[inside].mean())
    assert min(len(values) for values in roughness.values()) > 15
    assert min(roughness['grass']) > max(roughness['sky'])
