"""Windows over pictures, and pictures as training reads them; mmseg's are in test_toolboxes."""

import cv2
import numpy as np
import pytest
from PIL import Image
from runtime_helpers import SHAPE, describe, output

from mmcare_runtime import Model
from mmcare_runtime.prepare import prepare, read_picture
from mmcare_runtime.schema import check
from mmcare_runtime.tiles import place_windows, tile_stride

SLIDE = dict(stride=[20, 30], resize=None, multiple=None, size_divisor=None, size=None)
DRAW = np.random.default_rng(0)


@pytest.mark.parametrize('length', [1, 31, 32, 33, 64, 100])
def test_windows_cover_a_length(length):
    """As mmseg's: from the first pixel to the last, none of them outside."""
    for stride in (1, 20, 32):
        starts = place_windows(length, 32, stride)
        assert starts[0] == 0 and starts[-1] + 32 == max(length, 32)
        steps = np.diff(starts)
        assert (steps > 0).all() and max(steps, default=0) <= stride
    assert tile_stride((32, 48)) == [25, 38] and tile_stride((32, 48), (40, 40)) == [32, 40]


def classify_pixels(image):
    """Give logits of three classes, or their probabilities, that depend on the pixel alone."""
    values = image.astype(np.float32)
    return np.stack([values[:, 0] - 90, 128 - values[:, 1], values[:, 2] - 200], 1) / 40


def softened(image):
    powers = np.exp(classify_pixels(image))
    return powers / powers.sum(1, keepdims=True)


@pytest.mark.parametrize('kind', [None, 'probabilities'])
@pytest.mark.parametrize('batch', [1, 3])
@pytest.mark.parametrize('size', [(75, 140), (20, 100), (100, 30), SHAPE])
def test_averages_of_pixels(kind, batch, size):
    """Where a class depends on the pixel alone, windows and their borders cannot be seen."""
    about = describe('segmentor', slide=SLIDE)
    activation = dict(kind=kind, activation='softmax') if kind else {}
    about['outputs'] = [output('logits', batch, 3, *SHAPE, **activation)]
    about['inputs'][0]['shape'][0] = batch
    check(about, 'file')
    run = softened if kind else classify_pixels
    model = Model(lambda image: [run(image)], (batch, 3, *SHAPE), about)
    pixels = DRAW.integers(0, 256, (*size, 3)).astype(np.uint8)
    wanted = classify_pixels(pixels[..., ::-1].transpose(2, 0, 1)[None])[0].argmax(0)
    found = model.predict(pixels)
    assert (found['labels'] == wanted).mean() > 0.999 and found['names'][0] == 'cat'
    (again,) = model.predict([pixels], tile='slide')
    np.testing.assert_array_equal(again['labels'], found['labels'])


@pytest.mark.parametrize('aligned', [False, True])
def test_strips_of_resized_pictures(aligned):
    """Labels of strips are those of the whole map, which is enlarged to the picture."""
    from mmcare_runtime.results import choose, enlarge

    resize = dict(scale=[90, 70], keep_ratio=False, interpolation='bilinear', backend='cv2')
    about = describe('segmentor', slide=dict(SLIDE, resize=resize), align_corners=aligned)
    about['outputs'] = [output('logits', 1, 3, *SHAPE)]
    model = Model(lambda image: [classify_pixels(image)], (1, 3, *SHAPE), about)
    pixels = cv2.resize(DRAW.normal(128, 60, (9, 9, 3)), (201, 133)).clip(0, 255).astype(np.uint8)
    small = cv2.resize(pixels, (90, 70))
    (logits,) = classify_pixels(small[..., ::-1].transpose(2, 0, 1)[None])
    wanted = choose((enlarge(x, (133, 201), aligned) for x in logits), 3, (133, 201))
    assert (model.predict(pixels)['labels'] == wanted).mean() > 0.999


