"""The page in Chromium, and its server: figures arrive; predictions equal the toolboxes'."""

import asyncio
import http.server
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

import cv2
import mmcv
import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
import torchvision
from contents import RUNTIMES, gather
from helpers import ROOT, run
from onnx import helper, load, save
from PIL import Image
from serve import PhoneServer
from toy_configs import sure_model

from mmcare.export import export_model, open_exported
from mmcare_runtime.masks import paste_masks
from mmcare_runtime.prepare import prepare, resize
from mmcare_runtime.results import decode_boxes, read_labels

SHAPE, HERE = (64, 96), Path(__file__).parent
SERVE = 'python', HERE.parent / 'serve.py'
PHOTOS = sorted((ROOT.parent / 'shared/data').rglob('*.jpg'))
CHROMIUM = shutil.which('chromium') or shutil.which('google-chrome')
OPTIONS = ['--no-sandbox', '--enable-unsafe-webgpu', '--use-webgpu-adapter=swiftshader']
OPTIONS += ['--use-fake-device-for-media-stream', '--use-fake-ui-for-media-stream']
# Refuses the small modules with which a runtime asks for relaxed SIMD.
OLD_BROWSER = """const known = WebAssembly.instantiate;
WebAssembly.instantiate = (code, ...rest) =>
  code.length < 99 ? Promise.reject(new Error('unknown')) : known(code, ...rest);"""
RECORDING = dict(
    settings=dict(shape=[64, 96], runs=3),
    milliseconds={'litert-webgpu-float16': dict(a=[1, 2, 3])},
    rows=[dict(file='a.tflite', engine='litert-webgpu-float16', ms=2.0)],
)


@pytest.fixture(scope='module')
def exported(tmp_path_factory):
    """Export a thin network once: .tflite and .onnx, or one of them, and the one in PyTorch."""
    pytest.importorskip('litert_torch')

    @cache
    def export(task, part='model', letterbox='top-left', **of_litert):
        folder, files = tmp_path_factory.mktemp(task), []
        changes = {'model.data_preprocessor.bgr_to_rgb': False} if task == 'rtmdet' else {}
        source = sure_model(task, folder, part, **changes)
        kinds = dict(rtmdet=['onnx'], classification=['litert'])
        for kind in kinds.get(task, ['litert', 'onnx']):
            options = of_litert if kind == 'litert' else {}
            options = dict(options, letterbox=letterbox)
            report = export_model(source, folder, SHAPE, (kind,), **options)
            files.append(folder / report[kind]['file'])
        return *files, source

    return export


@pytest.fixture(scope='module')
def photos(tmp_path_factory):
    """Write three photographs, or noise where none are; EXIF turns the last one."""
    folder, turned = tmp_path_factory.mktemp('photos'), Image.Exif()
    turned[0x0112] = 6
    for number, exif in enumerate((b'', b'', turned)):
        image = Image.open(PHOTOS[number]) if PHOTOS else Image.effect_noise((417, 301), 64)
        image.convert('RGB').save(folder / f'{number}.jpg', quality=95, exif=exif)
    return sorted(folder.iterdir())


@pytest.fixture
def serve(tmp_path):
    """Start servers for files, or for contents; results go to ``out``."""
    stops = []

    def start(*files, contents=None, source=None, host='127.0.0.1', port=0, secure=False):
        contents = contents or gather(files, model=source)
        server = PhoneServer(contents, tmp_path / 'out', host, port, secure)
        loop = asyncio.new_event_loop()
        serving = loop.create_task(server.serve_forever())
        thread = Thread(target=loop.run_until_complete, args=(asyncio.wait([serving]),))
        thread.start()

        def stop():
            if thread.is_alive():
                loop.call_soon_threadsafe(serving.cancel)
                thread.join()

        server.stop_serving = stop
        stops.append(stop)
        return server

    yield start
    for stop in stops:
        stop()


