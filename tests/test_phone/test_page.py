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

SHAPE = (64, 96)
PHOTOS = sorted((ROOT.parent / 'shared/data/pennfudan_coco/val2017').glob('*'))[:2]


def until(page, pattern, id='status'):
    """Wait until a text on the page matches."""
    page.wait_for_function(
        '([id, pattern]) => RegExp(pattern).test(document.getElementById(id).textContent)',
        arg=[id, pattern],
        timeout=60_000,
    )
    return page.text_content(f'#{id}')


def measure(page, rounds, *backends):
    page.fill('#rounds', str(rounds))
    for backend in backends:
        page.check(f'#backends input[value={backend}]')
    page.click('#measure')


def rows_of(page):
    """Read the table by its attributes."""
    attributes = ('name', 'engine', 'median', 'deviation')
    rows = page.query_selector_all('#results tr[data-name]')
    return [{one: row.get_attribute(f'data-{one}') for one in attributes} for row in rows]


@pytest.fixture(scope='module')
def photos(tmp_path_factory):
    """Write photographs, one of them upright and turned by EXIF; drawn ones where none are."""
    folder = tmp_path_factory.mktemp('photos')
    images = [Image.open(path).convert('RGB') for path in PHOTOS]
    if not images:
        noise = np.random.default_rng(0).integers(0, 256, (12, 16, 3), np.uint8)
        images = [Image.fromarray(noise).resize(size, 2) for size in ((417, 301), (300, 420))]
    turned = Image.Exif()
    turned[0x0112] = 6
    files = [folder / f'{number}.jpg' for number in range(3)]
    for file, image in zip(files, images, strict=False):
        image.save(file, quality=95)
    images[0].save(files[2], quality=95, exif=turned)
    return files


def prepared(photo, source):
    """Prepare a photo as the toolboxes do: (1, 3, H, W), and the image's size in it."""
    image = cv2.imdecode(np.fromfile(photo, np.uint8), cv2.IMREAD_COLOR)
    image = ResizeToFit(scale=SHAPE[::-1]).transform(dict(img=image))['img']
    mean, std = np.float32([source.normalization.mean, source.normalization.std])
    tensor = np.zeros((1, 3, *SHAPE), np.float32)
    height, width = image.shape[:2]
    tensor[0, :, :height, :width] = ((image[..., ::-1] - mean) / std).transpose(2, 0, 1)
    return torch.from_numpy(tensor), (height, width)


def test_figures_arrive(exported, serve, phone, tmp_path, capfd):
    tflite, onnx, source = exported('retinanet', 'backbone')
    page = phone(serve(tflite, onnx, source=source, secure=True))
    measure(page, 4, 'threads')
    assert until(page, '^(done|error)') == 'done'
    until(page, 'Sent', 'sent')
    rows = pd.DataFrame(rows_of(page))
    assert list(rows['engine']) == [
        f'{runtime}-{backend}'
        for backend in ('wasm', 'threads')
        for runtime in ('litert', 'onnxruntime')
    ]
    assert (rows['deviation'].astype(float) < 1e-5).all()
    (file,) = (tmp_path / 'out').iterdir()
    assert re.fullmatch(r'\d{8}-\d{6}_.*Chromium.*\.json', file.name)
    recording = json.loads(file.read_text())
    for row in rows.itertuples():
        times = recording['milliseconds'][row.engine][Path(row.name).stem]
        assert len(times) == 4
        assert np.median(times) == pytest.approx(float(row.median), rel=1e-3)
    written = pd.DataFrame(recording['rows'])
    assert (written['against'] == 'PyTorch').all() and (written['ratio'][[0, 2]] == 1).all()
    first, other = (recording['milliseconds'][f'{one}-wasm'] for one in ('litert', 'onnxruntime'))
    ratios = np.divide(other[onnx.stem], first[tflite.stem])
    assert written['ratio'][1] == pytest.approx(np.median(ratios), rel=1e-3)
    assert tflite.name in capfd.readouterr().out


