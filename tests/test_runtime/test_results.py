"""Pictures are prepared and outputs read as PyTorch, torchvision and mmcv do."""

import io
import sys

import cv2
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image, ImageFont, ImageOps
from runtime_helpers import DECODE, SHAPE, describe, outputs_of
from torchvision.ops import batched_nms

from mmcare_runtime import Model, drawing, results
from mmcare_runtime.masks import paste_masks
from mmcare_runtime.prepare import check_pixels, prepare, read_picture, read_webp_turn, resize


def model_of(task, **changes):
    about = describe(task, **changes)
    channels = about['inputs'][0]['shape'][1]
    return Model(lambda _: outputs_of(about), (1, channels, *SHAPE), about)


@pytest.mark.parametrize('size', [(45, 61), (400, 300), (8, 12), (1, 70)])
def test_resizing(size):
    draw = np.random.default_rng(0)
    plane = draw.normal(size=(8, 12)).astype(np.float32)
    wanted = F.interpolate(torch.from_numpy(plane)[None, None], size, mode='bilinear')[0, 0]
    np.testing.assert_allclose(results.enlarge(plane, size), wanted, atol=1e-5)
    labels = draw.integers(0, 9, (8, 12))
    wanted = F.interpolate(torch.from_numpy(labels)[None, None].float(), size, mode='nearest-exact')
    assert (results.enlarge_labels(labels, size) == wanted[0, 0].numpy()).mean() > 0.9999


@pytest.mark.parametrize('channels', [1, 5])
def test_label_maps(channels):
    """As mmseg: enlarge to the image, cut padding off, enlarge to the picture, choose."""
    logits = torch.randn(1, channels, 8, 12)
    whole = F.interpolate(logits, SHAPE, mode='bilinear')[..., 3:30, 4:40]
    whole = F.interpolate(whole, (150, 200), mode='bilinear')[0]
    wanted = whole.argmax(0) if channels > 1 else (whole[0].sigmoid() > 0.4).long()
    labels = results.read_labels(logits.numpy(), SHAPE, (3, 4, 27, 36), (150, 200), 0.4)
    assert labels.dtype == np.int64 and (labels == wanted.numpy()).mean() > 0.9999


def test_scores():
    values = torch.randn(3, 40) * 60
    np.testing.assert_allclose(results.sigmoid(values.numpy()), values.sigmoid(), atol=1e-6)
    np.testing.assert_allclose(results.softmax(values.numpy()), values.softmax(1), atol=1e-6)


def test_nms():
    corners = torch.rand(300, 2) * 60
    boxes = torch.cat([corners, corners + torch.rand(300, 2) * 30], 1)
    boxes[:5, 2:] = boxes[:5, :2]  # without an area
    scores, labels = torch.rand(300), torch.randint(0, 3, (300,))
    wanted = batched_nms(boxes, scores, labels, 0.4)[:40].tolist()
    assert results.nms(boxes.numpy(), scores.numpy(), labels.numpy(), 0.4, 40) == wanted


@pytest.mark.parametrize('task', ['detector', 'boxes', 'candidates'])
def test_least_score_is_applied_before_nms(task):
    """It gives what it would give afterwards."""
    model, picture = model_of(task), np.zeros((40, 40, 3), np.uint8)
    everything = model.predict(picture)
    score = np.median(everything['scores'])
    best, above = model.predict(picture, score), everything['scores'] >= score
    assert 0 < above.sum() < len(above)
    for name in ('boxes', 'scores', 'labels'):
        np.testing.assert_array_equal(best[name], everything[name][above])


def test_factors_of_scores_come_before_the_least_score():
    maps = outputs_of(describe('detector'))
    factors = [np.zeros((1, 2, *scores.shape[2:]), np.float32) for scores in maps[:2]]
    found = results.decode_boxes([*maps, *factors], DECODE, (0, 0, *SHAPE), 0.4)
    assert len(found['scores']) and (found['scores'] >= 0.4).all()