@pytest.fixture
def phone():
    """Open an address in Chromium, at a phone's size; the page may ask no other host."""
    playwright = pytest.importorskip('playwright.sync_api')
    if CHROMIUM is None or not RUNTIMES.exists():
        pytest.skip('no Chromium (apt-get install chromium), or no runtimes (make phone)')
    with playwright.sync_playwright() as started:
        here, wrong, asked = ('http://127.0.0.1:', 'https://127.0.0.1:', 'blob:', 'data:'), [], []
        options = dict(ignore_https_errors=True, viewport=dict(width=390, height=844))

        def visit(url, *args, script=''):
            chromium = started.chromium.launch(executable_path=CHROMIUM, args=[*OPTIONS, *args])
            page = chromium.new_page(**options, permissions=['clipboard-read', 'clipboard-write'])
            page.on('request', lambda got: got.url.startswith(here) or wrong.append(got.url))
            page.on('response', lambda got: asked.append(got.url) if got.ok else None)
            page.on('pageerror', lambda error: wrong.append(error))
            page.add_init_script(script)
            page.goto(url)
            page.wait_for_selector('#measure:enabled')
            return page

        visit.asked = asked
        yield visit
        assert not wrong


def until(page, pattern, place='#status'):
    return page.wait_for_selector(
        f'{place}:text-matches("{pattern}")', timeout=180_000
    ).inner_text()


def start(page, rounds, backend='wasm'):
    page.fill('#rounds', str(rounds))
    page.check(f'#backends input[value={backend}]')
    page.click('#measure')


def finish(page, status='done'):
    assert until(page, '^(done|error|stopped)').startswith(status)
    rows = page.eval_on_selector_all('tr[data-name]', 'all => all.map((row) => ({...row.dataset}))')
    return pd.DataFrame(rows)


def test_figures_arrive(exported, serve, phone, tmp_path):
    tflite, onnx, source = exported('retinanet', 'backbone')
    page = phone(serve(tflite, onnx, source=source, secure=True).url)
    page.evaluate("""[window.held, window.asked] = [0, 0];
        navigator.wakeLock.request = async () => {
          await new Promise((resolve) => setTimeout(resolve, 50));
          [held, asked] = [held + 1, asked + 1];
          return { release: async () => { held -= 1; } };
        }; 0""")
    page.select_option('#model', index=1)  # without a photo
    page.wait_for_selector('#measure:enabled')
    assert page.text_content('#why') == ''
    start(page, 4, 'threads')
    rows = finish(page)
    page.wait_for_selector('#measure:enabled')
    engines = ['litert-wasm', 'onnxruntime-wasm', 'litert-threads', 'onnxruntime-threads']
    assert list(rows['engine']) == engines and (rows['deviation'].astype(float) < 1e-5).all()
    assert page.evaluate('[held, asked]') == [0, 2]
    large = [url for url in phone.asked if url.endswith('.wasm') or '/files/' in url]
    assert len(set(large)) == len(large) == 5
    until(page, 'Sent', '#sent')
    (file,) = (tmp_path / 'out').iterdir()
    recording = json.loads(file.read_text())
    times = [recording['milliseconds'][engine][tflite.stem] for engine in engines]
    assert np.median(times, 1) == pytest.approx(rows['median'].astype(float), rel=1e-3)
    written = pd.DataFrame(recording['rows'])
    assert (written['against'] == 'PyTorch').all() and np.shape(times) == (4, 4)
    assert written['build'][0] == 'relaxed SIMD, threads: 1'
    assert written['ratio'][1] == pytest.approx(np.median(np.divide(*times[1::-1])), rel=1e-3)
    page.click('#copy')
    until(page, 'Copied', '#sent')
    copied = page.evaluate('navigator.clipboard.readText()')
    assert f'| {tflite.name} | litert-wasm; relaxed SIMD' in copied


