"""The page in Chromium: figures arrive, and what it shows is what the toolboxes see."""

import json
import os
import re
import shutil
from pathlib import Path

import cv2
import numpy as np
import pandas as pd
import pytest
import torch
import torchvision
from helpers import ROOT, run
from PIL import Image

from mmcare.export.evaluate import ResizeToFit

SHAPE, HERE = (64, 96), Path(__file__).parent
PHOTOS = sorted((ROOT.parent / 'shared/data/pennfudan_coco/val2017').glob('*'))[:2]


def until(page, pattern, id='status'):
    """Wait until a text on the page matches, and return it."""
    script = '([id, pattern]) => RegExp(pattern).test(document.getElementById(id).textContent)'
    page.wait_for_function(script, arg=[id, pattern], timeout=60_000)
    return page.text_content(f'#{id}')


def measure(page, rounds, *backends):
    page.fill('#rounds', str(rounds))
    for backend in backends:
        page.check(f'#backends input[value={backend}]')
    page.click('#measure')


def rows_of(page):
    """Read the table by its attributes."""
    names = ('name', 'engine', 'median', 'deviation')
    rows = page.query_selector_all('#results tr[data-name]')
    return pd.DataFrame({one: row.get_attribute(f'data-{one}') for one in names} for row in rows)


@pytest.fixture(scope='module')
def photos(tmp_path_factory):
    """Write two photographs, or drawings where none are, and one that EXIF turns upright."""
    noise = np.random.default_rng(0).integers(0, 256, (12, 16, 3), np.uint8)
    images = [Image.open(path).convert('RGB') for path in PHOTOS] or [
        Image.fromarray(noise).resize(size, 2) for size in ((417, 301), (300, 420))
    ]
    turned = Image.Exif()
    turned[0x0112] = 6
    files = [tmp_path_factory.mktemp('photos') / f'{number}.jpg' for number in range(3)]
    for file, image, exif in zip(files, [*images, images[0]], [None, None, turned], strict=True):
        image.save(file, quality=95, **dict(exif=exif) if exif else {})
    return files


def test_figures_arrive(exported, serve, phone, tmp_path, capfd):
    tflite, onnx, source = exported('retinanet', 'backbone')
    page = phone(serve(tflite, onnx, source=source, secure=True))
    measure(page, 4, 'threads')
    assert until(page, '^(done|error)') == 'done'
    until(page, 'Sent', 'sent')
    rows = rows_of(page)
    engines = ['litert-wasm', 'onnxruntime-wasm', 'litert-threads', 'onnxruntime-threads']
    assert list(rows['engine']) == engines and (rows['deviation'].astype(float) < 1e-5).all()
    (file,) = (tmp_path / 'out').iterdir()
    assert re.fullmatch(r'\d{8}-\d{6}_.*Chromium.*\.json', file.name)
    recording = json.loads(file.read_text())
    times = [recording['milliseconds'][engine][tflite.stem] for engine in engines]
    assert np.median(times, 1) == pytest.approx(rows['median'].astype(float), rel=1e-3)
    written = pd.DataFrame(recording['rows'])
    assert (written['against'] == 'PyTorch').all() and np.shape(times) == (4, 4)
    assert written['ratio'][1] == pytest.approx(np.median(np.divide(*times[1::-1])), rel=1e-3)
    assert tflite.name in capfd.readouterr().out


def test_stop_and_errors(exported, serve, phone, tmp_path):
    """Rounds end when asked; what fails is a sentence, and the page goes on."""
    tflite, onnx, _ = exported('retinanet', 'backbone')
    lonely, broken = (Path(shutil.copy(onnx, tmp_path / name)) for name in ('a.onnx', 'b.onnx'))
    server = serve(lonely, broken)
    broken.write_bytes(b'no program')
    page = phone(server)
    assert 'No report' in page.text_content('#files')
    measure(page, 1000)
    until(page, 'measuring 1 files')
    page.wait_for_function("document.querySelector('#progress').value > 0.01")
    page.click('#stop')
    until(page, '^stopped')
    assert list(rows_of(page)['median'].astype(bool)) == [True, False]
    measure(page, 2)
    assert 'b.onnx, onnxruntime-wasm' in until(page, '^error')
    until(page, 'Sent', 'sent')  # of the one that could be measured
    (file,) = (tmp_path / 'out').iterdir()
    assert list(json.loads(file.read_text())['left_out']) == ['b, onnxruntime-wasm']
    page.set_input_files('#photo', __file__)
    assert 'No report' in until(page, '.', 'why')
    page = phone(serve(tflite))
    page.set_input_files('#photo', __file__)
    assert 'test_page.py cannot be decoded' in until(page, '^error')


def test_computer_gone_and_back(exported, serve, phone, tmp_path):
    _, onnx, _ = exported('retinanet', 'backbone')
    server = serve(onnx)
    page = phone(server)
    measure(page, 150)
    until(page, '^measuring')
    server.shutdown()
    server.server_close()
    until(page, '^done')
    until(page, 'stay here', 'sent')
    assert not (tmp_path / 'out').exists()
    serve(onnx, port=server.server_address[1]).token = server.token
    page.reload()
    until(page, 'Sent', 'sent')
    assert len(list((tmp_path / 'out').iterdir())) == 1