def test_stop_and_errors(exported, serve, phone, tmp_path):
    """Rounds end when asked; what fails is a sentence, and the page goes on."""
    tflite, onnx, _ = exported('retinanet', 'backbone')
    lonely, broken = tmp_path / 'lonely.onnx', tmp_path / 'broken.onnx'
    lonely.write_bytes(onnx.read_bytes())
    broken.write_bytes(onnx.read_bytes())
    server = serve(lonely, broken)
    broken.write_bytes(b'no program')
    page = phone(server)
    assert 'No report' in page.text_content('#files')
    measure(page, 1000)
    until(page, 'measuring 1 files')
    page.wait_for_function("document.querySelector('#progress').value > 0.01")
    page.click('#stop')
    until(page, '^stopped')
    assert float(rows_of(page)[0]['median']) > 0 and not rows_of(page)[1]['median']
    measure(page, 2)
    assert re.match(r'error: .*\(broken.onnx, onnxruntime-wasm\)', until(page, '^(done|error)'))
    until(page, 'Sent', 'sent')  # of the one that could be measured
    (file,) = (tmp_path / 'out').iterdir()
    assert list(json.loads(file.read_text())['left_out']) == ['broken, onnxruntime-wasm']
    page.set_input_files('#photo', tflite.parent / 'retinanet.py')
    assert 'No report' in until(page, '.', 'why')
    page = phone(serve(tflite))
    page.set_input_files('#photo', tflite.parent / 'retinanet.py')
    assert 'retinanet.py cannot be decoded' in until(page, '^error')


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
    again = serve(onnx, port=server.server_address[1], token=server.token)
    page.reload()
    until(page, 'Sent', 'sent')
    assert len(list((tmp_path / 'out').iterdir())) == 1 and again.url == server.url


PREPARE = """async (file) => {
  const { fit, readPhoto, toTensor } = await import('./prepare.js');
  const { shape, files } = await (await fetch('files.json')).json();
  const photo = await readPhoto(document.getElementById('photo').files[0]);
  const small = fit(photo, shape[1], shape[0]);
  return [[small.height, small.width], [...toTensor(small, files[file].input)]];
}"""
DECODE = """async ([number, tensor, [height, width]]) => {
  const { channelsFirst, decodeBoxes, labelMap } = await import('./decode.js');
  const { open } = await import('./engines.js');
  const { shape, files } = await (await fetch('files.json')).json();
  const { runtime, url, input, outputs, report } = files[number];
  const bytes = new Uint8Array(await (await fetch(url)).arrayBuffer());
  const session = await open(runtime, bytes, 'wasm', outputs.map(({ name }) => name));
  const found = await session.run(Float32Array.from(tensor), input.shape);
  const maps = outputs.map((output, i) => [output.name, channelsFirst(found[i], output)]);
  const [, { values, shape: size }] = maps[0];
  if (!report.decode) return [...labelMap(values, size, ...shape)];
  const boxes = decodeBoxes(Object.fromEntries(maps), report.decode, [width, height]);
  return boxes.map(({ box, score, label }) => [...box, score, label]);
}"""


def in_file(tensor, number):
    """Flatten a tensor as a file of the fixtures takes it: LiteRT's first, channels last."""
    return (tensor if number else tensor.permute(0, 2, 3, 1)).flatten().tolist()