def test_live(exported, serve, phone, photos, tmp_path):
    """If the camera films a photograph, the page finds what it finds in the photograph."""
    tflite, _, _ = exported('segmentation', input_kind='tensor')
    image, film = Image.open(photos[0]).resize((640, 480)), tmp_path / 'film.y4m'
    image.save(tmp_path / 'photo.png')
    frame = cv2.cvtColor(np.array(image), cv2.COLOR_RGB2YUV_I420).tobytes()
    film.write_bytes(b'YUV4MPEG2 W640 H480 F30:1 Ip A1:1 C420\nFRAME\n' + frame)
    page = phone(serve(tflite).url, f'--use-file-for-fake-video-capture={film}')
    page.set_input_files('#photo', tmp_path / 'photo.png')
    finish(page)
    photo, _, share = page.text_content('#legend li').rpartition(':')
    page.click('#live')
    page.wait_for_function('document.querySelector("#rate").dataset.frames > 9')
    until(page, 'frames per second, preparation .* network .* drawing', '#rate')
    live, _, now = page.text_content('#legend li').rpartition(':')
    assert live == photo and abs(float(share[:-1]) - float(now[:-1])) < 5
    assert page.evaluate('document.querySelector("#seen").width') <= 390
    assert page.is_disabled('#measure') and float(page.get_attribute('#rate', 'data-fps')) > 0
    track = page.evaluate_handle('document.querySelector("#camera").srcObject.getTracks()[0]')
    page.click('#live')
    page.wait_for_selector('#measure:enabled')
    assert track.evaluate('(one) => one.readyState') == 'ended'
    page.evaluate('delete Navigator.prototype.mediaDevices')
    page.click('#live')
    assert 'camera' in until(page, '^error', '#why')


def test_without_relaxed_simd(exported, serve, phone):
    page = phone(serve(exported('retinanet', 'backbone')[0]).url, script=OLD_BROWSER)
    assert 'LiteRT.js needs relaxed SIMD' in page.text_content('#backends')
    start(page, 1)
    finish(page)
    assert 'litert-wasm; no relaxed SIMD, threads: 1' in page.text_content('#results')


def test_stop_and_errors(exported, serve, phone, tmp_path):
    """Rounds end when asked. Each failure is one sentence, and the page goes on."""
    tflite, onnx, _ = exported('retinanet', input_kind='tensor')
    names = 'a #%.onnx', 'b.onnx', onnx.name
    lonely, broken, undecoded = (Path(shutil.copy(onnx, tmp_path / name)) for name in names)
    program = load(lonely)
    about = json.loads(program.metadata_props.pop().value)
    del about['file_sha256']
    save(program, lonely)  # without a description, so its outputs have no names
    helper.set_model_props(program, {'mmcare': json.dumps(about | {'decode': None})})
    save(program, undecoded)
    server = serve(lonely, broken, undecoded, tflite)
    broken.write_bytes(b'no program')
    page = phone(server.url)
    start(page, 1000)
    page.wait_for_function("document.querySelector('#progress').value > 0.01")
    page.click('#stop')
    rows = finish(page, 'stopped')
    assert list(rows['median'].astype(bool)) == [True, False, True, True]
    assert (rows['deviation'][[0, 2, 3]].astype(float) < 1e-4).all()
    start(page, 2)
    assert 'b.onnx, onnxruntime-wasm' in until(page, '^error')
    until(page, 'Sent', '#sent')  # of those that could be measured
    (file,) = (tmp_path / 'out').iterdir()
    assert list(json.loads(file.read_text())['left_out']) == ['b, onnxruntime-wasm']
    page.set_input_files('#photo', __file__)
    for number, why in ((0, 'does not describe'), (2, 'a way of its own')):
        page.select_option('#model', index=number)
        assert until(page, why, '#why') in page.text_content(f'#files :nth-child({number + 1})')
    page.select_option('#model', index=3)
    assert 'test_phone.py cannot be decoded' in until(page, '^error')