def test_masks_stay_with_their_boxes():
    about = describe('instances')
    outputs = outputs_of(about)
    model = Model(lambda _: outputs, (1, 3, *SHAPE), about)
    found = model.predict(np.zeros((*SHAPE, 3), np.uint8))
    for box, mask in zip(found['boxes'], found['masks'], strict=True):
        row = np.abs(outputs[0][0] - box).sum(1).argmin()
        (expected,) = paste_masks(outputs[3][0, [row]], outputs[0][0, [row]], SHAPE)
        np.testing.assert_array_equal(mask, expected)


@pytest.mark.parametrize('name', ['nearest', 'box', 'bilinear', 'hamming', 'bicubic', 'lanczos'])
@pytest.mark.parametrize('channels', [1, 3, 4])
def test_as_pillow(name, channels):
    """Levels are those of training, which resizes by mmcv and the same Pillow."""
    mmcv = pytest.importorskip('mmcv')
    pixels = np.random.default_rng(0).integers(0, 256, (90, 120, channels), np.uint8)
    options = dict(backend='pillow', interpolation=name)
    wanted = mmcv.imresize(pixels.squeeze(), (49, 37), **options)
    found = resize(pixels, dict(options, shorter=37, crop=None), (37, 49))
    np.testing.assert_array_equal(found, np.atleast_3d(wanted))


def test_halves_of_pixels_as_mmcv():
    mmcv = pytest.importorskip('mmcv')
    pixels = np.random.default_rng(0).integers(0, 256, (33, 192, 3), np.uint8)
    options = dict(interpolation='bilinear', backend='cv2')
    found = resize(pixels, options, (64, 96))
    np.testing.assert_array_equal(found, mmcv.imrescale(pixels, (96, 64)))


def test_pillow_is_asked_for_by_name(monkeypatch):
    resizing = dict(backend='pillow', interpolation='bicubic', shorter=None, crop=None)
    about = describe('classifier')
    about['inputs'][0]['resize'] = resizing
    model = Model(lambda _: outputs_of(about), (1, 3, *SHAPE), about)
    assert len(model.predict(PIXELS)['scores']) == 3
    with pytest.raises(ValueError, match='no pictures of 5 channels'):
        resize(np.zeros((40, 60, 5), np.uint8), resizing, SHAPE)
    monkeypatch.setitem(sys.modules, 'PIL', None)
    with pytest.raises(ImportError, match='resized by Pillow: pip install pillow'):
        model.predict(PIXELS)


PIXELS = np.random.default_rng(0).integers(0, 256, (30, 40, 3), np.uint8)


def test_pixels_that_are_taken():
    gray = cv2.cvtColor(PIXELS, cv2.COLOR_BGR2GRAY)
    assert check_pixels(PIXELS, 3) is PIXELS
    for pixels in (gray, gray[..., None]):
        np.testing.assert_array_equal(check_pixels(pixels, 3), np.stack([gray] * 3, 2))
        np.testing.assert_array_equal(check_pixels(pixels, 1), gray[..., None])
    np.testing.assert_array_equal(check_pixels(PIXELS, 1), gray[..., None])
    assert check_pixels(np.zeros((3, 4, 5), np.uint8), 5).shape == (3, 4, 5)
    for channels in (1, 5):
        model = model_of('classifier', channels=channels)
        assert len(model.predict(np.zeros((20, 30, channels), np.uint8))['scores']) == 3


@pytest.mark.parametrize(
    ('pixels', 'words'),
    [
        (None, 'got NoneType: did the camera give a picture'),
        (PIXELS / 255, 'got float64'),
        (PIXELS.astype(np.uint16), 'got uint16'),
        (np.full((3, 3, 3), np.nan), 'got float64'),
        (PIXELS[:0], r'got uint8 \(0, 40, 3\)'),
        (PIXELS[..., :2], r'got uint8 \(30, 40, 2\)'),
        (np.zeros((30, 40, 4), np.uint8), r'got uint8 \(30, 40, 4\)'),
        (PIXELS[None], r'got uint8 \(1, 30, 40, 3\)'),
        ([[1, 2]], 'got list'),
    ],
)
def test_other_pixels(pixels, words):
    with pytest.raises(ValueError, match=rf'uint8 pixels \(H, W, 3\) in BGR.* {words}'):
        model_of('classifier').predict(pixels)