@torch.no_grad()
@pytest.mark.parametrize('task', ['segmentation', 'retinanet', 'rtmdet'])
def test_seen_as_by_the_toolbox(task, exported, serve, phone, photos):
    """A photo becomes mmcv's tensor; from a tensor come mmseg's map and mmdet's boxes."""
    *files, source = exported(task)
    page, model = phone(serve(*files)), source.network.model
    mean, std = np.float32([source.normalization.mean, source.normalization.std])
    for photo in photos:
        image = ResizeToFit(scale=SHAPE[::-1]).transform(dict(img=cv2.imread(str(photo))))['img']
        tensor, (height, width) = torch.zeros(1, 3, *SHAPE), image.shape[:2]
        tensor[0, :, :height, :width] = torch.tensor((image[..., ::-1] - mean) / std).permute(
            2, 0, 1
        )
        page.set_input_files('#photo', photo)
        assert until(page, '^(done|error)') == 'done' and page.is_visible('#seen')
        assert page.query_selector_all('#legend li') and page.text_content('#steps')
        sample = dict(img_shape=(height, width))
        for number, layout in enumerate([(0, 2, 3, 1), (0, 1, 2, 3)]):
            flat = tensor.permute(layout).flatten().tolist()
            found = page.evaluate((HERE / 'seen.js').read_text(), [number, flat, [height, width]])
            assert found['size'] == [height, width]
            assert np.abs(np.subtract(found['prepared'], flat)).max() * std.min() < 1.1  # grey
            if task == 'segmentation':
                sample = dict(img_shape=SHAPE)
                logits = model.decode_head.predict(model.extract_feat(tensor), [sample], {})
                assert (logits.argmax(1).flatten().numpy() == found['seen']).mean() > 0.99
                continue
            (boxes,) = model.bbox_head.predict_by_feat(*model(tensor), batch_img_metas=[sample])
            wanted = torch.cat([boxes.bboxes, boxes.scores[:, None], boxes.labels[:, None]], 1)
            assert len(found['seen']) == len(wanted) > 0
            for row in wanted:  # those with equal scores may change places
                apart = (torch.tensor(found['seen']) - row).abs()
                same = (apart[:, :4] < 0.5).all(1) & (apart[:, 4] < 1e-3) & (apart[:, 5] == 0)
                assert same.any()


def test_classes_stages_and_looks(exported, serve, phone, photos, tmp_path):
    """Nothing is wider than the screen; the pictures are for the eye."""
    page = phone(serve(exported('classification')[0], exported('retinanet', 'backbone')[1]))
    measure(page, 1)
    until(page, '^done')
    page.set_input_files('#photo', photos[0])
    page.wait_for_selector('#legend meter')
    until(page, '^done')
    page.select_option('#model', index=1)
    until(page, 'stage4: channel', 'legend')
    folder = Path(os.environ.get('PICTURES', tmp_path))
    for width, height in ((390, 844), (1280, 800)):
        for scheme in ('light', 'dark'):
            page.set_viewport_size(dict(width=width, height=height))
            page.emulate_media(color_scheme=scheme)
            page.screenshot(path=folder / f'phone_{width}_{scheme}.png', full_page=True)
            assert page.evaluate('document.documentElement.scrollWidth') <= width


def test_webgpu_in_software(exported, serve, phone):
    page = phone(serve(*exported('retinanet', 'backbone')[:2]))
    if page.is_disabled('#backends input[value=webgpu]'):
        pytest.skip('no adapter of WebGPU')
    page.uncheck('#backends input[value=wasm]')
    measure(page, 1, 'webgpu')
    assert until(page, '^(done|error)') == 'done'
    rows = rows_of(page)
    assert list(rows['engine']) == ['litert-webgpu', 'onnxruntime-webgpu']
    assert (rows['deviation'].astype(float) < 1e-5).all()


def test_numbers_in_node(tmp_path):
    """Statistics and NMS are NumPy's and torchvision's."""
    if shutil.which('node') is None:
        pytest.skip('no node')
    values = np.random.default_rng(0).gamma(2, size=(3, 20))
    corners = torch.rand(200, 2) * 50
    boxes = torch.cat([corners, corners + torch.rand(200, 2) * 30], 1)
    scores, labels = torch.rand(200), torch.randint(3, (200,))
    keep = torchvision.ops.batched_nms(boxes, scores, labels, 0.4)
    expected = dict(
        values=values.tolist(),
        quantiles=np.quantile(values[0], [0.25, 0.5, 0.75]).tolist(),
        ratio=np.median(values[0] / values[1]),
        boxes=list(zip(boxes.tolist(), scores.tolist(), labels.tolist(), strict=True)),
        kept=boxes[keep].tolist(),
        deviation=float((np.abs(values - values[::-1]).max(1) / values.max(1)).max()),
    )
    file = tmp_path / 'expected.json'
    file.write_text(json.dumps(expected))
    done = run('node', '--test', HERE / 'numbers.test.mjs', EXPECTED=str(file))
    assert 'pass 4' in done.stdout