def test_results_stay_until_confirmed(exported, serve, phone, tmp_path, capfd):
    """They stay if the computer is gone, has a full disk or refuses them, and if the page ends."""
    _, onnx, _ = exported('retinanet', 'backbone')
    server, out = serve(onnx), tmp_path / 'out'
    page = phone(server.url)
    start(page, 30, 'threads')
    until(page, '^measuring.*threads')  # after one thread
    out.touch()  # no folder
    page.reload()
    until(page, 'cannot write the results. The results stay', '#sent')
    assert f'{out}' in capfd.readouterr().err
    server.stop_serving()
    until(page, 'does not answer', '#sent')
    out.unlink()
    serve(onnx, port=server.server_address[1]).token = server.token
    until(page, 'Sent', '#sent')
    (file,) = out.iterdir()
    assert list(json.loads(file.read_text())['milliseconds']) == ['onnxruntime-wasm']
    page.evaluate("localStorage['mmcare 1'] = '{}'")
    until(page, 'cannot read these results. The results stay', '#sent')


def test_static(exported, phone, tmp_path):
    """Any host will do; one that sends no headers gives one thread."""
    run(*SERVE, *exported('retinanet', 'backbone')[:2], '--static', tmp_path)
    shutil.copy(tmp_path / 'index.html', tmp_path / 'results')  # as hosts answer unknown paths
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler) as host:
        Thread(target=host.serve_forever, args=(0.05,), daemon=True).start()
        page = phone(f'http://127.0.0.1:{host.server_port}/')
        assert 'threads: the host sends no headers' in page.text_content('#backends')
        start(page, 2)
        assert (finish(page)['deviation'].astype(float) < 1e-5).all()
        host.shutdown()
    assert 'copy them' in page.text_content('#sent')


def test_webgpu_in_software(exported, serve, phone):
    page = phone(serve(*exported('retinanet', 'backbone')[:2]).url)
    if page.is_disabled('#backends input[value=webgpu]'):
        pytest.skip('no adapter of WebGPU')
    page.uncheck('#backends input[value=wasm]')
    start(page, 1, 'webgpu')
    rows = finish(page)
    assert list(rows['engine']) == ['litert-webgpu', 'onnxruntime-webgpu']
    assert (rows['deviation'].astype(float) < 1e-5).all()
    half = '#backends input[value=webgpu-float16]'
    if page.is_disabled(half):  # as with Chromium's own adapter
        assert 'float16: the browser does not have it' in page.text_content('#backends')
        page.eval_on_selector(half, 'box => { box.disabled = false; }')
    page.uncheck('#backends input[value=webgpu]')
    start(page, 1, 'webgpu-float16')
    rows = finish(page, 'error: float16 is for LiteRT.js')
    assert float(rows['deviation'][0]) < 1e-2 and not rows['median'][1]


@pytest.mark.parametrize(
    ('task', 'letterbox'),
    [
        ('segmentation', 'top-left'),
        ('segmentation', 'center'),
        ('retinanet', 'top-left'),
        ('rtmdet', 'center'),
    ],
)
def test_seen_as_in_python(task, letterbox, exported, serve, phone, photos):
    """The page prepares a photo and reads outputs as ``open_exported(file).predict(photo)`` does.

    The latter sees what the toolboxes see, see tests/test_runtime/test_toolboxes.py.
    """
    pixels = task == 'segmentation'  # from 0 to 255, taken by its .tflite; rtmdet takes BGR
    options = dict(letterbox=letterbox, input_kind='image' if pixels else 'tensor')
    *files, _ = exported(task, **options)
    page, programs = phone(serve(*files).url), [open_exported(file) for file in files]
    for photo in photos:
        page.set_input_files('#photo', photo)
        finish(page)
        assert page.query_selector_all('#legend li') and page.text_content('#steps')
        for number, program in enumerate(programs):
            about, (taken,) = program.description, program.description['inputs']
            image, place = prepare(mmcv.imread(photo), taken, SHAPE)
            layout = (0, 2, 3, 1) if taken['layout'] == 'NHWC' else (0, 1, 2, 3)
            flat = image.transpose(layout).flatten().tolist()
            found = page.evaluate((HERE / 'seen.js').read_text(), [number, flat])
            apart = np.abs(np.subtract(found['prepared'], flat)).max()
            assert apart * min(taken['std'] or [1]) < 1.1  # grey levels
            assert found['place'] == [*place]
            outputs = program.run(image)
            if pixels:
                labels = read_labels(outputs[0], SHAPE, (0, 0, *SHAPE), SHAPE)
                assert (labels.flatten() == found['seen']).mean() > 0.999
                continue
            results = decode_boxes(outputs, about['decode'], place)
            wanted = np.column_stack([results[name] for name in ('boxes', 'scores', 'labels')])
            assert len(found['seen']) == len(wanted) > 0
            for row in wanted[wanted[:, 4] > wanted[-1, 4] + 1e-5]:  # equal ones may differ
                apart = np.abs(np.subtract(found['seen'], row))
                assert (apart < [0.5] * 4 + [1e-4, 1e-9]).all(1).any()