@torch.no_grad()
@pytest.mark.parametrize('task', ['segmentation', 'retinanet', 'rtmdet'])
def test_seen_as_by_the_toolbox(task, exported, serve, phone, photos):
    *files, source = exported(task)
    page, model = phone(serve(*files)), source.network.model
    for photo in photos:
        tensor, size = prepared(photo, source)
        page.set_input_files('#photo', photo)
        assert until(page, '^(done|error)') == 'done'
        assert page.is_visible('#seen') and 'network' in page.text_content('#steps')
        assert page.query_selector_all('#legend li')
        for number in range(2):
            found_size, values = page.evaluate(PREPARE, number)
            assert tuple(found_size) == size
            expected = np.float32(in_file(tensor, number))
            grey_levels = np.abs(np.float32(values) - expected) * min(source.normalization.std)
            assert grey_levels.max() < 1.1
            found = page.evaluate(DECODE, [number, in_file(tensor, number), size])
            sample = dict(img_shape=size, ori_shape=size, scale_factor=(1, 1))
            if task == 'segmentation':
                sample |= dict(img_shape=SHAPE)
                logits = model.decode_head.predict(
                    model.extract_feat(tensor), [sample], model.test_cfg
                )
                assert (logits.argmax(1).flatten().numpy() == found).mean() > 0.99
                continue
            (boxes,) = model.bbox_head.predict_by_feat(*model(tensor), batch_img_metas=[sample])
            wanted = torch.cat([boxes.bboxes, boxes.scores[:, None], boxes.labels[:, None]], 1)
            assert len(found) == len(wanted) > 0
            found = torch.tensor(found)
            for row in wanted:  # those with equal scores may change places
                apart = (found - row).abs()
                same = (apart[:, :4] < 0.5).all(1) & (apart[:, 4] < 1e-3) & (apart[:, 5] == 0)
                assert same.any()


def test_classes_and_stages(exported, serve, phone, photos):
    """A classifier has bars, a backbone a picture of each stage."""
    page = phone(serve(exported('classification')[0], exported('retinanet', 'backbone')[1]))
    page.set_input_files('#photo', photos[0])
    until(page, '^done')
    assert len(page.query_selector_all('#legend meter')) == 5
    page.select_option('#model', index=1)
    until(page, 'stage4: channel', 'legend')
    until(page, '^done')
    assert len(page.query_selector_all('#legend li')) == 4


def test_webgpu(exported, serve, phone):
    """In software, so slowly; what it leaves to the CPU is named."""
    page = phone(serve(*exported('retinanet', 'backbone')[:2]))
    if page.is_disabled('#backends input[value=webgpu]'):
        pytest.skip('no adapter of WebGPU')
    page.uncheck('#backends input[value=wasm]')
    measure(page, 1, 'webgpu')
    assert until(page, '^(done|error)') == 'done'
    rows = rows_of(page)
    assert [row['engine'] for row in rows] == ['litert-webgpu', 'onnxruntime-webgpu']
    assert all(float(row['deviation']) < 1e-5 for row in rows)
    lines = ['] Node(s) placed on [CPUExecutionProvider]. Number', 'VerifyEachNode]   Round (one)']
    script = "async (lines) => (await import('./engines.js')).nodesOnCpu(lines)"
    assert page.evaluate(script, lines) == ['Round']


def test_looks(exported, serve, phone, photos, tmp_path):
    """Nothing is wider than the screen; the pictures are for the eye and for the docs."""
    page = phone(serve(*exported('segmentation')[:2]))
    measure(page, 1)
    until(page, '^(done|error)')
    page.set_input_files('#photo', photos[0])
    until(page, '^done')
    folder = Path(os.environ.get('PICTURES', tmp_path))
    for width, height in ((390, 844), (1280, 800)):
        for scheme in ('light', 'dark'):
            page.set_viewport_size(dict(width=width, height=height))
            page.emulate_media(color_scheme=scheme)
            page.screenshot(path=folder / f'phone_{width}_{scheme}.png', full_page=True)
            assert page.evaluate('document.documentElement.scrollWidth') <= width


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
        boxes=[dict(zip(('box', 'score', 'label'), one, strict=True))
               for one in zip(boxes.tolist(), scores.tolist(), labels.tolist(), strict=True)],
        kept=boxes[keep].tolist(),
        deviation=float((np.abs(values - values[::-1]).max(1) / values.max(1)).max()),
    )  # fmt: skip
    (tmp_path / 'expected.json').write_text(json.dumps(expected))
    done = run('node', '--test', Path(__file__).with_name('numbers.test.mjs'),
               EXPECTED=str(tmp_path / 'expected.json'))  # fmt: skip
    assert 'pass 3' in done.stdout