def test_pictures(tmp_path):
    cv2.imwrite(str(tmp_path / 'é.png'), PIXELS)
    np.testing.assert_array_equal(read_picture(tmp_path / 'é.png'), PIXELS)
    assert read_picture(tmp_path / 'é.png', 1).shape == (30, 40, 1)
    for name in ('empty.png', 'text.png'):
        (tmp_path / name).write_text('text' * (name == 'text.png'))
        with pytest.raises(ValueError, match=f'{name} is not a picture'):
            read_picture(tmp_path / name)
    with pytest.raises(FileNotFoundError, match='is not a file'):
        read_picture(tmp_path)


@pytest.mark.parametrize('size', [(1, 1000), (1000, 1), (1, 1)])
def test_thin_pictures(size):
    """A side that rounds to 0 is 1."""
    image, place = prepare(np.zeros((*size, 3), np.uint8), describe('boxes')['inputs'][0], SHAPE)
    assert image.shape == (1, 3, *SHAPE) and min(place[2:]) >= 1
    assert model_of('segmentor').predict(np.zeros((*size, 3), np.uint8))['labels'].shape == size


def test_normalization_and_padding():
    """RGB of pixels from 0 to 255, normalized, then padded on all sides."""
    taken = describe('boxes')['inputs'][0]
    taken.update(kind='tensor', dtype='float32', mean=[1.0, 2.0, 3.0], std=[4.0, 5.0, 6.0])
    taken.update(padding=[7.0, 8.0, 9.0], letterbox='center', resize=None)
    image, place = prepare(PIXELS[:10, :20], taken, SHAPE)
    assert place == (11, 14, 10, 20) and image.dtype == np.float32
    wanted = (PIXELS[:10, :20, ::-1].astype(np.float32) - [1, 2, 3]) / [4, 5, 6]
    np.testing.assert_allclose(image[0, :, 11:21, 14:34].transpose(1, 2, 0), wanted, atol=1e-6)
    image[0, :, 11:21, 14:34] = np.nan
    for channel, value in enumerate(taken['padding']):
        assert {*image[0, channel][np.isfinite(image[0, channel])]} == {value}


def test_pictures_of_another_size():
    """A ``ResizeEdge`` without a crop; the file would see a corner. Small ones are padded."""
    taken = dict(describe('boxes')['inputs'][0], resize=dict(shorter=40))
    with pytest.raises(ValueError, match='40x80, the file takes 32x48: give the pipeline'):
        prepare(np.zeros((20, 40, 3), np.uint8), taken, SHAPE)
    taken['resize'] = dict(shorter=16, crop=SHAPE)
    assert prepare(np.zeros((20, 40, 3), np.uint8), taken, SHAPE)[1] == (0, 0, 16, 32)