def test_classes_stages_and_looks(exported, serve, phone, photos, tmp_path):
    """Nothing is wider than the screen."""
    quantized, _ = exported('classification', precision='int8')
    page = phone(serve(quantized, exported('retinanet', 'backbone')[1]).url)
    start(page, 1)
    assert finish(page)['engine'][0] == 'litert-wasm-int8'
    page.set_input_files('#photo', photos[0])
    finish(page)
    shares = page.eval_on_selector_all('#legend meter', 'all => all.map((one) => one.value)')
    wanted = open_exported(quantized).predict(photos[0])['scores'][:5]
    np.testing.assert_allclose(shares, wanted, atol=1e-3)
    Image.open(photos[0]).resize((2600, 1950)).save(tmp_path / 'large.jpg')
    page.set_input_files('#photo', tmp_path / 'large.jpg')
    page.wait_for_selector('#legend li')
    finish(page)
    for width in (1280, 390):
        page.set_viewport_size(dict(width=width, height=800))
        assert page.evaluate('document.documentElement.scrollWidth') <= width
    read = "({ readPhoto }) => readPhoto(document.querySelector('#photo').files[0])"
    width = page.evaluate(f"import('./prepare.js').then({read}).then((photo) => photo.width)")
    assert width == 1280
    page.select_option('#model', index=1)
    until(page, 'stage4: channel', '#legend li')


@pytest.mark.skipif(not shutil.which('node'), reason='no node')
def test_numbers_in_node(tmp_path):
    values = np.random.default_rng(0).gamma(2, size=(3, 20))
    corners, file = torch.rand(200, 2) * 50, tmp_path / 'expected.json'
    boxes = torch.cat([corners, corners + torch.rand(200, 2) * 30], 1)
    scores, labels = torch.rand(200), torch.randint(3, (200,))
    noise = np.random.default_rng(1).integers(0, 256, (37, 61, 3), np.uint8)
    images, size = Image.fromarray(noise), (35, 21)
    modes = ('bilinear', cv2.INTER_LINEAR), ('bicubic', cv2.INTER_CUBIC)
    resized = [['cv2', n, {}, cv2.resize(noise, size, interpolation=mode)] for n, mode in modes]
    filters = ('bilinear', Image.BILINEAR), ('bicubic', Image.BICUBIC)
    resized += [['pillow', n, {}, np.array(images.resize(size, mode))] for n, mode in filters]
    for more in (dict(share=0.7), dict(shorter=25, crop=[21, 35]), dict(shorter=10, crop=[21, 9])):
        resized.append(['cv2', 'bilinear', more, resize(noise, more, size[::-1])])
    logits = torch.randn(5, 4, 6)
    large = F.interpolate(logits[None], (16, 24), mode='bilinear')[0]
    masks, places = torch.rand(2, 7, 5), [[-4.0, 2.0, 17.0, 21.0], [20.0, 9.0, 47.0, 26.5]]
    pasted = paste_masks(masks.numpy(), np.array(places), (30, 40))
    expected = dict(
        values=values.tolist(),
        masks=masks.flatten().tolist(),
        places=places,
        pasted=pasted.reshape(2, -1).astype(int).tolist(),
        quantiles=np.quantile(values[0], [0.25, 0.5, 0.75]).tolist(),
        boxes=list(zip(boxes.tolist(), scores.tolist(), labels.tolist(), strict=True)),
        kept=boxes[torchvision.ops.batched_nms(boxes, scores, labels, 0.4)].tolist(),
        noise=np.dstack([noise, noise[..., 0] * 0 + 255]).flatten().tolist(),
        resized=[[*how, one.shape, one.flatten().tolist()] for *how, one in resized],
        logits=logits.flatten().tolist(),
        maps=[large.argmax(0).flatten().tolist(), (large[0].sigmoid() > 0.3).flatten().tolist()],
        deviation=float((np.abs(values - values[::-1]).max(1) / values.max(1)).max()),
    )
    file.write_text(json.dumps(expected))
    assert 'pass 8' in run('node', '--test', HERE / 'numbers.test.mjs', EXPECTED=str(file)).stdout