def test_what_windows_are_not_for():
    pixels = np.zeros((80, 80, 3), np.uint8)
    cases = [(describe('labels'), 'cannot be averaged')]
    unknown = describe('detector', decode=None)  # a head that decodes in its own way
    cases += [(about, 'is for segmentors') for about in (describe('classifier'), unknown)]
    for about, words in cases:
        model = Model(lambda _: [], (1, 3, *SHAPE), about)
        with pytest.raises(ValueError, match=words):
            model.predict(pixels, tile='slide')
    with pytest.raises(ValueError, match="tile is whole or slide, not 'no'"):
        model.predict(pixels, tile='no')
    about = describe('segmentor', slide=dict(SLIDE, other_steps=['Pad']))
    with pytest.raises(ValueError, match='has Pad, which is not done here'):
        Model(lambda _: [], (1, 3, *SHAPE), about).predict(pixels)


def find_white(image):
    """Find the white parts of an image, as a file with masks does."""
    planes = (image[0, 0] > 127).astype(np.uint8)
    number, _, about, _ = cv2.connectedComponentsWithStats(planes)
    boxes, scores = np.zeros((1, 5, 4), np.float32), np.zeros((1, 5), np.float32)
    for row, (x, y, width, height, area) in enumerate(about[1:number]):
        boxes[0, row] = x, y, x + width, y + height
        scores[0, row] = 0.5 + area / 1e5
    return [boxes, scores, np.zeros((1, 5), np.int32), np.ones((1, 5, 7, 7), np.float32)]


@pytest.mark.parametrize('iou', [0.5, 1.0])
def test_boxes_of_windows_are_merged(iou):
    """Each object is found once, also between windows, and by DETR, whose file has no NMS (1.0)."""
    picture, wanted = np.zeros((150, 200, 3), np.uint8), []
    for x, y in ((2, 3), (36, 22), (150, 130), (192, 60)):
        picture[y : y + 5, x : x + 6] = 255
        wanted.append([x, y, x + 6, y + 5])
    about = describe('instances')
    about['inputs'][0]['padding'] = [0] * 3
    about['test_cfg']['nms']['iou_threshold'] = iou
    model = Model(find_white, (1, 3, *SHAPE), about)
    assert model.tile == 'whole'
    found = model.predict(picture, tile='slide')
    order = np.lexsort(found['boxes'].T[::-1])
    np.testing.assert_array_equal(found['boxes'][order], wanted)
    assert (found['masks'].any(0) == (picture[..., 0] > 0)).all() and len(found['masks']) == 4
    empty = model.predict(np.zeros((90, 90, 3), np.uint8), tile='slide')
    assert empty['boxes'].shape == (0, 4) and empty['masks'].shape == (0, 90, 90)
    small = model.predict(picture[:20, :30], tile='slide')  # is not enlarged
    np.testing.assert_array_equal(small['boxes'], wanted[:1])
    assert small['scores'].item() == pytest.approx(0.5 + 30 / 1e5)


def deep_model(channels=3, **loader):
    """Return a segmentor that sees class 1 where the first channel is above 1000."""
    loader = dict(dict(color_type='unchanged', imdecode_backend='cv2', bits=16), **loader)
    about = describe('segmentor', channels, classes=None)
    about['inputs'][0].update(kind='tensor', dtype='float32', padding=[0.0] * channels)
    about['inputs'][0].update(mean=[1000.0] * channels, std=[100.0] * channels)
    about['inputs'][0].update(loader=dict(dict(to_float32=False), **loader))
    about['outputs'] = [output('logits', 1, 2, *SHAPE)]
    check(about, 'file')
    return Model(lambda x: [np.stack([0 * x[:, -1], x[:, -1]], 1)], (1, channels, *SHAPE), about)