@pytest.mark.parametrize('letterbox', ['top-left', 'center'])
@pytest.mark.parametrize('size', [(75, 140), (160, 100)])
def test_results_are_in_pixels_of_the_picture(size, letterbox):
    """The program finds what is white."""
    picture = np.zeros((*size, 3), np.uint8)
    picture[15:65, 30:90] = 255

    def find_box(image):
        rows, columns = (image[0, 0] > 127).nonzero()
        box = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
        boxes, scores = np.zeros((1, 5, 4), np.float32), np.zeros((1, 5), np.float32)
        boxes[0, 0], scores[0, 0] = box, 1
        return [boxes, scores, np.zeros((1, 5), np.int32)]

    about = describe('boxes')
    about['inputs'][0].update(letterbox=letterbox, padding=[0] * 3)
    found = Model(find_box, (1, 3, *SHAPE), about).predict(picture)['boxes']
    pixel = max(np.divide(size, SHAPE))  # of the file, in those of the picture
    np.testing.assert_allclose(found, [[30, 15, 90, 65]], atol=pixel)
    about = describe('labels')
    about['inputs'][0].update(letterbox=letterbox)
    model = Model(lambda image: [(image[:, 0] > 127).astype(np.uint8)], (1, 3, *SHAPE), about)
    assert (model.predict(picture)['labels'] == picture[..., 0] // 255).mean() > 0.95


def test_labels_stay_inside_and_grow(monkeypatch):
    """Text has a background, and a size that suits the picture, at each border."""
    results = dict(names=['cat'], labels=np.zeros(1, int), scores=np.ones(1, np.float32))
    heights = []
    for side in (300, 3000):
        for corner in ((0, 0), (side - 9, 0), (0, side - 9), (side - 9, side - 9)):
            box = np.array([[*corner, corner[0] + 8, corner[1] + 8]], np.float32)
            gray = np.full((side, side, 3), 99, np.uint8)
            drawn = drawing.draw(gray, dict(results, boxes=box), [[250, 0, 0]])
            rows, columns = (drawn != 99).any(2).nonzero()
            heights.append(np.ptp(rows) + 1)
            assert np.ptp(columns) > np.ptp(rows)  # a line of text, not a part of it
    assert min(heights[4:]) > 5 * max(heights[:4])
    drawn = drawing.draw(gray[:40, :40], dict(results, boxes=box), [[250, 0, 0]])
    assert drawn.shape == (40, 40, 3)  # where no text fits


def test_letters_that_opencv_does_not_draw(monkeypatch):
    """Pillow draws them if it has a font; otherwise they are escapes."""
    monkeypatch.setattr(drawing, 'FONTS', ('no.ttf', 'DejaVuSans.ttf'))
    try:
        ImageFont.truetype('DejaVuSans.ttf')
    except OSError:
        pytest.skip('the system has no DejaVuSans.ttf')
    escaped = drawing._draw_text(r'\u043a\u043e\u0442', 2)
    drawn = drawing._draw_text('кот', 2)
    assert drawn.shape[1] < escaped.shape[1] / 3 and drawn.max() == 1
    np.testing.assert_array_equal(drawing._draw_text('\U0010fffd', 2).shape[0], escaped.shape[0])
    monkeypatch.setitem(sys.modules, 'PIL', None)
    np.testing.assert_array_equal(drawing._draw_text('кот', 2), escaped)


@pytest.mark.parametrize('turn', range(1, 9))
@pytest.mark.parametrize('ending', ['webp', 'jpg', 'png'])
def test_orientation(turn, ending, tmp_path):
    """EXIF data turn pictures of all formats, with each OpenCV, unless the loader ignores them."""
    exif = Image.Exif()
    exif[274] = turn
    coarse = np.random.default_rng(0).integers(0, 256, (2, 3, 3), np.uint8)
    picture = Image.fromarray(np.kron(coarse, np.ones((20, 20, 1), np.uint8)))
    picture.save(tmp_path / f'a.{ending}', exif=exif, quality=95)
    wanted = np.array(ImageOps.exif_transpose(Image.open(tmp_path / f'a.{ending}')))[..., ::-1]
    for color_type, expected in (('color', wanted), ('color_ignore_orientation', picture)):
        pixels = read_picture(tmp_path / f'a.{ending}', 3, dict(color_type=color_type))
        assert pixels.shape == np.shape(expected)
        if expected is wanted:
            assert np.abs(pixels.astype(int) - wanted).mean() < 2


def test_damaged_exif_data():
    """Any bytes are read without an error."""
    data = io.BytesIO()
    exif = Image.Exif()
    exif[274] = 6
    Image.new('RGB', (4, 4)).save(data, 'webp', exif=exif)
    good, draw = data.getvalue(), np.random.default_rng(0)
    assert read_webp_turn(good) == 6
    for end in range(len(good)):
        assert read_webp_turn(good[:end]) in (1, 6)
        damaged = bytearray(good)
        damaged[draw.integers(12, len(good))] = draw.integers(256)
        assert 1 <= read_webp_turn(bytes(damaged)) <= 8