def test_certificate(serve):
    """Apple requires its purpose. It names one address, even if the server listens on all."""
    x509 = pytest.importorskip('cryptography.x509')
    address = urlsplit(serve(contents={'': bytes}, host='0.0.0.0', secure=True).url)
    pem = ssl.get_server_certificate((address.hostname, address.port)).encode()
    extension = x509.load_pem_x509_certificate(pem).extensions.get_extension_for_class
    (purpose,) = extension(x509.ExtendedKeyUsage).value
    assert purpose == x509.ExtendedKeyUsageOID.SERVER_AUTH
    (name,) = extension(x509.SubjectAlternativeName).value
    assert str(name.value) == address.hostname != '0.0.0.0'


def test_bad_input_is_one_sentence(exported, tmp_path):
    tflite, onnx, source = exported('retinanet', 'backbone')
    small = tmp_path / export_model(source, tmp_path, (32, 64), ('onnx',))['onnx']['file']
    runtimes, damaged = tmp_path / 'node_modules', tmp_path / 'a.onnx'
    (runtimes / 'onnxruntime-web/dist').mkdir(parents=True)
    for empty in (runtimes / 'onnxruntime-web/dist/ort.wasm.min.mjs', damaged):
        empty.touch()
    bad = {'is neither': [HERE], 'does not exist': [HERE / 'b.onnx'], 'cannot be': [damaged]}
    bad |= {'are called': [onnx, onnx], 'one --shape': [onnx, small], 'make phone': [tflite]}
    for error, files in bad.items():
        with pytest.raises((OSError, ValueError), match=error):
            gather(files, runtimes)
    done = run(*SERVE, damaged, check=False)
    assert done.returncode == 2 and done.stderr.startswith('error: ') and 'cannot be' in done.stderr
    done = run(*SERVE, tflite, '--source', 's0', 'a.pth', onnx, check=False)
    assert done.returncode == 2 and f'unrecognized arguments: {onnx}' in done.stderr


@pytest.mark.skipif(not RUNTIMES.exists(), reason='no runtimes (make phone)')
def test_it_starts_where_stdout_is_not_unicode(exported):
    onnx = exported('retinanet', 'backbone')[1]
    command = [sys.executable, SERVE[1], onnx, '--http', '--port', '0']
    environment = os.environ | dict(PYTHONIOENCODING='cp1252')
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as server:
        lines = iter(server.stdout.readline, b'')
        assert any(line.startswith(b'http://127.0.0.1') for line in lines)
        server.terminate()


@pytest.fixture
def ask(serve):
    server = serve(contents={'': lambda: b'the page', 'a.js': lambda: b'code'}, secure=True)
    trust = ssl._create_unverified_context()

    def send(method, path, body=b'', token=f'/{server.token}'):
        connection = http.client.HTTPSConnection(*server.server_address, context=trust)
        connection.request(method, token + path, body)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers

    send.address, send.url = server.server_address, server.url
    return send