@pytest.mark.parametrize('channels', [1, 3, 4, 5])
@pytest.mark.parametrize('suffix', ['.tiff', '.tif', '.png', '.npy'])
def test_pictures_of_sixteen_bits(channels, suffix, tmp_path):
    """Pixels and files keep their values."""
    pixels = DRAW.integers(0, 4096, (*SHAPE, channels)).astype(np.uint16)
    file = tmp_path / f'a{suffix}'
    if suffix == '.npy':
        np.save(file, pixels)
    elif channels == 5:
        pytest.skip('OpenCV writes at most four channels')
    else:
        cv2.imwrite(str(file), pixels)
    model = deep_model(channels)
    wanted = pixels[..., 0 if channels == 3 else -1] > 1000  # the input is RGB
    for picture in (pixels, file):
        np.testing.assert_array_equal(model.predict(picture)['labels'], wanted)


def test_other_bits_are_refused(tmp_path):
    deep, pixels = deep_model(), np.zeros((*SHAPE, 3), np.uint8)
    cv2.imwrite(str(tmp_path / 'a.png'), pixels)
    for picture in (pixels, tmp_path / 'a.png'):
        with pytest.raises(ValueError, match=r'got uint8 .* trained on pictures of 16 bits'):
            deep.predict(picture)
    ordinary = Model(lambda _: [], (1, 3, *SHAPE), describe('classifier'))
    with pytest.raises(ValueError, match=r'got uint16 .* trained on pictures of 8 bits'):
        ordinary.predict(pixels.astype(np.uint16))
    unknown = deep_model(bits=None)
    assert not unknown.predict(pixels)['labels'].any()
    assert unknown.predict(np.full((*SHAPE, 3), 1e5, np.float32))['labels'].all()


@pytest.mark.parametrize('backend', ['cv2', 'pillow', 'tifffile'])
@pytest.mark.parametrize('color_type', ['color', 'grayscale', 'unchanged'])
@pytest.mark.parametrize('mode', ['RGB', 'RGBA', 'L', 'LA', 'P'])
def test_pictures_are_read_as_by_mmcv(backend, color_type, mode, tmp_path):
    import mmcv

    suffix = 'png'
    if backend == 'tifffile':
        pytest.importorskip('tifffile')
        if mode in ('LA', 'P'):
            pytest.skip('not of TIFF files')
        suffix = 'tiff'
    image = Image.fromarray(DRAW.integers(0, 256, (20, 30, 4)).astype(np.uint8), 'RGBA')
    file = tmp_path / f'a.{suffix}'
    image.convert(mode).save(file)
    wanted = mmcv.imread(str(file), color_type, backend=backend)
    loader = dict(color_type=color_type, imdecode_backend=backend)
    np.testing.assert_array_equal(read_picture(file, 3, loader), np.atleast_3d(wanted))


def test_turbojpeg_ignores_orientation(tmp_path):
    """As in mmcv; OpenCV turns the picture."""
    image = Image.fromarray(DRAW.integers(0, 256, (20, 30, 3)).astype(np.uint8))
    image.getexif()[0x0112] = 6
    image.save(tmp_path / 'a.jpg', exif=image.getexif())
    for backend, size in (('cv2', (30, 20)), ('turbojpeg', (20, 30))):
        loader = dict(color_type='color', imdecode_backend=backend)
        assert read_picture(tmp_path / 'a.jpg', 3, loader).shape[:2] == size


def test_floats_are_resized_as_floats():
    """``to_float32`` keeps what rounding would lose."""
    about = describe('segmentor')['inputs'][0]
    about.update(kind='tensor', dtype='float32', mean=[0.0] * 3, std=[1.0] * 3)
    pixels = DRAW.integers(0, 256, (64, 96, 3)).astype(np.uint8)
    about['loader'] = dict(to_float32=True)
    wanted = cv2.resize(pixels.astype(np.float32), SHAPE[::-1])[..., ::-1].transpose(2, 0, 1)
    np.testing.assert_array_equal(prepare(pixels, about, SHAPE)[0][0], wanted)
    assert (wanted % 1).any()