def test_token_and_names(ask):
    status, body, headers = ask('GET', '/')
    assert (status, body, headers['Content-Type']) == (200, b'the page', 'text/html')
    assert ask('GET', '/a.js?x')[1] == b'code' and ask('PUT', '/a.js')[0] == 405
    for path in ('/../a.js', '/%2e%2e/a.js', '//a.js', '/./a.js', '//etc/passwd', '/b', '/%2fa.js'):
        assert ask('GET', path)[:2] == (404, b''), path
    for token in ('', '/', '/wrong', '/%ff', '/..'):
        for method in ('GET', 'POST', 'PUT', 'DELETE', 'ODD'):
            assert ask(method, '/a.js', token=token)[0] == 404
    assert ask('POST', '/a.js', b'{}')[0] == 404
    with socket.create_connection(ask.address) as stalled:  # holds up nobody
        stalled.sendall(b'\x00nonsense')
        assert ask('GET', '/')[0] == 200


POSTED = dict(time='20260102-030405', device='Phone/../7', recording=RECORDING)


def test_results_are_written_and_nonsense_is_not(ask, tmp_path, capfd):
    good = json.dumps(POSTED).encode()
    nonsense = [b'', b'{}', b'[1]', b'\xff', b'[' * 100_000, b'null', b'{"recording": 1}']
    for old, new in (
        (b'a.tflite', b'a' * 10_000), (b'"runs": 3', b'"runs": 4'), (b'20260102', b'../../up'),
        (b'"litert-webgpu-float16": {', b'"../../up": {'),
        (b'2, 3]', b'2, "x"]'), (b'2, 3]', b'NaN, 3]'), (b'"a": [1, 2, 3]', b''),
        # 4 MB that became 2 GB: each line was indented by its depth.
        (b'{"settings"', b'{"x": ' + b'[' * 900 + b'],[' * 2000 + b']' * 900 + b', "settings"'),
        (b'{"settings"', b'{"x": [' + b'1,' * 300_000 + b'1], "settings"'),
    ):  # fmt: skip
        nonsense.append(good.replace(old, new))
    wide = dict(RECORDING, rows=[dict(RECORDING['rows'][0], **{f'k{i}': 1}) for i in range(900)])
    nonsense.append(json.dumps(POSTED | dict(recording=wide)).encode())  # a table of 900 x 903
    for body in nonsense:
        assert ask('POST', '/results', body)[0] == 400
    assert not (tmp_path / 'out').exists()
    names = [json.loads(ask('POST', '/results', good)[1])['written'] for _ in range(2)]
    assert names[0] == names[1]  # once more, as after a lost answer
    (file,) = (tmp_path / 'out').iterdir()
    assert file.name == names[0] and file.name.startswith('20260102-030405_Phone-7_')
    assert json.loads(file.read_text()) == RECORDING
    assert 'a.tflite litert-webgpu-float16' in capfd.readouterr().out


def test_texts_of_a_phone(ask, tmp_path, capfd):
    """Terminals obey no text, and the address stays secret. Each result has its own file."""
    texts = 'C:\\new', 'a\x1b[2J\x7f', '\u202eb\u200b\nc', f'error: import of {ask.url}x.mjs failed'
    for text in texts:
        recording = dict(RECORDING, rows=[dict(RECORDING['rows'][0], file=text)])
        assert ask('POST', '/results', json.dumps(POSTED | dict(recording=recording)))[0] == 200
    files = [*(tmp_path / 'out').iterdir()]
    printed = capfd.readouterr().out
    assert len(files) == len(texts) and r'C:\new' in printed and r'a\x1b[2J\x7f' in printed
    assert r'\u202eb\u200b\nc' in printed and not set('\x1b\x7f\u202e\u200b') & {*printed}
    urls = urlsplit(ask.url).path.strip('/'), 'TOKEN/x.mjs'
    for text in (printed, ''.join(file.read_text() for file in files)):
        assert [url in text for url in urls] == [False, True]


@pytest.mark.parametrize('limits', [dict(MAX_FILES=1), dict(MAX_BYTES_OF_ALL=500)])
def test_results_have_a_limit(ask, tmp_path, monkeypatch, limits, capfd):
    for name, value in limits.items():
        monkeypatch.setattr(f'serve.{name}', value)
    recordings = RECORDING, RECORDING, dict(RECORDING, versions=['other'])
    bodies = [json.dumps(POSTED | dict(recording=recording)) for recording in recordings]
    assert [ask('POST', '/results', body)[0] for body in bodies] == [200, 200, 507]
    assert len([*(tmp_path / 'out').iterdir()]) == 1
    assert 'too many results' in capfd.readouterr().err


def test_slow_clients_stop_nobody(ask, monkeypatch):
    """Clients of one address send little, or no request; others are still served."""
    head = b'GET / HTTP/1.1\r\nHost: x\r\nx: '
    stalled = [socket.create_connection(ask.address) for _ in range(200)]
    for number, connection in enumerate(stalled):
        with suppress(OSError):  # closed already
            connection.sendall([b'\x16\x03\x01', head][number % 2])
        if number % 50 == 0:
            assert ask('GET', '/')[0] == 200
    assert ask('GET', '/')[0] == 200
    ended = [connection for connection in stalled if has_ended(connection)]
    assert len(stalled) - len(ended) <= 64
    for connection in stalled:
        connection.close()


def has_ended(connection):
    connection.settimeout(0.05)
    try:
        return connection.recv(1) == b''
    except TimeoutError:
        return False
    except OSError:
        return True


def test_requests_have_a_deadline(serve, monkeypatch):
    """Head and body have a deadline; without the token, the body is not read."""
    monkeypatch.setattr('serve.REQUEST_SECONDS', 0.3)
    server = serve(contents={'': lambda: b'the page'})
    post = 'POST {}results HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n'
    path = urlsplit(server.url).path
    for sent, answered in (
        ('GET ', b''),
        (post.format(path, 1000) + '{', b''),
        (post.format('/', 1000), b'HTTP/1.1 404'),
        (post.format(f'{path}x/', 1000), b'HTTP/1.1 404'),
        (post.format(path, 10**9), b'HTTP/1.1 400'),
    ):
        with socket.create_connection(server.server_address, timeout=10) as connection:
            connection.sendall(sent.encode())
            assert connection.makefile('rb').read().startswith(answered), sent


@pytest.mark.skipif(not (RUNTIMES.exists() and shutil.which('node')), reason='no node or runtimes')
def test_sample_in_docs(exported, tmp_path):
    """The JavaScript of docs/app.md finds what ``predict`` does."""
    *_, source = exported('retinanet', input_kind='tensor')
    options = dict(input_kind='image', outputs='decoded')
    report = export_model(source, tmp_path, SHAPE, ('onnx',), **options)['onnx']
    picture = np.random.default_rng(0).integers(0, 256, (*SHAPE, 4), np.uint8)
    pixels = dict(data=picture.flatten().tolist(), width=SHAPE[1], height=SHAPE[0])
    (tmp_path / 'input.json').write_text(json.dumps([report['file'], report, pixels]))
    _, _, sample = (ROOT / 'docs/app.md').read_text().partition('```js\n')
    (tmp_path / 'sample.mjs').write_text(
        f"import {{ readFileSync }} from 'node:fs';\n{sample.partition('```')[0]}"
        "const input = JSON.parse(readFileSync('input.json'));\n"
        'console.log(JSON.stringify(await detect(...input)));\n'
    )
    (tmp_path / 'node_modules').symlink_to(RUNTIMES)
    done = subprocess.run(['node', 'sample.mjs'], cwd=tmp_path, capture_output=True, text=True)
    found = json.loads(done.stdout)
    wanted = open_exported(tmp_path / report['file']).predict(picture[..., 2::-1])
    sure = wanted['scores'] > 0.3
    names = [wanted['names'][label] for label in wanted['labels'][sure]]
    assert [one['name'] for one in found] == names != []
    np.testing.assert_allclose([one['score'] for one in found], wanted['scores'][sure], atol=1e-4)
    boxes = [[*one['box'].values()] for one in found]
    np.testing.assert_allclose(boxes, wanted['boxes'][sure], atol=0.5)
